"""Calibration data: samples that a model's activations are measured on."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.feeding import Feeder
from qgraph.samples import Data, given_samples
from qgraph.text import MASK

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

BATCH_ROWS = 4
"""Samples that run together where their shapes are equal."""

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Any, Sequence[Mapping[str, NDArray[Any]]]], list[Arrays]]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Batches of a model's inputs, and the callable that runs stages on them.

    batches: complete feeds, one a batch.
    masks: which tokens of each batch count, bool `[rows, T]`, or None where all do.
    """

    batches: tuple[Arrays, ...]
    masks: tuple[NDArray[np.bool_] | None, ...]
    run: Run

    @property
    def tokens(self) -> int:
        """Tokens that count, over all batches."""
        return sum(
            int(mask.sum()) if mask is not None else _tokens(batch)
            for batch, mask in zip(self.batches, self.masks, strict=True)
        )


def _tokens(batch: Arrays) -> int:
    shapes = [array.shape for array in batch.values() if array.ndim >= 2]
    return int(np.prod(shapes[0][:2])) if shapes else 1


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """What the user gives to calibrate on.

    source: a text file (with `tokenizer`), a .npz or .jsonl file, an array of token ids
        `[samples, T]`, or an iterable of feeds.
    samples, sequence: how many samples at most, and the tokens in a block of text.
    """

    source: Data
    tokenizer: Path | None = None
    samples: int = 64
    sequence: int = 512

    def load(self, runtime: Runtime, model: Path | ir.Model) -> Calibration:
        """Read the samples and complete them for `model`.

        Raises:
            InputError: data that cannot be read, does not fit the model, or is empty.
            MissingExtra: text without the package tokenizers.
        """
        data: Data | None = self.source
        text: Path | None = None
        if isinstance(data, str | os.PathLike):
            path = Path(data)
            if path.suffix.lower() not in (".npz", ".jsonl"):
                data, text = None, path
        given = given_samples(data, text, self.tokenizer, self.samples, self.sequence)
        feeder = Feeder(runtime, model, runtime.inputs(model))
        taken = itertools.islice(given.samples, self.samples)
        batches = joined([feeder.feeds(sample) for sample in taken])
        return collect(batches, runtime.run)


def joined(samples: Sequence[Arrays], rows: int = BATCH_ROWS) -> list[Arrays]:
    """Single rows of equal shapes, put together in batches of `rows`."""
    batches: list[list[Arrays]] = []
    for sample in samples:
        last = batches[-1] if batches else []
        single = all(array.ndim and array.shape[0] == 1 for array in sample.values())
        alike = bool(last) and _shapes(last[0]) == _shapes(sample)
        if single and alike and len(last) < rows:
            last.append(sample)
        else:
            batches.append([sample])
    return [
        {name: np.concatenate([item[name] for item in batch]) for name in batch[0]}
        if len(batch) > 1
        else batch[0]
        for batch in batches
    ]


def _shapes(sample: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sample.items()}


def collect(batches: Sequence[Arrays], run: Run) -> Calibration:
    """Calibration from complete feeds; an `attention_mask` among them says what is padding.

    Raises:
        InputError: there are no samples.
    """
    if not batches:
        raise InputError("the calibration data holds no samples")
    masks = tuple(
        None if (mask := batch.get(MASK)) is None or mask.all() else mask.astype(bool)
        for batch in batches
    )
    return Calibration(tuple(batches), masks, run)


def rows_of(array: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """The activation `[…, K]` as float32 rows `[tokens, K]`, without padding."""
    rows = np.asarray(array, np.float32)
    flat = rows.reshape(-1, rows.shape[-1])
    if mask is None or mask.size != len(flat):
        return flat
    return flat[mask.reshape(-1)]
