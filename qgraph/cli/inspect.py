"""`qgraph inspect`: what is in a checkpoint, and which kernels take it as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from qgraph.cli.options import Shape, one_of, print_json
from qgraph.registry import names
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.inspecting import Inspection

Path_ = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A Hugging Face folder (config.json and safetensors), a .safetensors or a .gguf file.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=one_of(names("target")),
        help="Whose kernels to ask. Default: ort-cpu and torch.",
    ),
]
_HEADER = ("tensor", "shape", "format", "bits/weight", "act order")
_SIDES: Literal["lllrl"] = "lllrl"


def inspect(path: Path_, target: Target = None, format_: Shape = "table") -> None:
    """Show every quantized tensor of a checkpoint: format, group, bits, kernels.

    Example: qgraph inspect my-llama-gptq/
    """
    from qgraph import console
    from qgraph.inspecting import TARGETS
    from qgraph.inspecting import inspect as inspected

    found = inspected(path, targets=(target,) if target else TARGETS)
    if format_ == "json":
        print_json(found.to_json())
        return
    _print(console.output(), found)


def _print(out: Console, found: Inspection) -> None:
    from qgraph.console import megabytes, print_line, print_table
    from qgraph.own_graph import has_own_graph

    if found.rows:
        rows = [
            (
                row.name,
                " × ".join(map(str, row.shape)),
                row.format,
                f"{row.bits_per_weight:.2f}",
                "yes" if row.act_order else "",
            )
            for row in found.rows
        ]
        print_table(out, _HEADER, rows, _SIDES)
        print_line(out, "")
    for target in found.rows[0].kernels if found.rows else ():
        kernels: dict[tuple[str, str], int] = {}
        for row in found.rows:
            kind = row.format, row.kernels[target]
            kernels[kind] = kernels.get(kind, 0) + 1
        for (spelled, kernel), count in kernels.items():
            print_line(out, f"{target}: {count} × {spelled} → {kernel}")
    for note in dict.fromkeys(note for row in found.rows for note in row.notes):
        print_line(out, f"note: {note}")
    for warning in found.warnings:
        print_line(out, f"warning: {warning}", style="yellow")
    floats = f"{counted(found.float_tensors, 'tensor')} in float ({megabytes(found.float_bytes)})"
    if not found.rows:
        print_line(out, f"{found.path}: nothing is quantized, {floats}", style="bold")
        print_line(out, f"next: qgraph quantize {found.path} -o OUT")
        return
    formats = ", ".join(f"{count} × {kind}" for kind, count in found.formats.items())
    text = f"{found.layout}: {formats}, {found.bits_per_weight:.2f} bits a weight; {floats}"
    print_line(out, text, style="bold")
    model = "" if has_own_graph(Path(found.path)) else " MODEL.onnx"
    print_line(out, f"next: qgraph import {found.path}{model} -o OUT.onnx")
