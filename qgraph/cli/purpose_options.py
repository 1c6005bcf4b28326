"""Options of `optimize` that choose by speed."""

from __future__ import annotations

from typing import Annotated

import typer

from qgraph.cli.options import one_of
from qgraph.recipe import PURPOSES

_PANEL = "Target and checks"

For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="|".join(PURPOSES),
        callback=one_of(PURPOSES),
        rich_help_panel=_PANEL,
        help="What the model is to be fast at: few rows (one token at a time), many (prompts), or "
        "both, with two weights where one does not serve. By times that --tune measured here, "
        "else by rule.",
    ),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        rich_help_panel=_PANEL,
        help="Measure on this machine what --for has to know and was not measured yet; kept in "
        "the folder QGRAPH_CACHE (~/.cache/qgraph), where later runs with --for find it.",
    ),
]
