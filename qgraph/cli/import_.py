"""`qgraph import`: a quantized checkpoint's integers become the weights of a float graph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from qgraph.cli import run_options as shared
from qgraph.cli.options import chosen_output

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A quantized model: a Hugging Face folder with safetensors, or a .gguf file.",
    ),
]
Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]",
        help="The float model: an ONNX file, a .pt2, or a Hugging Face folder. Default: the one "
        "that CHECKPOINT's config.json describes.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        help="The .onnx to write, or a folder for it. Default: MODEL, or CHECKPOINT, with "
        ".imported before its suffix.",
    ),
]
Bindings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help='{"NAME IN THE GRAPH": "PARAMETER"}, where names do not tell: a node, weight or '
        'module; "NAME[a:b]" for some rows, null to leave a weight as it is.',
    ),
]


def import_(
    checkpoint: Checkpoint,
    model: Model = None,
    output: Output = None,
    bindings: Bindings = None,
    target: shared.Target = "ort-cpu",
    min_runtime: shared.MinRuntime = None,
    accuracy_level: shared.AccuracyLevel = None,
    unfused: shared.Unfused = None,
    prefer: shared.Prefer = None,
    dequantize_at_load: shared.AtLoad = False,
    check: shared.Check = True,
    strict: shared.Strict = False,
    min_coverage: shared.MinCoverage = 0.0,
    dry_run: shared.DryRun = False,
    report: shared.ReportFile = None,
    single_file: shared.SingleFile = False,
    force: shared.Force = False,
    quiet: shared.Quiet = False,
) -> None:
    """Put CHECKPOINT's quantized weights into MODEL's graph, as they are, and fuse them.

    Example: qgraph import model-Q4_K_M.gguf model.onnx -o model.q4.onnx
    """
    from qgraph import console
    from qgraph.cli import outcome
    from qgraph.importing import import_checkpoint

    written = None if dry_run else chosen_output(output, default_output(checkpoint, model))
    out = console.output()
    with console.Stages(console.messages(), quiet=quiet) as stages:
        result = import_checkpoint(
            checkpoint,
            model,
            written,
            bindings=bindings,
            target=target,
            accuracy_level=accuracy_level,
            unfused="portable" if unfused in (None, "auto") else unfused,
            prefer=prefer or "speed",
            min_runtime=min_runtime,
            dequantize_at_load=dequantize_at_load,
            check=check,
            strict=strict,
            dry_run=dry_run,
            min_coverage=min_coverage,
            single_file=single_file,
            force=force,
            report=report,
            progress=stages,
        )
    if dry_run:
        outcome.print_plan(out, result, report, quiet)
    else:
        outcome.print_result(out, result, quiet)


def default_output(checkpoint: Path, model: Path | None) -> Path:
    """`model.onnx` → `model.imported.onnx`."""
    place = Path(os.path.abspath(model or checkpoint))  # beside a link, not where it leads to
    stem = place.name if place.is_dir() else place.stem
    return place.with_name(f"{stem}.imported.onnx")
