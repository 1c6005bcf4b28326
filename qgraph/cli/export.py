"""`qgraph export`: a quantized model as a checkpoint that servers load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qgraph.cli import weight_options as shared
from qgraph.cli.options import GRAPH_LAYOUTS, group_size, merged_recipe, one_of
from qgraph.cli.run_options import Quiet
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.exporting import Exported

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A model that qgraph quantized, whose codes are written as they are; or a float "
        "model (a Hugging Face folder, ONNX, .pt2), which is quantized first.",
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="LAYOUT",
        callback=one_of(GRAPH_LAYOUTS),
        help=f"Whose checkpoint it is to be: {', '.join(GRAPH_LAYOUTS)}.",
    ),
]
Output = Annotated[
    str,
    typer.Option("-o", "--output", metavar="DIR", help="The folder to write; of gguf, the file."),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|FILE",
        help="The float model's Hugging Face folder, from which config.json, tokenizer and float "
        "tensors are copied; of gguf, also a GGUF file of it. Default: MODEL, where it is one.",
    ),
]
GgufType = Annotated[
    str | None,
    typer.Option(
        "--gguf-type",
        metavar="TYPE",
        help="Of gguf, the type of weights that several hold: Q4_1 or Q4_K; and, without "
        "--format, what MODEL is rounded to. Default: one that holds them, or the nearest.",
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME[:option=value,…]",
        help="Weight format. Default: the layout's own.",
    ),
]


def export(
    model: Model,
    output: Output,
    layout: Layout,
    like: Like = None,
    gguf_type: GgufType = None,
    format_: FormatName = None,
    group: shared.Group = None,
    solver: shared.Solver = None,
    calibration: shared.CalibrationMode = None,
    calibrate: shared.Calibrate = None,
    tokenizer: shared.Tokenizer = None,
    samples: shared.Samples = 64,
    sequence: shared.Sequence = 512,
    embedding: shared.Embedding = None,
    option: shared.Options = None,
    recipe: shared.RecipeFile = None,
    set_: shared.Set = None,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    min_elements: shared.MinElements = None,
    quiet: Quiet = False,
) -> None:
    """Write MODEL's quantized weights in the layout that other tools read.

    Example: qgraph export my-llama/ --layout gptq --solver gptq --calibrate text.txt -o my-gptq/
    """
    from qgraph import console
    from qgraph.exporting import export_checkpoint

    wanted = {
        "format": format_,
        "group": group_size(group),
        "solver": solver,
        "calibration": calibration,
        "embedding": embedding,
        "min_elements": min_elements,
    }
    asked = merged_recipe(recipe, wanted, include or [], exclude or [], set_ or [], option or [])
    given = recipe is not None or any(
        value not in (None, [], ()) for value in (*wanted.values(), include, exclude, set_, option)
    )
    with console.Stages(console.messages(), quiet=quiet) as stages:
        written = export_checkpoint(
            model,
            output,
            layout=layout,
            like=like,
            gguf_type=gguf_type,
            progress=stages,
            recipe=asked if given else None,
            calibrate=calibrate or None,
            tokenizer=tokenizer,
            **({} if calibrate is None else {"samples": samples, "sequence": sequence}),
        )
    if not quiet:
        _print(written)


def _print(written: Exported) -> None:
    from qgraph import console
    from qgraph.console import print_line, print_written

    out = console.output()
    notes = [*(written.report.notes if written.report is not None else ()), *written.notes]
    for note in notes:
        print_line(out, f"note: {note}")
    counts = f"{counted(len(written.weights), 'quantized weight')}, "
    counts += counted(written.floats, "float tensor")
    print_line(out, f"{written.layout}: {counts}", style="bold")
    print_written(out, written.files)
    first = written.files[0]
    place = first.parent if first.name == "config.json" else first
    print_line(out, f"next: qgraph inspect {place}")
