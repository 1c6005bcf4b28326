"""`qgraph optimize`: quantize a model and fuse its linears."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qgraph.cli.budget_options import Candidate, MaxKl, MaxSize, Mixed, TargetBits
from qgraph.cli.options import chosen_output, group_size, merged_recipe
from qgraph.cli.purpose_options import For, Tune
from qgraph.cli.run_options import (
    AccuracyLevel,
    AddCache,
    AtLoad,
    Check,
    DryRun,
    Force,
    Fuse,
    KvCache,
    LastLogits,
    MinCoverage,
    MinRuntime,
    Output,
    Prefer,
    Quiet,
    ReportFile,
    Resume,
    SingleFile,
    Strict,
    Target,
    Unfused,
    WriteGenaiConfig,
)
from qgraph.cli.weight_options import (
    Activations,
    Calibrate,
    CalibrationMode,
    Embedding,
    Exclude,
    FormatName,
    Group,
    Include,
    Int4Groups,
    MinElements,
    Options,
    Outliers,
    RecipeFile,
    Samples,
    Sequence,
    Set,
    Solver,
    Tokenizer,
)
from qgraph.errors import InputError
from qgraph.sizes import parse_size

if TYPE_CHECKING:
    from qgraph.recipe import Recipe

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2, or a Hugging Face folder.")
]


def optimize(
    model: Model,
    int4_groups: Int4Groups = None,
    format_: FormatName = None,
    group: Group = None,
    solver: Solver = None,
    calibration: CalibrationMode = None,
    calibrate: Calibrate = None,
    tokenizer: Tokenizer = None,
    samples: Samples = 64,
    sequence: Sequence = 512,
    embedding: Embedding = None,
    option: Options = None,
    recipe: RecipeFile = None,
    set_: Set = None,
    include: Include = None,
    exclude: Exclude = None,
    min_elements: MinElements = None,
    target: Target = "ort-cpu",
    min_runtime: MinRuntime = None,
    accuracy_level: AccuracyLevel = None,
    activations: Activations = None,
    outliers: Outliers = None,
    unfused: Unfused = None,
    prefer: Prefer = None,
    for_: For = None,
    tune: Tune = False,
    dequantize_at_load: AtLoad = False,
    fuse: Fuse = None,
    add_cache: AddCache = None,
    kv_cache: KvCache = None,
    last_logits: LastLogits = None,
    write_genai_config: WriteGenaiConfig = False,
    target_bits: TargetBits = None,
    max_size: MaxSize = None,
    mixed: Mixed = False,
    max_kl: MaxKl = None,
    candidate: Candidate = None,
    check: Check = True,
    strict: Strict = False,
    min_coverage: MinCoverage = 0.0,
    output: Output = None,
    dry_run: DryRun = False,
    report: ReportFile = None,
    single_file: SingleFile = False,
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Quantize MODEL's linears and embeddings and put the target's fused kernels in their place.

    Example: qgraph optimize model.onnx --int4-groups 128
    """
    from qgraph import console, pipeline
    from qgraph.cli import outcome

    if int4_groups is not None and (format_ is not None or group is not None):
        raise InputError(
            "--int4-groups is short for --format auto --group N: give one or the other"
        )
    if strict and not check:
        raise InputError("--strict has nothing to judge with --no-check: give one or the other")
    wanted = {
        "format": "auto" if int4_groups is not None else format_,
        "group": group_size(int4_groups or group),
        "solver": solver,
        "calibration": calibration,
        "embedding": embedding,
        "accuracy_level": accuracy_level,
        "activations": activations,
        "outliers": outliers,
        "unfused": unfused,
        "prefer": prefer,
        "min_runtime": min_runtime,
        "purpose": for_,
        "dequantize_at_load": dequantize_at_load or None,
        "fuse": fuse,
        "add_cache": add_cache,
        "kv_cache": kv_cache,
        "last_logits": last_logits,
        "target_bits": target_bits,
        "max_size": None if max_size is None else parse_size(max_size),
        "mixed": mixed or None,
        "max_kl": max_kl,
        "candidates": tuple(candidate) if candidate else None,
        "min_elements": min_elements,
    }
    asked = merged_recipe(recipe, wanted, include or [], exclude or [], set_ or [], option or [])
    written = None if dry_run else chosen_output(output, default_output(model, asked))
    genai = _genai_config(model, tokenizer) if write_genai_config else None
    out = console.output()
    if not quiet:
        given = [f"recipe {recipe}"] if recipe is not None else []
        if calibrate:
            most = f"at most {samples} samples, texts in blocks of {sequence} tokens"
            given.append(f"calibrate {', '.join(map(str, calibrate))} ({most})")
        outcome.print_configuration(out, model, written, asked, target, check, given)
    with console.Stages(console.messages(), quiet=quiet) as stages:
        result = pipeline.optimize(
            model,
            written,
            recipe=asked,
            target=target,
            check=check,
            strict=strict,
            tune=tune,
            dry_run=dry_run,
            min_coverage=min_coverage,
            single_file=single_file,
            force=force,
            resume=resume,
            report=report,
            calibrate=calibrate or None,
            tokenizer=tokenizer if calibrate or genai is None else None,
            samples=samples,
            sequence=sequence,
            progress=stages,
        )
    if dry_run:
        outcome.print_plan(out, result, report, quiet)
        if result.lacks:
            raise InputError(result.lacks)
    else:
        outcome.print_result(out, result, quiet, model if model.suffix == ".onnx" else None)
    if genai is not None and written is not None:
        from qgraph.genai_config import PADS_BEHIND
        from qgraph.genai_config import write_genai_config as write

        for path in write(written, *genai, force=force):
            console.print_line(out, f"wrote {path}")
        if asked.last_logits and not quiet:
            console.print_line(out, f"note: {PADS_BEHIND}")


def _genai_config(model: Path, tokenizer: Path | None) -> tuple[Path, Mapping[str, Any]]:
    """What is needed for genai_config.json, looked for before any work."""
    from qgraph.genai_config import find_config

    given = [tokenizer if tokenizer.is_dir() else tokenizer.parent] if tokenizer else []
    return find_config([*given, model if model.is_dir() else model.absolute().parent])


def default_output(model: Path, recipe: Recipe) -> Path:
    """`model.onnx` → `model.int4.onnx`, after the format that was asked for."""
    name = recipe.format.partition(":")[0]
    folder = Path(os.path.abspath(model)) if model.is_dir() else None
    stem = folder.name if folder is not None else model.stem
    return (folder or model).with_name(f"{stem}.{'int4' if name == 'auto' else name}.onnx")
