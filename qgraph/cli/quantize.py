"""`qgraph quantize`: a float checkpoint becomes one that servers load, without a graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from qgraph.cli import options
from qgraph.registry import names

if TYPE_CHECKING:
    from qgraph.quantizing import Quantized

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A float checkpoint: a Hugging Face folder, or a .safetensors or .gguf file.",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="The folder to write (of gguf, the file); it must not exist.",
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=options.one_of(options.LAYOUTS),
        help=f"How to write it: {', '.join(options.LAYOUTS)}. Default: gguf of a .gguf file, else "
        "compressed-tensors.",
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Of gguf, a GGUF file of the model, from which metadata, names and order are taken. "
        "Default: CHECKPOINT, where it is one, else its config.json and tokenizer.",
    ),
]
GgufType = Annotated[
    str | None,
    typer.Option(
        "--gguf-type",
        metavar="TYPE",
        help="Of gguf, the type of weights that several hold, such as Q8_0, Q4_1 or Q4_K; and, "
        "without --format, what CHECKPOINT is rounded to. Default: Q4_0.",
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME[:option=value,…]",
        help="Weight format. Default: the layout's own, in groups that divide every row.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(metavar="N|row", callback=options.group, help="Weights that share a scale."),
]
Solver = Annotated[
    str,
    typer.Option(
        metavar="rtn|hqq",
        callback=options.one_of(names("solver")),
        help="rtn rounds to nearest; hqq chooses each group's range, without data (needs torch).",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Quantize only tensors (or modules) of such names, embeddings and heads too where "
        "they are named. May be repeated.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Leave such tensors in float. May be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")]


def quantize(
    checkpoint: Checkpoint,
    output: Output,
    layout: Layout = None,
    like: Like = None,
    gguf_type: GgufType = None,
    format_: FormatName = None,
    group: Group = None,
    solver: Solver = "rtn",
    include: Include = None,
    exclude: Exclude = None,
    quiet: Quiet = False,
) -> None:
    """Round a float checkpoint's matrices to nearest, in a layout that servers load.

    Embeddings, heads, norms and routers stay in float; the layout mxfp4 takes gpt-oss's stacks of
    experts, and nothing else. Weights are read, rounded and written one after the other, so that a
    model of any size fits in memory.

    Example: qgraph quantize my-llama/ -o my-llama-int4/ --layout gptq
    """
    from qgraph import console
    from qgraph.quantizing import quantize_checkpoint

    with console.Stages(console.messages(), quiet=quiet) as stages:
        done = quantize_checkpoint(
            checkpoint,
            output,
            layout=layout,
            like=like,
            gguf_type=gguf_type,
            format=format_,
            group=options.group_size(group),
            solver=solver,
            include=include or [],
            exclude=exclude or [],
            progress=stages,
        )
    _print(console.output(), done, quiet)


def _print(out: Console, done: Quantized, quiet: bool) -> None:
    from qgraph.console import print_line, print_written

    if not quiet:
        reasons = Counter(kept.reason for kept in done.kept if kept.is_weight)
        for reason, count in reasons.most_common():
            first = next(kept.name for kept in done.kept if kept.reason == reason)
            print_line(out, f"{count} × in float: {reason}; such as {first}")
        for warning in done.warnings:
            print_line(out, f"warning: {warning}", style="yellow")
    print_line(out, done.summary, style="bold")
    if quiet:
        return
    print_written(out, done.files)
    print_line(out, f"next: qgraph inspect {done.place}")
