"""`compare`: run two models on the same samples and measure how far apart they are."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import onnx_ir as ir

from qgraph import registry
from qgraph.capturing import Source, runnable
from qgraph.comparison import Comparison
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.paired import Pair
from qgraph.progress import Progress, Silent
from qgraph.samples import Data, given_samples
from qgraph.scoring import Scoring
from qgraph.site_errors import with_sites

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

Way: TypeAlias = Literal["few", "many"]


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
    way: Way | None = None,
    target: str = "ort-cpu",
    progress: Progress | None = None,
) -> Comparison:
    """Run two models on the same samples and measure how far apart they are.

    For language models: KL(reference ‖ candidate) of the next-token distributions at every
    position, perplexity of both within each block, top-1 agreement. For others: error and cosine
    of every output. Logits of one sample at a time are in memory, in both models' sessions.

    Args:
        reference: a path, a graph, or what else `capture` takes without an example.
        candidate: what is measured against it.
        data: a .npz or .jsonl file, an array of token ids `[samples, T]`, or an iterable of
            feeds (arrays by input name, with a leading batch axis).
        text: instead of `data`, a text file; with `tokenizer`, a tokenizer.json or the folder that
            holds it.
        samples: how many samples, or blocks of text, at most.
        sequence: tokens in a block of text.
        llama_cpp: score the second half of each block, as llama.cpp's perplexity tool does.
        sites: also compare the outputs of the sites that both models have, on a few samples.
        way: of a model with two weights for each linear (`purpose="both"`), which of them all
            samples run through; by default each takes the way that its number of rows asks for.
        target: what runs both.

    Raises:
        InputError: unreadable models or data, models that want different inputs or have different
            vocabularies, tokens outside the vocabulary, a way where there is but one.
        MissingExtra: the runtime, or the package tokenizers, is not installed.
    """
    steps = progress or Silent()
    given = given_samples(data, text, tokenizer, samples, sequence)
    runtime: Runtime = registry.load("target", target)
    steps.stage("loading the models")
    titles = _title(reference), _title(candidate)
    few = None if way is None else way == "few"
    pair = Pair(runtime, *titles, runnable(reference), runnable(candidate), few)
    if way is not None and all(side.few is None for side in pair.sides):
        raise InputError(
            f"--way {way}: neither model has two ways by the number of rows, as --for both makes "
            "them: leave it out"
        )
    run = Scoring(pair, llama_cpp)
    notes = run.check_tokenizer(given.vocabulary)
    steps.stage("comparing", total=given.expected or samples)
    first = run.all(itertools.islice(given.samples, samples), steps)
    found = run.result(target)
    steps.finish(f"{found.samples} samples")
    pair.close()
    try:
        ways = [side.ways(first) for side in pair.sides]
        told = _ways(pair, ways)
    except InputError as error:  # figures of the whole are there all the same
        ways, told = (
            [[], []],
            [f"which of two weights the samples ran through is not known: {error}"],
        )
    found = dataclasses.replace(found, notes=(*found.notes, *told))
    if sites:
        steps.stage("comparing sites")
        found = with_sites(found, pair, first, [next(iter(each), None) for each in ways])
        steps.finish(f"{len(found.sites)} sites")
    short = given.expected is not None and given.expected < samples
    if short and given.vocabulary:
        note = f"the text has {given.expected} blocks of {sequence} tokens, not {samples}"
        notes = (note, *notes)
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _ways(pair: Pair, taken: Sequence[Sequence[bool]]) -> list[str]:
    """That a model has two ways, and which one the figures are of.

    taken: by side, see `Side.ways`.
    """
    found = []
    for side, ways in zip(pair.sides, taken, strict=True):
        words = f"{side.title} has two weights for its linears, by the number of rows: "
        if len(set(ways)) == 1:
            rows, others = ("few", "many") if ways[0] else ("many", "few")
            like = "text does that is made token by token" if ways[0] else "a prompt does"
            words += f"these figures are of those that {rows} rows run through, as {like}; "
            found.append(f"{words}--way {others} measures the others")
        elif ways:
            rows = "few" if ways[0] else "many"
            words += f"some samples run through either, and the sites are those of {rows} rows; "
            found.append(f"{words}--way few and --way many measure each alone")
    return found


def _title(source: Source) -> str:
    if isinstance(source, Graph):
        return source.source.name if source.source is not None else _title(source.model)
    if isinstance(source, ir.Model):
        return source.graph.name or "graph"
    return os.fspath(source) if isinstance(source, str | os.PathLike) else type(source).__name__
