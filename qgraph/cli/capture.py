"""`qgraph capture`: a torch program or a Hugging Face folder becomes an ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from qgraph.wording import counted

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A .pt2 that torch.export.save wrote, or a Hugging Face folder (config.json and "
        "safetensors).",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="OUT.onnx", help="The .onnx to write. Default: beside SOURCE."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Load a .pt2 with pickles or custom objects in it, which can run any code.",
    ),
]
Opset = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The newest ONNX opset to write, 18 to 23: 22 is read by ONNX Runtime 1.21 and later, "
        "21 by 1.20. [default: 23, from 1.23 on]",
    ),
]
SingleFile = Annotated[bool, typer.Option("--single-file", help="No data file (up to 2 GB).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def capture(
    source: Source,
    output: Output = None,
    trust: Trust = False,
    opset: Opset = None,
    single_file: SingleFile = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write SOURCE as an ONNX file that `optimize`, `explain` and every ONNX runtime take.

    Example: qgraph capture model.pt2 -o model.onnx
    """
    from qgraph import console, pipeline
    from qgraph.cli.options import chosen_output
    from qgraph.console import print_line, print_written
    from qgraph.errors import InputError
    from qgraph.frontends.torch_files import kind_of
    from qgraph.saved_file import check_output
    from qgraph.writer import save

    place = Path(os.path.abspath(source))  # beside a link, not where it leads to
    name = place.name if place.is_dir() else place.stem
    if opset is not None and kind_of(source) is None and source.is_file():
        raise InputError(f"--opset: {source} is no .pt2 and no folder, and keeps the opset it has")
    target = chosen_output(output, place.with_name(f"{name}.onnx"))
    check_output(target, force=force, protect=[source])
    with console.Stages(console.messages(), quiet=quiet) as stages:
        stages.stage("capturing")
        graph = pipeline.capture(source, trust=trust, opset=opset)
        stages.finish(
            f"{counted(len(graph.model.graph), 'node')}, {counted(len(graph.sites()), 'site')}"
        )
        stages.stage("writing", total=1000)
        files = save(
            graph.model,
            target,
            single_file=single_file,
            force=force,
            protect=graph.files,
            progress=lambda done, size: stages.advance(1000 * done // max(1, size)),
        )
    if quiet:
        return
    out = console.output()
    for note in graph.notes:
        print_line(out, f"note: {note}")
    print_written(out, files)
    print_line(out, f"next: qgraph optimize {files[0]} --int4-groups 128")
