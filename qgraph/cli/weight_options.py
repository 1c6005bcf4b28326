"""Options of `qgraph optimize` for what weights and activations become, and which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qgraph.cli.options import group, one_of
from qgraph.cli.options import solver as solver_names
from qgraph.recipe import ACTIVATIONS, CALIBRATIONS
from qgraph.registry import names

_WHAT, _WHICH = "What to make", "Which weights"

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
        metavar="FILE|DIR",
        rich_help_panel=_WHAT,
        help="The texts' tokenizer.json, or the folder that holds it. Default: that of a Hugging "
        "Face folder.",
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
MinElements = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, rich_help_panel=_WHICH, help="Leave weights below N elements as is."
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(ACTIVATIONS),
        callback=one_of(ACTIVATIONS),
        rich_help_panel=_WHAT,
        help="Round what linears multiply to bytes too, for integer kernels, which are fast at "
        "prompts: with one scale for the tensor, one for each row, a static one from calibration, "
        "or (int8-auto) that where it costs little more than rows. Weights are then int8-pairs; "
        "heads keep floats. Or to FP8 in front of fp8-e4m3 weights, as TensorRT and CUDA multiply "
        "them: fp8 from calibration, or fp8-token. "
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
