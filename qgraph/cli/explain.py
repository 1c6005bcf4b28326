"""`qgraph explain`: what became of every node, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qgraph.cli.options import Shape, one_of, print_json
from qgraph.errors import InputError
from qgraph.registry import names
from qgraph.wording import plural

if TYPE_CHECKING:
    from qgraph.explanation import Explanation

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, a .pt2, a folder, or a plan that `optimize --dry-run --report` wrote.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        callback=one_of(names("target")),
        help=f"What runs the model: {', '.join(names('target'))}. Default: what it was made for, "
        "else ort-cpu.",
    ),
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Run the model and show which kernels ran, and how long.")
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="M",
        min=1,
        help="With --profile: tokens of one prompt, or samples of a batch. [default: 16, or 1]",
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FLOAT",
        help="With --profile: the float model, whose time is to stand beside.",
    ),
]
Node = Annotated[
    str | None,
    typer.Option(
        metavar="SELECTOR",
        help="Everything known of these sites: a glob on node, weight or module names, "
        "role:head, first:2, last:2.",
    ),
]
Every = Annotated[
    bool, typer.Option("--all", help="Every site and operator, not the slowest or oddest alone.")
]


def explain(
    model: Model,
    target: Target = None,
    profile: Profile = False,
    rows: Rows = None,
    against: Against = None,
    node: Node = None,
    every: Every = False,
    format_: Shape = "table",
) -> None:
    """Show of every linear and embedding its format, kernel, time, and the reason if not fused."""
    from qgraph import console

    ran = profile or rows is not None or against is not None
    explanation = _plan(model, target, ran) if _is_json(model) else None
    if explanation is None:
        _check_run(profile, rows, against)
        from qgraph import pipeline

        with console.Stages(console.messages()) as stages:
            wanted = {} if target is None else {"target": target}
            explanation = pipeline.explain(
                model, profile=profile, rows=rows, against=against, progress=stages, **wanted
            )
    if format_ == "table":
        explanation.render(console.output(), node, every)
        return
    found = explanation.to_json()
    if node is not None:  # totals and summary stay those of the model
        names = {row.name for row in explanation.select(node)}
        found["sites"] = [site for site in found["sites"] if site["name"] in names]
    print_json(found)


def _check_run(profile: bool, rows: int | None, against: Path | None) -> None:
    """Find wrong usage in the words of the command line, before the model is read."""
    given = [("--rows", rows is not None), ("--against", against is not None)]
    asked = [name for name, there in given if there]
    if asked and not profile:
        verb = plural(len(asked), "is", "are")
        raise InputError(f"{' and '.join(asked)} {verb} of a run of the model: add --profile")


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _plan(path: Path, target: str | None, profile: bool) -> Explanation:
    from qgraph.explanation_plan import read_plan

    explanation = read_plan(path)
    if profile:
        raise InputError(f"{path} is a plan: --profile needs the model that was written")
    if target not in (None, explanation.target):
        raise InputError(
            f"{path} is a plan for {explanation.target}, not for {target}: "
            f"plan again with --target {target}"
        )
    return explanation
