"""Two models that are run on the same samples, both loaded at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.beside import open_graph
from qgraph.feeding import Feeder, check_alike, mask_of
from qgraph.row_branches import branches
from qgraph.row_unfolding import as_run
from qgraph.site_outputs import read_graph, vocabulary, with_outputs
from qgraph.text import Sample

if TYPE_CHECKING:
    from qgraph.runtimes.base import Arrays, Runtime, Session

Ids: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
FLOATS = ("float32", "float16", "float64", "bfloat16")


class Side:
    """One of the two models: loaded, and fed.

    few: of two ways, by the number of rows, the one that all samples take; None where each sample
        takes its own, or there is but one.
    """

    def __init__(
        self, runtime: Runtime, title: str, model: Path | ir.Model, few: bool | None = None
    ) -> None:
        self.title, self.model, self._runtime = title, model, runtime
        self.few = few if few is not None and branches(read_graph(model).graph) else None
        if self.few is None:
            self._session: Session | None = runtime.open(model, spinning=False)
        else:
            one = as_run(read_graph(model), self.few)
            self._session = open_graph(runtime, one, model)
        self.outputs = self._session.outputs
        self.feeder = Feeder(runtime, model, self._session.inputs)

    def run(self, sample: Sample) -> Arrays:
        """All outputs."""
        assert self._session is not None
        return self._session.run(self.feeder.feeds(sample))

    def ways(self, samples: Sequence[Sample]) -> list[bool]:
        """Whether samples run through what few rows do, of each size the first one, in order.

        Nothing where there is but one way.
        """
        found = branches(read_graph(self.model).graph)
        condition = found[0].inputs[0] if found else None
        if self.few is not None or condition is None or condition.name is None:
            return [] if self.few is None else [self.few]
        fed = (self.feeder.feeds(sample) for sample in samples)
        sizes = [tuple(array.size for array in feeds.values()) for feeds in fed]
        first = dict(zip(sizes[::-1], samples[::-1], strict=True))
        with self.exposing([condition.name]):
            chosen = [first[size] for size in dict.fromkeys(sizes)]
            return [bool(self.run(sample)[condition.name]) for sample in chosen]

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
        few: bool | None = None,
    ) -> None:
        self.reference = Side(runtime, reference_title, reference, few)
        self.candidate = Side(runtime, candidate_title, candidate, few)
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
