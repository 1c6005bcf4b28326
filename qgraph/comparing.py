"""`compare`: run two models on the same samples and measure how far apart they are."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph import registry
from qgraph.capturing import Source, runnable
from qgraph.comparison import Comparison
from qgraph.graph import Graph
from qgraph.paired import Pair
from qgraph.progress import Progress, Silent
from qgraph.samples import Data, given_samples
from qgraph.scoring import Scoring
from qgraph.site_errors import with_sites

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime


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
        target: what runs both.

    Raises:
        InputError: unreadable models or data, models that want different inputs or have
            different vocabularies, tokens outside the vocabulary.
        MissingExtra: the runtime, or the package tokenizers, is not installed.
    """
    steps = progress or Silent()
    given = given_samples(data, text, tokenizer, samples, sequence)
    runtime: Runtime = registry.load("target", target)
    steps.stage("loading the models")
    pair = Pair(
        runtime, _title(reference), _title(candidate), runnable(reference), runnable(candidate)
    )
    run = Scoring(pair, llama_cpp)
    notes = run.check_tokenizer(given.vocabulary)
    steps.stage("comparing", total=given.expected or samples)
    first = run.all(itertools.islice(given.samples, samples), steps)
    found = run.result(target)
    steps.finish(f"{found.samples} samples")
    pair.close()
    if sites:
        steps.stage("comparing sites")
        found = with_sites(found, pair, first)
        steps.finish(f"{len(found.sites)} sites")
    short = given.expected is not None and given.expected < samples
    if short and given.vocabulary:
        note = f"the text has {given.expected} blocks of {sequence} tokens, not {samples}"
        notes = (note, *notes)
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _title(source: Source) -> str:
    if isinstance(source, Graph):
        return source.source.name if source.source is not None else _title(source.model)
    if isinstance(source, ir.Model):
        return source.graph.name or "graph"
    return os.fspath(source) if isinstance(source, str | os.PathLike) else type(source).__name__
