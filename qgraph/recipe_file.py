"""A recipe in a file: TOML with the fields of `Recipe`, and `[[set]]` tables for overrides."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from qgraph.errors import InputError
from qgraph.recipe import Override, Recipe
from qgraph.registry import did_you_mean
from qgraph.sizes import parse_size

_NUMBERS = {"target_bits": (int, float), "max_size": (int, str), "max_kl": (int, float)}
_OF_A_RUN = frozenset(
    "calibrate check dry_run force min_coverage output report resume samples sequence single_file "
    "strict target tokenizer tune".split()
)
"""Options of the command line that a recipe does not hold."""


def fields(path: Path) -> dict[str, Any]:
    """The fields of the `Recipe` that a TOML file spells, by name.

    Raises:
        InputError: unreadable, no TOML, or an unknown or ill-typed key.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"recipe {path} is no regular file; wanted a TOML file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"recipe {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"recipe {path}: {error}") from None
    sets = table.pop("set", [])
    if not isinstance(sets, list):
        raise InputError(f"recipe {path}: set wants [[set]] tables, not {sets!r}")
    overrides = tuple(_override(item, path) for item in sets)
    known = {field.name for field in dataclasses.fields(Recipe)} - {"overrides"}
    found: dict[str, Any] = {"overrides": overrides}
    for key, value in table.items():
        if key not in known:
            if key in _OF_A_RUN:
                raise InputError(
                    f"recipe {path}: {key!r} is of a run, and no part of a recipe: give "
                    f"--{key.replace('_', '-')} on the command line"
                )
            near = "; --for is called 'purpose' here" if key == "for" else did_you_mean(key, known)
            raise InputError(f"recipe {path}: unknown key {key!r}{near}")
        default = getattr(Recipe(), key)
        if key in ("include", "exclude", "candidates"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise InputError(f"recipe {path}: {key} wants a list of texts, not {value!r}")
            value = tuple(value)
        elif key == "options":
            if not isinstance(value, dict):
                raise InputError(f"recipe {path}: options wants a table, not {value!r}")
            value = {str(k): str(v) for k, v in value.items()}
        elif key == "group":
            if isinstance(value, bool) or not (isinstance(value, int) or value == "row"):
                raise InputError(f"recipe {path}: group wants a number or 'row', not {value!r}")
            value = 0 if value == "row" else value
        elif key == "accuracy_level":
            value = str(value)
        elif key in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, _NUMBERS[key]):
                raise InputError(f"recipe {path}: {key} wants a number, not {value!r}")
            value = parse_size(value) if isinstance(value, str) else value
        elif type(value) is not type(default):
            wanted = type(default).__name__
            raise InputError(f"recipe {path}: {key} wants {wanted}, not {value!r}")
        found[key] = value
    return found


def _override(item: Any, path: Path) -> Override:
    known = {"selector", "format", "solver", "activations"}
    if not isinstance(item, dict) or "selector" not in item or not set(item) <= known:
        raise InputError(
            f"recipe {path}: [[set]] wants selector, and format, solver or activations; "
            f"found {item!r}"
        )
    if not all(isinstance(value, str) for value in item.values()):
        raise InputError(f"recipe {path}: [[set]] takes texts; found {item!r}")
    try:
        return Override(**item)
    except InputError as error:
        raise InputError(f"recipe {path}: {error}") from None
