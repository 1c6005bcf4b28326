"""`qgraph demo`: the main job on the model that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path, typer.Option(metavar="DIR", help="Where the two models go; made if missing.")
]
Groups = Annotated[str, typer.Option("--int4-groups", metavar="N|row")]


def demo(folder: Folder = Path("qgraph-demo"), int4_groups: Groups = "64") -> None:
    """Quantize the small model that comes with qgraph to 4 bits and compare it with its float self.

    Takes a few seconds; no download.
    """
    from qgraph.cli.demo_run import run

    run(folder, int4_groups)
