"""Options of `qgraph optimize` for what runs the result, its checks and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qgraph.cli.options import one_of
from qgraph.recipe import LEVELS, PREFERENCES, UNFUSED
from qgraph.registry import names

_RUNS, _FILES = "Target and checks", "Files"

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
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=_FILES,
        help="Go on with a run that was stopped: weights that its solver finished are taken. "
        "Refused with another model, data or options; --force takes what still holds.",
    ),
]
Unfused = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(UNFUSED),
        callback=one_of(UNFUSED),
        rich_help_panel=_RUNS,
        help="What becomes of weights that no kernel takes: floats as they are, or packed and "
        "dequantized block by block (small, slow). [default: auto: portable for formats that are "
        "no integers]",
    ),
]
Prefer = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(PREFERENCES),
        callback=one_of(PREFERENCES),
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
KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        metavar="NAME[:scale=channel|tensor]",
        rich_help_panel=_RUNS,
        help="Round a decoder's cache of keys and values to int8 or int4 (on CUDA also fp8), by "
        "scales from --calibrate, one for each channel of a head or one for the tensor; what that "
        "costs is measured. [default: floats]",
    ),
]
LastLogits = Annotated[
    bool | None,
    typer.Option(
        "--last-logits/--no-last-logits",
        rich_help_panel=_RUNS,
        help="Let a decoder give the logits of the last token of each row alone, which making text "
        "takes: its head no longer computes those of a whole prompt. Rows of several lengths are "
        "then to be padded in front: behind, the last token is padding. [default: no]",
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
Target = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        callback=one_of(names("target")),
        rich_help_panel=_RUNS,
        help=f"What will run the model: {', '.join(names('target'))}; qdq stays portable.",
    ),
]
MinRuntime = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        rich_help_panel=_RUNS,
        help="The oldest ONNX Runtime that has to run the result, as in 1.27: kernels and fused "
        "ops that are newer are not used. [default: the installed one]",
    ),
]
AccuracyLevel = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(LEVELS),
        callback=one_of(LEVELS),
        rich_help_panel=_RUNS,
        help="4 computes on int8 activations, 0 on floats. Default: auto.",
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
