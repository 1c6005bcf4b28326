"""How command-line options become values: checks whose errors name the way out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qgraph.errors import InputError
from qgraph.registry import did_you_mean, names

if TYPE_CHECKING:
    from qgraph.recipe import Recipe


LAYOUTS = names("checkpoint")
"""Layouts of checkpoints."""
GRAPH_LAYOUTS = tuple(name for name in LAYOUTS if name != "mxfp4")
"""Those that linears of a graph can be written in; mxfp4 has only stacks of experts."""


def one_of(known: Sequence[str]) -> Callable[[str | None], str | None]:
    """A callback that takes one of `known`, or nothing."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            near = did_you_mean(value, known)
            raise typer.BadParameter(f"{value!r}{near} (known: {', '.join(known)})")
        return value

    return check


Shape = Annotated[
    str, typer.Option("--format", metavar="table|json", callback=one_of(("table", "json")))
]
"""How a command shows what it found."""
RunTarget = Annotated[
    str,
    typer.Option(metavar="TARGET", callback=one_of(names("target")), help="What runs the models."),
]
Threads = Annotated[
    int, typer.Option(metavar="N", min=0, help="Threads within an operator; 0: the runtime's own.")
]


def print_json(content: Mapping[str, Any]) -> None:
    """Print an answer as JSON, for programs."""
    json.dump(content, sys.stdout, indent=2)
    sys.stdout.write("\n")


def solver(value: str | None) -> str | None:
    """A callback for composed solvers, `awq+clip+gptq`; in which order is the recipe's affair."""
    for name in value.split("+") if value is not None else ():
        one_of(names("solver"))(name)
    return value


def group(value: str | None) -> str | None:
    """A callback for group sizes; what a group may be is the format's own affair."""
    if value not in (None, "row") and not re.fullmatch(r"[1-9][0-9]{0,5}", str(value)):
        raise typer.BadParameter(f"{value!r} is neither a number (16 to 256) nor 'row'")
    return value


def group_size(value: str | None) -> int | None:
    """`128` → 128, `row` → 0 (one scale for a whole row), nothing → None."""
    if value is None:
        return None
    return 0 if value == "row" else int(value)


def assignments(values: Sequence[str]) -> dict[str, str]:
    """`PASS.FIELD=VALUE` options as a dictionary."""
    found: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not all(key.partition(".")):
            raise typer.BadParameter(f"--option {text!r}: wanted PASS.FIELD=VALUE")
        found[key] = value
    return found


def merged_recipe(
    path: Path | None,
    wanted: dict[str, Any],
    include: list[str],
    exclude: list[str],
    overrides: list[str],
    options: list[str],
) -> Recipe:
    """The recipe file with the command line's options on top; lists are joined."""
    from qgraph.recipe import Override, Recipe

    base = Recipe() if path is None else Recipe.from_toml(path)
    return dataclasses.replace(
        base,
        **{key: value for key, value in wanted.items() if value is not None},
        include=(*base.include, *include),
        exclude=(*base.exclude, *exclude),
        overrides=(*base.overrides, *map(Override.parse, overrides)),
        options={**base.options, **assignments(options)},
    )


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
