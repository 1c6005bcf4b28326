"""The work of `qgraph demo`: optimize the tiny model, then run both on text it never saw."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from qgraph import console, pipeline
from qgraph.cli.options import group_size
from qgraph.console import megabytes, print_line, print_table, print_written
from qgraph.explanation_view import render
from qgraph.formats.base import Array
from qgraph.models import tiny
from qgraph.out_file import write_file

_SEQUENCES, _LENGTH = 32, 256


class _Score(NamedTuple):
    """How well a model predicts held-out text: bits per byte, its guesses, seconds."""

    bits: float
    guesses: Array
    seconds: float


def run(folder: Path, groups: str) -> None:
    """Build, quantize, compare, explain; everything lands in `folder`."""
    out = console.output()
    with console.Stages(console.messages()) as stages:
        stages.stage("building the float model")
        source = tiny.build(folder)
        target = source.with_name(f"{source.stem}.int4.onnx")
        result = pipeline.optimize(
            source, target, group=group_size(groups), force=True, progress=stages
        )
        stages.stage("running both on held-out text")
        text = tiny.batches("eval", _LENGTH, _SEQUENCES)
        kept = source.with_name("heldout.jsonl")
        write_file(kept, "".join(f'{{"input_ids": {row.tolist()}}}\n' for row in text).encode())
        scores = [_score(path, text) for path in (source, target)]
        stages.stage("profiling")
        explanation = pipeline.explain(target, profile=True, against=source)
    print_line(out, result.summary, style="bold")
    totals = result.report.totals
    _compare(out, scores, (totals["bytes_before"], totals["bytes_after"]))
    print_line(out, "")
    render(explanation, out, sites=False)
    print_line(out, "")
    print_written(out, [*sorted(source.parent.glob(f"{source.name}*")), *result.files, kept])
    print_line(out, f"next: qgraph explain {target} --profile --against {source}")


def _score(path: Path, text: Array) -> _Score:
    """How well a model predicts `text`, int64 `[sequences, length]`."""
    session = pipeline.open(path)
    start = time.perf_counter()
    logits = session.run({"input_ids": text})["logits"]
    seconds = time.perf_counter() - start
    return _Score(tiny.bits_per_byte(logits, text), logits.argmax(axis=-1), seconds)


def _compare(out: Console, scores: list[_Score], sizes: tuple[int, int]) -> None:
    reference = scores[0]
    rows = [
        [
            name,
            megabytes(size),
            f"{score.bits:.3f}",
            f"{100 * np.mean(score.guesses == reference.guesses):.1f} %",
            f"{score.seconds:.2f}",
        ]
        for name, score, size in zip(("float", "int4"), scores, sizes, strict=True)
    ]
    header = ["model", "weights", "bits per byte", "same next byte", "seconds"]
    print_table(out, header, rows, "lrrrr")
