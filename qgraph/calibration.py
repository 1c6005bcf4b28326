"""Calibration data: samples that a model's activations are measured on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.feeding import Feeder, as_samples, mask_of
from qgraph.mixing import Reader, draw, interleaved
from qgraph.progress import Progress, Silent
from qgraph.sources import Calibrate, Source, Sources, find_sources
from qgraph.text import (
    MASK,
    Sample,
    cut_blocks,
    known_tokens,
    load_tokenizer,
    longest_sample,
    read_samples,
)
from qgraph.tokenizer_fit import check_token, check_tokenizer, small_tokenizer, vocabulary_of
from qgraph.wording import counted

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

    def seen(
        self, statistics: Mapping[str, tuple[int, int]]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a report says of it; channels that are zero on all tokens get a note.

        statistics: per linear the tokens that it was solved on, and how many such channels it has.
        """
        dead = {site: zeros for site, (_, zeros) in statistics.items() if zeros}
        worst = max(dead, key=lambda site: dead[site], default="")
        note = (
            f"calibration: {counted(len(dead), 'linear has', 'linears have')} input channels that "
            f"are zero on all tokens, at most {dead.get(worst)} ({worst}): more, or more varied, "
            "data tells more"
        )
        sites = {
            site: {"tokens": tokens, "dead_channels": zeros}
            for site, (tokens, zeros) in statistics.items()
        }
        content = {"tokens": self.tokens, "sources": list(self.sources), "sites": sites}
        return content, (note,) if dead else ()


def _counted(batch: Arrays, mask: NDArray[np.bool_] | None) -> int:
    """Tokens that count in a batch."""
    if mask is not None:
        return int(mask.sum())
    first = next((array for array in batch.values() if array.ndim >= 2), None)
    if first is None:
        return 1
    rows_of_features = first.ndim == 2 and first.dtype.kind == "f"
    return int(np.prod(first.shape[: 1 if rows_of_features else 2]))


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """What the user gives to calibrate on.

    source: a path, text `SOURCE@WEIGHT`, the word `self`, an array of token ids `[samples, T]`,
        an iterable of feeds, or a list of paths and (source, weight) pairs; see `find_sources`.
    samples, sequence: how many samples at most, and the tokens in a block of text.
    folder: the folder that the model is, if it is one: its tokenizer.json is taken for texts where
        no tokenizer is given.

    Raises:
        InputError: a source that is none, or a tokenizer that is missing or not needed.
    """

    source: Calibrate
    tokenizer: Path | None = None
    samples: int = 64
    sequence: int = 512
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sequence < 2:
            raise InputError(
                f"{counted(self.samples, 'calibration sample')} of "
                f"{counted(self.sequence, 'token')}: wanted at least 1 sample of 2 tokens"
            )
        texts = [source.name for source in self.sources.found if source.kind == "text"]
        if texts and self.encoder is None:
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

    @property
    def encoder(self) -> Path | None:
        """The tokenizer.json for texts: the one that was given, else the model's own."""
        own = self.folder / "tokenizer.json" if self.folder is not None else None
        return self.tokenizer or (own if own is not None and own.is_file() else None)

    @functools.cached_property
    def _loaded(self) -> Any:
        """The tokenizer itself."""
        assert self.encoder is not None
        return load_tokenizer(self.encoder)

    def check_tokenizer(self, runtime: Runtime, model: Path | ir.Model) -> tuple[str, ...]:
        """A note where the texts' tokenizer is far smaller than the model's vocabulary.

        Raises:
            InputError: it cannot be read, or it has more tokens than the model.
            MissingExtra: the package tokenizers is not installed.
        """
        if not any(source.kind == "text" for source in self.sources.found):
            return ()
        known = known_tokens(self._loaded)
        feeder = Feeder(runtime, model, runtime.inputs(model))
        vocabulary = vocabulary_of(model, feeder.tokens)
        check_tokenizer(known, vocabulary)
        return small_tokenizer(known, vocabulary)

    @property
    def longest(self) -> int:
        """Tokens in the longest sample, known before data is read.

        `sequence` for text, and for feeds that come one by one.
        """
        return max(map(self._longest, self.sources.found))

    def _longest(self, source: Source) -> int:
        if source.kind == "file" and isinstance(source.data, Path):
            return longest_sample(source.data, self.samples)
        if source.kind == "feeds" and isinstance(source.data, np.ndarray | list | tuple):
            first = itertools.islice(as_samples(source.data), self.samples)
            return max((_counted(sample, None) for sample in first), default=0)
        return self.sequence

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
        vocabulary = vocabulary_of(model, feeder.tokens)
        feeds = [_fed(feeder, sample, vocabulary) for sample in samples]
        if not feeds and any(source.kind == "text" for source in self.sources.found):
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
        if not feeder.takes(MASK):
            batches = [{k: v for k, v in batch.items() if k != MASK} for batch in found.batches]
            found = dataclasses.replace(found, batches=tuple(batches))
        if not found.tokens:
            raise InputError(
                "the calibration data holds no tokens: all rows are empty, or padding as "
                f"{MASK} says"
            )
        return dataclasses.replace(found, sources=tuple(lines), notes=tuple(notes))

    def _mixed(
        self, runtime: Runtime, model: Path | ir.Model, progress: Progress
    ) -> tuple[list[int], list[Sample], list[str]]:
        """Which source each sample comes from, the samples, and notes on them."""
        from qgraph.self_text import sample_text  # few runs want it

        drawn = draw(self.sources.found, self.samples, self._reader())
        notes = [*self.sources.notes, *drawn.notes]
        if self.tokenizer is None and any(item.kind == "text" for item in self.sources.found):
            notes.append(f"calibration texts are read by the model's own tokenizer: {self.encoder}")
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

        def read(source: Source) -> Iterator[Sample] | None:
            if source.data is None:
                return None
            if not isinstance(source.data, Path):
                return iter(as_samples(source.data))
            if source.kind == "file":
                return read_samples(source.data, self.samples)
            ids, _ = cut_blocks(source.data, self._loaded, self.sequence, self.samples)
            return iter(as_samples(ids))

        return read


