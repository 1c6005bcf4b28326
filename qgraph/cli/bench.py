"""`qgraph bench`: how fast a model is at each number of rows, beside others and beside float."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qgraph.cli.options import RunTarget, Shape, Threads, print_json
from qgraph.errors import InputError

if TYPE_CHECKING:
    from qgraph.bench_result import Bench
    from qgraph.decode_result import DecodeBench

_ROWS = "1,4,16,64,256"
Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2, or a Hugging Face folder.")
]
Against = Annotated[
    list[Path] | None,
    typer.Option(metavar="OTHER", help="Another model to measure beside it; repeatable."),
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="M[,M…]",
        help="Numbers of rows: tokens of one prompt without a cache, else samples of a batch; "
        f"{_ROWS} by default.",
    ),
]
Sites = Annotated[
    bool | None,
    typer.Option(
        "--sites/--no-sites",
        help="Also measure one linear of each size and kernel alone (it does by default).",
    ),
]
Decode = Annotated[
    bool,
    typer.Option(
        "--decode",
        help="Instead measure decoders at work: a prompt, then tokens one by one with the cache.",
    ),
]
PromptTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="With --decode: tokens of the prompt (256).")
]
NewTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="With --decode: tokens made after it (64).")
]
Memory = Annotated[
    bool | None,
    typer.Option(
        "--memory/--no-memory",
        help="With --decode: also measure peak memory, each model once more in a process of its "
        "own (it does by default).",
    ),
]
Rounds = Annotated[int, typer.Option(metavar="N", min=3, help="How often each side has its turn.")]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Also write all figures as JSON.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw them as a PNG.")]


def bench(
    model: Model,
    against: Against = None,
    rows: Rows = None,
    sites: Sites = None,
    decode: Decode = False,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    memory: Memory = None,
    rounds: Rounds = 5,
    threads: Threads = 0,
    target: RunTarget = "ort-cpu",
    format_: Shape = "table",
    report: Report = None,
    plot: Plot = None,
) -> None:
    """Measure MODEL's speed by number of rows, beside OTHER models and beside float linears.

    Example: qgraph bench model.int4.onnx --against model.onnx

    Example: qgraph bench model.int4.onnx --against other.onnx --decode
    """
    others = against or []
    _check_file("--report", report, [model, *others])
    _check_file("--plot", plot, [model, *others])
    _check_decode(
        decode,
        {"--rows": rows, "--sites": sites, "--plot": plot},
        {"--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens, "--memory": memory},
    )
    wanted = numbers(rows or _ROWS)
    from qgraph import bench_plot, benching, console, decode_bench
    from qgraph.decode_result import DecodeBench

    if plot is not None:
        bench_plot.figure_class()  # it is missed before anything is measured
    with console.Stages(console.messages()) as stages:
        found: Bench | DecodeBench
        if decode:
            found = decode_bench.bench_decode(
                model,
                others,
                prompt_tokens=prompt_tokens or decode_bench.PROMPT,
                new_tokens=new_tokens or decode_bench.TOKENS,
                rounds=rounds,
                threads=threads,
                memory=memory is not False,
                target=target,
                progress=stages,
            )
        else:
            found = benching.bench(
                model,
                others,
                rows=wanted,
                sites=sites is not False,
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
    if plot is not None and not isinstance(found, DecodeBench):
        bench_plot.plot(found, plot)
        console.print_line(console.messages(), f"wrote {plot}")


def _check_decode(decode: bool, without: Mapping[str, object], only: Mapping[str, object]) -> None:
    """Refuse options that the other kind of measuring has."""
    for option, value in (without if decode else only).items():
        if value is not None:
            words = "does not go with --decode" if decode else "goes only with --decode"
            raise InputError(f"{option} {words}")


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


def _print(found: Bench | DecodeBench, shape: str) -> None:
    if shape == "json":
        print_json(found.to_json())
        return
    from qgraph import bench_view, console, decode_view
    from qgraph.bench_result import Bench

    if isinstance(found, Bench):
        bench_view.render(found, console.output())
    else:
        decode_view.render(found, console.output())
