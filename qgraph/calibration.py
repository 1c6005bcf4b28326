"""Calibration data: samples that a model's activations are measured on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.feeding import Feeder, as_samples
from qgraph.mixing import Reader, draw, interleaved
from qgraph.progress import Progress, Silent
from qgraph.sources import Calibrate, Source, Sources, find_sources
from qgraph.text import MASK, Sample, cut_blocks, load_tokenizer, read_samples

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

BATCH_ROWS = 4
"""Samples that run together where their shapes are equal."""

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Any, Iterable[Mapping[str, NDArray[Any]]]], Iterable[Arrays]]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Batches of a model's inputs, and the callable that runs stages on them.

    batches: complete feeds, one a batch.
    masks: which tokens of each batch count, bool `[rows, T]`, or None where all do.
    sources: a line for each source: its name (no folders), samples and tokens.
    notes: sources that gave less than their share, and files that were left out.
    """

    batches: tuple[Arrays, ...]
    masks: tuple[NDArray[np.bool_] | None, ...]
    run: Run
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that count, over all batches."""
        return sum(map(_counted, self.batches, self.masks))


def _counted(batch: Arrays, mask: NDArray[np.bool_] | None) -> int:
    """Tokens that count in a batch."""
    if mask is not None:
        return int(mask.sum())
    shapes = [array.shape for array in batch.values() if array.ndim >= 2]
    return int(np.prod(shapes[0][:2])) if shapes else 1


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """What the user gives to calibrate on.

    source: a path, text `SOURCE@WEIGHT`, the word `self`, an array of token ids `[samples, T]`,
        an iterable of feeds, or a list of paths and (source, weight) pairs; see `find_sources`.
    samples, sequence: how many samples at most, and the tokens in a block of text.

    Raises:
        InputError: a source that is none, or a tokenizer that is missing or not needed.
    """

    source: Calibrate
    tokenizer: Path | None = None
    samples: int = 64
    sequence: int = 512

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sequence < 2:
            raise InputError(
                f"{self.samples} calibration samples of {self.sequence} tokens: wanted at least "
                "1 sample of 2 tokens"
            )
        texts = [source.name for source in self.sources.found if source.kind == "text"]
        if texts and self.tokenizer is None:
            raise InputError(
                f"the calibration text {texts[0]} needs the model's tokenizer: add --tokenizer "
                "tokenizer.json, or give token ids in a .npz or .jsonl file"
            )
        if self.tokenizer is not None and not texts:
            raise InputError("a tokenizer goes with a calibration text, and there is none")

    @functools.cached_property
    def sources(self) -> Sources:
        """What `source` names."""
        return find_sources(self.source)

    def load(
        self, runtime: Runtime, model: Path | ir.Model, progress: Progress | None = None
    ) -> Calibration:
        """Read or sample the samples, mix them, and complete them for `model`.

        Raises:
            InputError: data that cannot be read, does not fit the model, or is empty; `self`
                for a model that is no language model.
            MissingExtra: text without the package tokenizers.
        """
        origins, samples, notes = self._mixed(runtime, model, progress or Silent())
        feeder = Feeder(runtime, model, runtime.inputs(model))
        feeds = [feeder.feeds(sample) for sample in samples]
        if not feeds and self.tokenizer is not None:
            raise InputError(
                f"the calibration data holds no samples: no text has a block of {self.sequence} "
                "tokens; give a longer text, or a smaller --sequence"
            )
        lines = [
            _line(source, [feed for at, feed in zip(origins, feeds, strict=True) if at == number])
            for number, source in enumerate(self.sources.found)
            if number in origins
        ]
        found = collect(joined(feeds), runtime.stream)
        return dataclasses.replace(found, sources=tuple(lines), notes=tuple(notes))

    def _mixed(
        self, runtime: Runtime, model: Path | ir.Model, progress: Progress
    ) -> tuple[list[int], list[Sample], list[str]]:
        """Which source each sample comes from, the samples, and notes on them."""
        from qgraph.self_text import sample_text  # few runs want it

        drawn = draw(self.sources.found, self.samples, self._reader())
        notes = [*self.sources.notes, *drawn.notes]
        streams = [iter(own) for own in drawn.samples]
        for at, source in enumerate(self.sources.found):
            if source.kind == "self" and drawn.counts[at]:
                text = sample_text(runtime, model, drawn.counts[at], self.sequence, progress)
                streams[at] = iter(as_samples(text.ids))
                notes += text.notes
        origins = interleaved(drawn.counts)
        return origins, [next(streams[at]) for at in origins], notes

    def _reader(self) -> Reader:
        """Opens sources, with one tokenizer for all texts."""

        @functools.cache
        def encoder() -> Any:
            assert self.tokenizer is not None
            return load_tokenizer(self.tokenizer)

        def read(source: Source) -> Iterator[Sample] | None:
            if source.data is None:
                return None
            if not isinstance(source.data, Path):
                return iter(as_samples(source.data))
            if source.kind == "file":
                return read_samples(source.data, self.samples)
            ids, _ = cut_blocks(source.data, encoder(), self.sequence, self.samples)
            return iter(as_samples(ids))

        return read


def _line(source: Source, feeds: Sequence[Arrays]) -> str:
    tokens = sum(_counted(feed, _mask(feed)) for feed in feeds)
    plural = "" if len(feeds) == 1 else "s"
    return f"{source.name}: {len(feeds)} sample{plural}, {tokens} tokens"


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
    return Calibration(tuple(batches), tuple(map(_mask, batches)), run)


def _mask(batch: Arrays) -> NDArray[np.bool_] | None:
    """Which tokens count; None where all do."""
    mask = batch.get(MASK)
    return None if mask is None or mask.all() else mask.astype(bool)


def rows_of(array: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """The activation `[…, K]` as float32 rows `[tokens, K]`, without padding."""
    rows = np.asarray(array, np.float32)
    flat = rows.reshape(-1, rows.shape[-1])
    if mask is None or mask.size != len(flat):
        return flat
    return flat[mask.reshape(-1)]
