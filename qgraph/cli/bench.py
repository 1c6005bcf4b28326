"""`qgraph bench`: how fast a model is at each number of rows, beside others and beside float."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qgraph.cli.options import one_of
from qgraph.errors import InputError
from qgraph.registry import names

if TYPE_CHECKING:
    from qgraph.bench_result import Bench

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2, or a Hugging Face folder.")
]
Against = Annotated[
    list[Path] | None,
    typer.Option(metavar="OTHER", help="Another model to measure beside it; repeatable."),
]
Rows = Annotated[
    str,
    typer.Option(
        metavar="M[,M…]",
        help="Numbers of rows: tokens of one prompt without a cache, else samples of a batch.",
    ),
]
Sites = Annotated[
    bool,
    typer.Option(
        "--sites/--no-sites", help="Also measure one linear of each size and kernel alone."
    ),
]
Rounds = Annotated[int, typer.Option(metavar="N", min=3, help="How often each side has its turn.")]
Threads = Annotated[
    int, typer.Option(metavar="N", min=0, help="Threads within an operator; 0: the runtime's own.")
]
Target = Annotated[
    str,
    typer.Option(metavar="TARGET", callback=one_of(names("target")), help="What runs the models."),
]
Shape = Annotated[
    str, typer.Option("--format", metavar="table|json", callback=one_of(("table", "json")))
]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Also write all figures as JSON.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw them as a PNG.")]


def bench(
    model: Model,
    against: Against = None,
    rows: Rows = "1,4,16,64,256",
    sites: Sites = True,
    rounds: Rounds = 5,
    threads: Threads = 0,
    target: Target = "ort-cpu",
    format_: Shape = "table",
    report: Report = None,
    plot: Plot = None,
) -> None:
    """Measure MODEL's speed by number of rows, beside OTHER models and beside float linears.

    Example: qgraph bench model.int4.onnx --against model.onnx
    """
    others = against or []
    _check_file("--report", report, [model, *others])
    _check_file("--plot", plot, [model, *others])
    wanted = numbers(rows)
    from qgraph import bench_plot, benching, console

    if plot is not None:
        bench_plot.figure_class()  # it is missed before anything is measured
    with console.Stages(console.messages()) as stages:
        found = benching.bench(
            model,
            others,
            rows=wanted,
            sites=sites,
            rounds=rounds,
            threads=threads,
            target=target,
            progress=stages,
        )
    _print(found, format_)
    if report is not None:
        from qgraph.run_notes import write_report

        write_report(report, found.to_json())
        console.print_line(console.messages(), f"wrote {report}")
    if plot is not None:
        bench_plot.plot(found, plot)
        console.print_line(console.messages(), f"wrote {plot}")


def numbers(text: str) -> tuple[int, ...]:
    """`1,4,16` → (1, 4, 16).

    Raises:
        InputError: anything else.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,6}(,[1-9][0-9]{0,6})*", text):
        raise InputError(f"--rows {text!r}: wanted numbers of 1 and more, as in 1,4,16,64,256")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def _check_file(option: str, path: Path | None, inputs: list[Path]) -> None:
    """Refuse an output that would overwrite a model, or cannot be written."""
    if path is None:
        return
    if any(each.resolve() == path.resolve() for each in inputs):
        raise InputError(f"{option} {path} would overwrite a model: choose another path")
    from qgraph.run_notes import check_report

    check_report(path)


def _print(found: Bench, shape: str) -> None:
    if shape == "json":
        json.dump(found.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from qgraph import bench_view, console

    bench_view.render(found, console.output())