def _fed(feeder: Feeder, sample: Sample, vocabulary: int | None) -> Arrays:
    """What the model is run on; and the mask that the data has, whether the model takes it or not.

    Raises:
        InputError: as `Feeder.feeds` and `mask_of` say, or a token outside the vocabulary.
    """
    found = feeder.feeds(sample)
    ids = feeder.ids(sample)
    if ids is not None and ids.size:
        check_token(int(ids.max()), vocabulary)
    if MASK not in sample or (MASK in found and not _is_flags(found[MASK])):
        return found
    rows = feeder.ids(sample)
    if rows is None:
        rows = next((found[name] for name in feeder.needed if name in found), sample[MASK])
    mask = mask_of(sample, rows, feeder)
    return found if MASK in found or mask is None else {**found, MASK: mask}


def _is_flags(mask: NDArray[Any]) -> bool:
    """Whether a mask says of each token if it counts: `[rows, T]`, no floats to add to scores."""
    return mask.ndim == 2 and mask.dtype.kind in "biu"


def _line(source: Source, feeds: Sequence[Arrays]) -> str:
    tokens = sum(_counted(feed, _mask(feed)) for feed in feeds)
    return f"{source.name}: {counted(len(feeds), 'sample')}, {counted(tokens, 'token')}"


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
    if mask is None or not _is_flags(mask) or mask.all():
        return None
    return mask.astype(bool)


def rows_of(array: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """The activation `[…, K]` as float32 rows `[tokens, K]`, without padding."""
    rows = np.asarray(array, np.float32)
    flat = rows.reshape(-1, rows.shape[-1])
    if mask is None or mask.size != len(flat):
        return flat
    return flat[mask.reshape(-1)]
