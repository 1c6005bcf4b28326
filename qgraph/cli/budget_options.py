"""The options of `qgraph optimize` that say what a model may take or lose at most."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Budget"

TargetBits = Annotated[
    float | None,
    typer.Option(
        "--target-bits",
        metavar="B",
        min=0.0,
        rich_help_panel=_PANEL,
        help="Choose a format for each weight: at most B bits a weight over all linears, scales "
        "included, and the least loss on --calibrate.",
    ),
]
MaxSize = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        rich_help_panel=_PANEL,
        help="Likewise, for files of at most SIZE: 90MB, 1.5GB, 700MiB.",
    ),
]
Mixed = Annotated[
    bool,
    typer.Option(
        "--mixed",
        rich_help_panel=_PANEL,
        help="Likewise, for the smallest file whose loss is at most --max-kl.",
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="X",
        min=0.0,
        rich_help_panel=_PANEL,
        help="Exit 4 and write nothing if the mean KL divergence from the float model is above X "
        "nats a token, on samples of --calibrate that are held out.",
    ),
]
Candidate = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        metavar="FORMAT",
        rich_help_panel=_PANEL,
        help="A format that a budget may choose, beside --format, or float; repeatable. Default: "
        "uint2:group=32, uint4 in groups of 256 to 32, int4:group=64,scale=signed, int8:group=64, "
        "float.",
    ),
]
