"""`qgraph compare`: what a quantized model costs, in nats."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from qgraph.cli.options import one_of
from qgraph.errors import InputError

if TYPE_CHECKING:
    from qgraph.comparison import Comparison

Reference = Annotated[
    Path, typer.Argument(metavar="REFERENCE", help="The ONNX file that is taken as right.")
]
Candidate = Annotated[
    Path, typer.Argument(metavar="CANDIDATE", help="The ONNX file that is measured against it.")
]
Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A text, cut into blocks of tokens; with --tokenizer."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="The model's tokenizer.json, or the folder that holds it, for --text.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Instead of a text: .npz (one array per input, a sample a row) or .jsonl "
        "(input_ids, attention_mask).",
    ),
]
Samples = Annotated[
    int, typer.Option(metavar="N", min=1, help="At most this many samples, or blocks of text.")
]
Sequence = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a block of text.")]
MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max-kl", metavar="X", min=0.0, help="Exit with status 4 if the mean KL is above this."
    ),
]
LlamaCpp = Annotated[
    bool,
    typer.Option(
        "--llama-cpp", help="Score the second half of each block, as llama.cpp's tool does."
    ),
]
Sites = Annotated[
    bool, typer.Option("--sites/--no-sites", help="Also compare the output of each site.")
]
Way = Annotated[
    str | None,
    typer.Option(
        metavar="few|many",
        callback=one_of(("few", "many")),
        help="Of a --for both model: the weights for few rows (text that is made), or for many "
        "(prompts), whatever the samples have.",
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Every site, not the worst 20 alone.")]
Shape = Annotated[
    str, typer.Option("--format", metavar="table|json", callback=one_of(("table", "json")))
]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Also write all figures as JSON.")
]


def compare(
    reference: Reference,
    candidate: Candidate,
    text: Text = None,
    tokenizer: Tokenizer = None,
    data: Data = None,
    samples: Samples = 20,
    sequence: Sequence = 256,
    max_kl: MaxKl = None,
    llama_cpp: LlamaCpp = False,
    sites: Sites = True,
    way: Way = None,
    every: Every = False,
    format_: Shape = "table",
    report: Report = None,
) -> None:
    """Measure a quantized model: KL divergence, perplexity, agreement, and the error by site."""
    _check_models(reference, candidate)
    _check(text, tokenizer, data)
    _check_report(report, (reference, candidate, text, tokenizer, data))
    from qgraph import comparing, console

    with console.Stages(console.messages()) as stages:
        found = comparing.compare(
            reference,
            candidate,
            data,
            text=text,
            tokenizer=tokenizer,
            samples=samples,
            sequence=sequence,
            llama_cpp=llama_cpp,
            sites=sites,
            way=cast("comparing.Way | None", way),
            progress=stages,
        )
    _print(found, format_, every)
    if report is not None:
        from qgraph.run_notes import write_report

        write_report(report, found.to_json())
        console.print_line(console.messages(), f"wrote {report}")
    if max_kl is not None:
        found.check(max_kl)


def _check_models(*models: Path) -> None:
    """Name a model that is not there before what else is wrong."""
    for path in models:
        if not path.exists():
            from qgraph.onnx_file import require_model

            require_model(path)


def _check(text: Path | None, tokenizer: Path | None, data: Path | None) -> None:
    """Find wrong usage before models are loaded."""
    if (text is None) == (data is None):
        raise InputError("wanted --text FILE with --tokenizer FILE, or --data FILE: one of the two")
    if text is not None and tokenizer is None:
        raise InputError("--text needs --tokenizer FILE, the model's tokenizer.json")
    if data is not None and tokenizer is not None:
        raise InputError("--tokenizer goes with --text; --data is not tokenized")


def _check_report(report: Path | None, inputs: Iterable[Path | None]) -> None:
    if report is None:
        return
    if any(path is not None and path.resolve() == report.resolve() for path in inputs):
        raise InputError(f"--report {report} would overwrite an input: choose another path")
    from qgraph.run_notes import check_report

    check_report(report)


def _print(found: Comparison, shape: str, every: bool) -> None:
    if shape == "json":
        json.dump(found.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from qgraph import comparison_view, console

    comparison_view.render(found, console.output(), every=every)
