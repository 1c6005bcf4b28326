"""`--option PASS.FIELD=VALUE`: which there are, and what their values become."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from qgraph import registry
from qgraph.errors import InputError

if TYPE_CHECKING:
    from qgraph.recipe import Recipe


def require_known_options(recipe: Recipe) -> None:
    """Refuse `--option PASS.FIELD=VALUE` for a pass or field that does not exist."""
    for key in recipe.options:
        name, dot, field = key.partition(".")
        if not dot:
            raise InputError(f"--option {key!r}: wanted PASS.FIELD=VALUE")
        solver = solver_of(name)
        kind = registry.load("pass", name) if solver is None else registry.load("solver", solver)
        fields = [item.name for item in dataclasses.fields(kind)]
        if field not in fields:
            near = registry.did_you_mean(field, fields)
            raise InputError(
                f"pass {name} has no field {field!r}{near} (it has: {', '.join(fields) or 'none'})"
            )


def solver_of(name: str) -> str | None:
    """The solver whose fields `quantize_NAME` holds; None where `name` is a pass."""
    solver = name.removeprefix("quantize_")
    known = solver != name and solver in registry.names("solver") and solver != "rtn"
    return solver if known else None


def converted(key: str, text: str, default: Any) -> Any:
    """The value that `text` spells, of the type of `default`.

    Raises:
        InputError: it spells none.
    """
    if isinstance(default, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise InputError(f"--option {key}={text}: wanted true or false")
        return words[text.lower()]
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(f"--option {key}={text}: wanted {type(default).__name__}") from None
