"""Two models that are run on the same samples, both loaded at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.feeding import Feeder, check_alike, mask_of
from qgraph.site_outputs import read_graph, vocabulary, with_outputs
from qgraph.text import Sample

if TYPE_CHECKING:
    from qgraph.runtimes.base import Arrays, Runtime, Session

Ids: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
FLOATS = ("float32", "float16", "float64", "bfloat16")


class Side:
    """One of the two models: loaded, and fed."""

    def __init__(self, runtime: Runtime, title: str, model: Path | ir.Model) -> None:
        self.title, self.model, self._runtime = title, model, runtime
        self._session: Session | None = runtime.open(model, spinning=False)
        self.outputs = self._session.outputs
        self.feeder = Feeder(runtime, model, self._session.inputs)

    def run(self, sample: Sample) -> Arrays:
        """All outputs."""
        assert self._session is not None
        return self._session.run(self.feeder.feeds(sample))

    def close(self) -> None:
        """Give the memory back."""
        self._session = None

    @contextlib.contextmanager
    def exposing(self, values: Iterable[str], few: bool | None = None) -> Iterator[None]:
        """Let `run` also give `values`, until this ends; few: of a way, see `with_outputs`."""
        with with_outputs(self.model, values, few) as copy:
            self._session = self._runtime.open(copy, spinning=False)
        try:
            yield
        finally:
            self.close()


class Pair:
    """Both models, alike in what they want."""

    def __init__(
        self,
        runtime: Runtime,
        reference_title: str,
        candidate_title: str,
        reference: Path | ir.Model,
        candidate: Path | ir.Model,
    ) -> None:
        self.reference = Side(runtime, reference_title, reference)
        self.candidate = Side(runtime, candidate_title, candidate)
        check_alike(self.reference.feeder, self.candidate.feeder)

    @property
    def sides(self) -> tuple[Side, Side]:
        """The reference, then the candidate."""
        return self.reference, self.candidate

    def close(self) -> None:
        """Give the memory back."""
        for side in self.sides:
            side.close()

    def ids_and_mask(self, sample: Sample) -> tuple[Ids | None, Mask | None]:
        """The tokens `[rows, T]` of a sample, and where they are no padding."""
        ids = self.reference.feeder.ids(sample)
        if ids is None:
            return None, None
        mask, _ = (mask_of(sample, ids, side.feeder) for side in self.sides)
        return ids, mask


def logits_output(side: Side) -> str | None:
    """The output with a distribution over the vocabulary for each token."""
    if side.feeder.tokens is None:
        return None
    floats = [(spec.name, spec.shape) for spec in side.outputs if spec.dtype in FLOATS]
    return find_logits(floats, side.model)


def find_logits(
    outputs: Iterable[tuple[str, Sequence[object]]], model: Path | ir.Model
) -> str | None:
    """Of the float outputs of a model of tokens (name, shape) the one that holds logits."""
    wide = [(name, shape) for name, shape in outputs if len(shape) == 3]
    named = [name for name, _ in wide if name.lower().endswith("logits")]
    if named or not wide:
        return named[0] if named else None
    table = vocabulary(read_graph(model))
    sized = [name for name, shape in wide if shape[-1] == table]
    return sized[0] if len(sized) == 1 else None
