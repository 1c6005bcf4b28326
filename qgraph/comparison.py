"""`compare`: what a quantized model costs, measured against the model it was made from."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph import registry
from qgraph._version import __version__
from qgraph.divergence import Divergence, Divergences
from qgraph.errors import InputError, NumericError
from qgraph.feeding import Feeder, as_samples, check_alike, mask_of, shortened
from qgraph.graph import Graph
from qgraph.output_error import OutputError
from qgraph.progress import Progress, Silent
from qgraph.site_outputs import SharedSite, read_graph, shared_sites, vocabulary, with_outputs
from qgraph.text import Sample, read_samples, token_blocks

if TYPE_CHECKING:
    from qgraph.runtimes.base import Arrays, Runtime, Session, ValueSpec

Source = str | os.PathLike[str] | ir.Model | Graph
Data = str | os.PathLike[str] | NDArray[Any] | Iterable[Any]

SCHEMA = 1
SITE_SAMPLES = 4
"""Samples on which the outputs of sites are compared."""
SITE_BYTES = 256_000_000
"""The most that the sites of one model give at once; longer blocks are cut for them."""
_FLOATS = ("float32", "float16", "float64", "float", "double", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OutputRow:
    """One output: ‖y_c − y_r‖/‖y_r‖ and the cosine of its vectors, their mean and the lowest."""

    name: str
    error: float
    cosine: float
    worst_cosine: float


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """One site: `error` is ‖y_c − y_r‖/‖y_r‖ of its output, errors of earlier sites included."""

    name: str
    role: str
    op: str
    candidate_op: str
    format: str | None
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    tokens: of all samples, padding included; 0 for models without tokens.
    divergence: of next-token distributions; None for models without a vocabulary output.
    outputs: for those models, every float output.
    sites: worst first; empty where the models share none, or it was not asked for.
    site_samples, site_tokens: what the sites were run on.
    """

    reference: str
    candidate: str
    target: str
    samples: int
    tokens: int
    second_half: bool
    divergence: Divergence | None
    outputs: tuple[OutputRow, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    site_samples: int = 0
    site_tokens: int = 0
    notes: tuple[str, ...] = ()

    def check(self, max_kl: float) -> None:
        """Require a mean KL divergence of at most `max_kl` nats.

        Raises:
            NumericError: it is larger, or not a number.
            InputError: the models have no vocabulary output.
        """
        if self.divergence is None:
            raise InputError("the models give no logits of a vocabulary: --max-kl has no meaning")
        if not self.divergence.mean <= max_kl:
            raise NumericError(
                f"the mean KL divergence is {self.divergence.mean:.4g} nats, "
                f"more than the {max_kl:g} that are allowed"
            )

    def to_json(self) -> dict[str, Any]:
        """All of it, as schema 1; a number that is not finite is null."""
        content = dataclasses.asdict(self)
        return {"schema": SCHEMA, "version": __version__, **_finite(content)}


def compare(
    reference: Source,
    candidate: Source,
    data: Data | None = None,
    *,
    text: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    samples: int = 20,
    sequence: int = 256,
    llama_cpp: bool = False,
    sites: bool = True,
    target: str = "ort-cpu",
    progress: Progress | None = None,
) -> Comparison:
    """Run two models on the same samples and measure how far apart they are.

    For language models: KL(reference ‖ candidate) of the next-token distributions at every
    position, perplexity of both within each block, top-1 agreement. For others: error and cosine
    of every output. Logits of one sample at a time are in memory, in both models' sessions.

    Args:
        reference: a path or a graph.
        candidate: what is measured against it.
        data: a .npz or .jsonl file, an array of token ids `[samples, T]`, or an iterable of
            feeds (arrays by input name, with a leading batch axis).
        text: instead of `data`, a text file; with `tokenizer`, a tokenizer.json.
        samples: how many samples, or blocks of text, at most.
        sequence: tokens in a block of text.
        llama_cpp: score the second half of each block, as llama.cpp's perplexity tool does.
        sites: also compare the outputs of the sites that both models have, on a few samples.
        target: what runs both.

    Raises:
        InputError: unreadable models or data, models that want different inputs or have
            different vocabularies, tokens outside the vocabulary.
        MissingExtra: the runtime, or the package tokenizers, is not installed.
    """
    steps = progress or Silent()
    given = _samples(data, text, tokenizer, samples, sequence)
    runtime: Runtime = registry.load("target", target)
    steps.stage("loading the models")
    pair = _Pair(runtime, _title(reference), _title(candidate), _model(reference), _model(candidate))
    run = _Run(pair, llama_cpp)
    run.check_tokenizer(given.vocabulary)
    steps.stage("comparing", total=given.expected or samples)
    first = run.all(itertools.islice(given.samples, samples), steps)
    found = run.result(target)
    steps.finish(f"{found.samples} samples")
    pair.close()
    if sites:
        steps.stage("comparing sites")
        found = _with_sites(found, pair, first)
        steps.finish(f"{len(found.sites)} sites")
    short = given.expected is not None and given.expected < samples
    if short and given.vocabulary:
        note = f"the text has {given.expected} blocks of {sequence} tokens, not {samples}"
        found = _noting(found, note)
    return found


@dataclasses.dataclass(frozen=True)
class _Given:
    """Samples, how many there are (where known), and the tokenizer's vocabulary (0: none)."""

    samples: Iterable[Sample]
    expected: int | None = None
    vocabulary: int = 0


def _samples(
    data: Data | None,
    text: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
    samples: int,
    sequence: int,
) -> _Given:
    if (data is None) == (text is None):
        raise InputError("wanted either a text with its tokenizer, or data: one of the two")
    if samples < 1 or sequence < 2:
        raise InputError(
            f"{samples} samples of {sequence} tokens: wanted at least 1 sample of 2 tokens"
        )
    if text is not None:
        if tokenizer is None:
            raise InputError("a text needs its tokenizer: name the model's tokenizer.json")
        ids, known = token_blocks(Path(text), Path(tokenizer), sequence=sequence, samples=samples)
        return _Given(as_samples(ids), len(ids), known)
    if tokenizer is not None:
        raise InputError("data is not tokenized: a tokenizer goes with a text")
    if isinstance(data, str | os.PathLike):
        return _Given(read_samples(Path(data), samples))
    return _Given(as_samples(data))


def _model(source: Source) -> Path | ir.Model:
    if isinstance(source, Graph):
        return source.model
    return source if isinstance(source, ir.Model) else Path(source)


def _title(source: Source) -> str:
    if isinstance(source, Graph):
        return source.source.name if source.source is not None else _title(source.model)
    return (source.graph.name or "graph") if isinstance(source, ir.Model) else os.fspath(source)


class _Side:
    """One of the two models: loaded, and fed."""

    def __init__(self, runtime: Runtime, title: str, model: Path | ir.Model) -> None:
        self.title, self.model, self._runtime = title, model, runtime
        self._session: Session | None = runtime.open(model)
        self.outputs = self._session.outputs
        self.feeder = Feeder(runtime, model, self._session.inputs)

    def run(self, sample: Sample) -> Arrays:
        """All outputs."""
        assert self._session is not None
        return self._session.run(self.feeder.feeds(sample))

    def close(self) -> None:
        self._session = None

    @contextlib.contextmanager
    def exposing(self, values: Iterable[str]) -> Iterator[None]:
        """Let `run` also give `values`, until this ends."""
        with with_outputs(self.model, values) as copy:
            self._session = self._runtime.open(copy)
        try:
            yield
        finally:
            self.close()


class _Pair:
    """Both models, alike in what they want."""

    def __init__(
        self,
        runtime: Runtime,
        reference_title: str,
        candidate_title: str,
        reference: Path | ir.Model,
        candidate: Path | ir.Model,
    ) -> None:
        self.reference = _Side(runtime, reference_title, reference)
        self.candidate = _Side(runtime, candidate_title, candidate)
        check_alike(self.reference.feeder, self.candidate.feeder)

    @property
    def sides(self) -> tuple[_Side, _Side]:
        return self.reference, self.candidate

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def ids_and_mask(self, sample: Sample) -> tuple[NDArray[np.int64] | None, Any]:
        ids = self.reference.feeder.ids(sample)
        masks = [mask_of(sample, ids, side.feeder) for side in self.sides] if ids is not None else [None]
        return ids, masks[0]


class _Run:
    """Scores of all samples: of logits where both models give them, else of every output."""

    def __init__(self, pair: _Pair, llama_cpp: bool) -> None:
        self.pair, self.second_half = pair, llama_cpp
        self.logits = self._find_logits()
        self.vocabulary = self._common_vocabulary()
        self.scores = Divergences(llama_cpp)
        self.outputs = {} if self.logits else self._shared_outputs()
        self.samples, self.tokens = 0, 0

    def _find_logits(self) -> tuple[str, str] | None:
        found = [_logits_output(side) for side in self.pair.sides]
        if None in found:
            if any(found):
                which = self.pair.sides[found.index(None)]
                raise InputError(f"{which.title} gives no logits of a vocabulary, the other does")
            return None
        first, second = found
        assert first is not None and second is not None
        return first, second

    def _common_vocabulary(self) -> int:
        """The vocabulary's size where a model states it, else 0."""
        if self.logits is None:
            return 0
        sizes = [
            next(spec.shape[-1] for spec in side.outputs if spec.name == name)
            for side, name in zip(self.pair.sides, self.logits, strict=True)
        ]
        stated = [size for size in sizes if isinstance(size, int)]
        if len(set(stated)) > 1:
            raise _vocabularies_differ(stated[0], stated[1])
        return stated[0] if stated else 0

    def _shared_outputs(self) -> dict[str, OutputError]:
        names = [
            [spec.name for spec in side.outputs if spec.dtype in _FLOATS] for side in self.pair.sides
        ]
        shared = [name for name in names[0] if name in names[1]]
        if not shared:
            raise InputError(
                "the two models share no float output: the reference gives "
                f"{', '.join(names[0]) or 'none'}, the candidate {', '.join(names[1]) or 'none'}"
            )
        return {name: OutputError() for name in shared}

    def check_tokenizer(self, known: int) -> None:
        """Refuse a tokenizer that knows more tokens than the models."""
        if known and self.logits is None:
            return
        if self.vocabulary and known > self.vocabulary:
            raise InputError(
                f"the tokenizer has {known} tokens, the models' vocabulary {self.vocabulary}: "
                "wanted the tokenizer that belongs to the models"
            )

    def all(self, samples: Iterable[Sample], steps: Progress) -> list[Sample]:
        """Score every sample; the first few are handed back."""
        first: list[Sample] = []
        for sample in samples:
            self._add(sample)
            if len(first) < SITE_SAMPLES:
                first.append(sample)
            steps.advance(self.samples)
        if not self.samples:
            raise InputError("the data holds no samples")
        return first

    def _add(self, sample: Sample) -> None:
        ids, mask = self.pair.ids_and_mask(sample)
        self.samples += 1 if ids is None else len(ids)
        self.tokens += 0 if ids is None else ids.size
        if self.logits is None:
            found = [side.run(sample) for side in self.pair.sides]
            for name, error in self.outputs.items():
                _add_output(error, name, found[0][name], found[1][name], mask)
            return
        if ids is None:
            raise InputError("a sample has no token ids [rows, tokens]")
        self._check_ids(ids)
        logits = [
            side.run(sample)[name]
            for side, name in zip(self.pair.sides, self.logits, strict=True)
        ]
        self._check_logits(logits, ids)
        for row in range(len(ids)):
            kept = None if mask is None else mask[row]
            self.scores.add(logits[0][row], logits[1][row], ids[row], kept)

    def _check_ids(self, ids: NDArray[np.int64]) -> None:
        if not ids.size:
            raise InputError("a sample is empty")
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        if worst < 0 or (self.vocabulary and worst >= self.vocabulary):
            raise InputError(
                f"token {worst} is outside the models' vocabulary of {self.vocabulary}: "
                "the tokens belong to another model"
            )

    def _check_logits(self, logits: Sequence[NDArray[Any]], ids: NDArray[np.int64]) -> None:
        for side, array in zip(self.pair.sides, logits, strict=True):
            if array.shape[:-1] != ids.shape:
                raise InputError(
                    f"{side.title} gives logits {list(array.shape)} for tokens {list(ids.shape)}: "
                    "wanted one distribution a token"
                )
        if logits[0].shape != logits[1].shape:
            raise _vocabularies_differ(logits[0].shape[-1], logits[1].shape[-1])
        self.vocabulary = logits[0].shape[-1]
        if ids.max() >= self.vocabulary:
            self._check_ids(ids)

    def result(self, target: str) -> Comparison:
        """What was found."""
        divergence = self.scores.result() if self.logits is not None else None
        notes = []
        if divergence is not None and not math.isfinite(divergence.mean):
            notes.append(
                "the divergence is not finite: logits are NaN, or the candidate excludes tokens "
                "that the reference does not"
            )
        return Comparison(
            reference=self.pair.reference.title,
            candidate=self.pair.candidate.title,
            target=target,
            samples=self.samples,
            tokens=self.tokens,
            second_half=self.second_half,
            divergence=divergence,
            outputs=tuple(
                OutputRow(name, each.error, each.cosine, each.worst_cosine)
                for name, each in self.outputs.items()
            ),
            notes=tuple(notes),
        )


def _logits_output(side: _Side) -> str | None:
    """The output with a distribution over the vocabulary for each token."""
    if side.feeder.tokens is None:
        return None
    wide = [s for s in side.outputs if len(s.shape) == 3 and s.dtype in _FLOATS]
    named = [spec.name for spec in wide if spec.name.lower().endswith("logits")]
    if named or not wide:
        return named[0] if named else None
    table = vocabulary(read_graph(side.model))
    sized = [spec.name for spec in wide if spec.shape[-1] == table]
    return sized[0] if len(sized) == 1 else None


def _vocabularies_differ(first: int, second: int) -> InputError:
    return InputError(
        f"the reference has a vocabulary of {first}, the candidate one of {second}: "
        "compare models of one kind"
    )


def _add_output(
    error: OutputError, name: str, first: NDArray[Any], second: NDArray[Any], mask: Any
) -> None:
    try:
        error.add(first, second, mask)
    except InputError as differing:
        raise InputError(f"output {name}: {differing}") from None


def _with_sites(found: Comparison, pair: _Pair, samples: Sequence[Sample]) -> Comparison:
    """`found` with the errors of shared sites; where that cannot be done, with a note."""
    reference, candidate = (read_graph(side.model) for side in pair.sides)
    shared = shared_sites(reference, candidate)
    if not shared:
        return _noting(found, "no site has one name in both models: no site was compared")
    width = 4 * sum(site.width for site in shared)
    longest = max(1, SITE_BYTES // max(1, width))
    cut = [shortened(sample, pair.reference.feeder, longest) for sample in samples]
    try:
        with (
            pair.reference.exposing(site.value for site in shared),
            pair.candidate.exposing(site.candidate_value for site in shared),
        ):
            rows, tokens = _site_rows(pair, shared, cut)
    except InputError as error:
        return _noting(found, f"no site was compared: {error}")
    odd = len(shared) - len(rows)
    if odd:
        found = _noting(found, f"{odd} sites give outputs of another shape: not compared")
    return dataclasses.replace(found, sites=rows, site_samples=len(cut), site_tokens=tokens)


def _noting(found: Comparison, note: str) -> Comparison:
    return dataclasses.replace(found, notes=(*found.notes, note))


def _site_rows(
    pair: _Pair, shared: Sequence[SharedSite], samples: Sequence[Sample]
) -> tuple[tuple[SiteRow, ...], int]:
    """The sites of one shape in both, worst first (NaN before all), and on how many tokens."""
    errors = {site: OutputError() for site in shared}
    tokens = 0
    for sample in samples:
        ids, mask = pair.ids_and_mask(sample)
        tokens += 0 if ids is None else ids.size
        first, second = (side.run(sample) for side in pair.sides)
        for site in tuple(errors):
            expected, got = first[site.value], second[site.candidate_value]
            if expected.shape == got.shape:
                errors[site].add(expected, got, mask)
            else:
                del errors[site]
    rows = [
        SiteRow(site.name, site.role, site.op, site.candidate_op, site.format, each.error)
        for site, each in errors.items()
    ]
    rows.sort(key=lambda row: -math.inf if math.isnan(row.error) else -row.error)
    return tuple(rows), tokens


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
