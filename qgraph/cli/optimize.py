"""`qgraph optimize`: quantize a model and fuse its linears."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qgraph.cli.budget_options import Candidate, MaxKl, MaxSize, Mixed, TargetBits
from qgraph.cli.options import group, group_size, merged_recipe, one_of
from qgraph.cli.options import solver as solver_names
from qgraph.cli.purpose_options import For, Tune
from qgraph.errors import InputError
from qgraph.recipe import ACTIVATIONS, CALIBRATIONS, parse_size
from qgraph.registry import names

if TYPE_CHECKING:
    from qgraph.recipe import Recipe

_WHAT, _WHICH, _RUNS, _FILES = "What to make", "Which weights", "Target and checks", "Files"

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, a .pt2, or a Hugging Face folder.")
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        rich_help_panel=_FILES,
        help="The .onnx to write, or a folder for it (one that is there, or ends in /). Default: "
        "MODEL with the format (.int4, .nf4) before its suffix.",
    ),
]
Int4Groups = Annotated[
    str | None,
    typer.Option(
        "--int4-groups",
        metavar="N|row",
        callback=group,
        rich_help_panel=_WHAT,
        help="The best 4-bit format with one scale for N weights.",
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME[:option=value,…]",
        rich_help_panel=_WHAT,
        help=f"Weight format: {', '.join(names('format'))}, or auto. Default: auto.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="N|row",
        callback=group,
        rich_help_panel=_WHAT,
        help="Weights that share one scale: 16 to 256, or a whole row.",
    ),
]
Solver = Annotated[
    str | None,
    typer.Option(
        metavar="SOLVER[+SOLVER]",
        callback=solver_names,
        rich_help_panel=_WHAT,
        help=f"How weights are rounded: {', '.join(names('solver'))}, or several composed, as "
        "awq+clip+gptq. Default: rtn, to nearest.",
    ),
]
CalibrationMode = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="|".join(CALIBRATIONS),
        callback=one_of(CALIBRATIONS),
        rich_help_panel=_WHAT,
        help="Solve each linear on inputs from the model quantized so far, or from the float "
        "model. Default: sequential.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=_FILES,
        help="Go on with a run that was stopped: weights that its solver finished are taken. "
        "Refused with another model, data or options; --force takes what still holds.",
    ),
]
Embedding = Annotated[
    str | None,
    typer.Option(
        metavar="auto|float|FORMAT",
        rich_help_panel=_WHAT,
        help="Format of embedding tables and of heads tied to them. Default: auto.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="PASS.FIELD=VALUE",
        rich_help_panel=_WHAT,
        help="Set a field of a pass; may be repeated.",
    ),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        rich_help_panel=_WHAT,
        help="Read these options from a file; options given here win.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="'SELECTOR=FORMAT'",
        rich_help_panel=_WHICH,
        help="Another format for some sites, or float; the last one that matches wins; repeatable.",
    ),
]
Calibrate = Annotated[
    list[str] | None,
    typer.Option(
        "--calibrate",
        metavar="SOURCE[@WEIGHT]",
        rich_help_panel=_WHAT,
        help="Calibration data: a text (with --tokenizer), a .npz or a .jsonl file, a folder of "
        "them, or self: text that a language model samples itself. Repeatable; the weights are "
        "shares of --samples.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_WHAT,
        help="The texts' tokenizer.json. Default: that of a Hugging Face folder.",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_WHAT,
        help="Calibration samples to use at most, of all sources together.",
    ),
]
Sequence = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=2,
        rich_help_panel=_WHAT,
        help="Tokens in a sample of calibration text, or of the model's own text; rows of files of "
        "token ids stay as long as they are.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SELECTOR",
        rich_help_panel=_WHICH,
        help="Only these: a glob on node or weight names, role:head, first:2, last:2; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SELECTOR", rich_help_panel=_WHICH, help="Not these: they stay as they are."
    ),
]
Unfused = Annotated[
    str | None,
    typer.Option(
        metavar="auto|float|portable",
        callback=one_of(("auto", "float", "portable")),
        rich_help_panel=_RUNS,
        help="What becomes of weights that no kernel takes: floats as they are, or packed and "
        "dequantized block by block (small, slow). [default: auto: portable for formats that are "
        "no integers]",
    ),
]
Prefer = Annotated[
    str | None,
    typer.Option(
        metavar="speed|size",
        callback=one_of(("speed", "size")),
        rich_help_panel=_RUNS,
        help="mxfp4 and nvfp4 have no kernel of their own on CPUs: written as 8-bit integers they "
        "are exact, fast, and twice the size. [default: speed]",
    ),
]
AtLoad = Annotated[
    bool,
    typer.Option(
        "--dequantize-at-load",
        rich_help_panel=_RUNS,
        help="Store linears packed, in whatever format, and let ONNX Runtime make floats of them "
        "when it loads the model: the file is small, memory and speed are those of floats.",
    ),
]
Fuse = Annotated[
    bool | None,
    typer.Option(
        "--fuse/--no-fuse",
        rich_help_panel=_RUNS,
        help="Make fused ops of ONNX Runtime of norms, activations and attention, each proven at "
        "its place. [default: fuse]",
    ),
]
AddCache = Annotated[
    bool | None,
    typer.Option(
        "--add-cache/--no-add-cache",
        rich_help_panel=_RUNS,
        help="Give a decoder that was exported without a cache past_key_values and present, so "
        "that each token is read once. [default: no]",
    ),
]
WriteGenaiConfig = Annotated[
    bool,
    typer.Option(
        "--write-genai-config",
        rich_help_panel=_RUNS,
        help="Also write the files that onnxruntime-genai loads a decoder with, by the config.json "
        "beside MODEL or beside --tokenizer.",
    ),
]
MinElements = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, rich_help_panel=_WHICH, help="Leave weights below N elements as is."
    ),
]
Target = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        callback=one_of(names("target")),
        rich_help_panel=_RUNS,
        help=f"What will run the model: {', '.join(names('target'))}; qdq stays portable.",
    ),
]
AccuracyLevel = Annotated[
    str | None,
    typer.Option(
        metavar="auto|0|4",
        callback=one_of(("auto", "0", "4")),
        rich_help_panel=_RUNS,
        help="4 computes on int8 activations, 0 on floats. Default: auto.",
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(ACTIVATIONS),
        callback=one_of(ACTIVATIONS),
        rich_help_panel=_WHAT,
        help="Round what linears multiply to bytes too, for integer kernels, which are fast at "
        "prompts: with one scale for the tensor, one for each row, or a static one from "
        "calibration. Weights are then int8-pairs; heads keep floats. Or to FP8 in front of "
        "fp8-e4m3 weights, as TensorRT and CUDA multiply them: fp8 from calibration, or fp8-token. "
        "[default: float]",
    ),
]
Outliers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_WHAT,
        help="With rounded activations: keep up to N input columns of each linear in float, those "
        "of the largest activations in calibration. [default: 0]",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        rich_help_panel=_RUNS,
        help="Run every kernel on the bytes written before the files get their names.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        rich_help_panel=_RUNS,
        help="Exit 4 and write nothing where a check fails; without it the next kernel is taken.",
    ),
]
MinCoverage = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        min=0.0,
        max=1.0,
        rich_help_panel=_RUNS,
        help="Exit 3 if less of the linear weight bytes can be quantized.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=_FILES,
        help="Plan only; with --report FILE the plan is written, and `qgraph explain` reads it.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", rich_help_panel=_FILES, help="Write every step as JSON."),
]
SingleFile = Annotated[
    bool,
    typer.Option("--single-file", rich_help_panel=_FILES, help="No data file (up to 2 GB)."),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", rich_help_panel=_FILES, help="Replace an output that qgraph did not write."
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=_FILES, help="Print the coverage line only."),
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
        "purpose": for_,
        "dequantize_at_load": dequantize_at_load or None,
        "fuse": fuse,
        "add_cache": add_cache,
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
            tokenizer=tokenizer,
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
        from qgraph.genai_config import write_genai_config as write

        for path in write(written, *genai, force=force):
            console.print_line(out, f"wrote {path}")


def _genai_config(model: Path, tokenizer: Path | None) -> tuple[Path, Mapping[str, Any]]:
    """What is needed for genai_config.json, looked for before any work."""
    from qgraph.genai_config import find_config

    given = [tokenizer if tokenizer.is_dir() else tokenizer.parent] if tokenizer else []
    return find_config([*given, model if model.is_dir() else model.absolute().parent])


def default_output(model: Path, recipe: Recipe) -> Path:
    """`model.onnx` → `model.int4.onnx`, after the format that was asked for."""
    name = recipe.format.partition(":")[0]
    folder = model.resolve() if model.is_dir() else None
    stem = folder.name if folder is not None else model.stem
    return (folder or model).with_name(f"{stem}.{'int4' if name == 'auto' else name}.onnx")


def chosen_output(output: str | None, default: Path) -> Path:
    """The file to write; a folder (one that exists, or `-o NAME/`) gets the default's name.

    Raises:
        InputError: an empty text.
    """
    if output is None:
        return default
    if not output:
        raise InputError("-o '': wanted the .onnx to write, or a folder for it")
    from qgraph.run_notes import is_folder_name

    path = Path(output)
    return path / default.name if is_folder_name(output) or path.is_dir() else path
