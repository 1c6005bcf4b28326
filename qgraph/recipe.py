"""What the user asks: one frozen dataclass, from keywords, the command line or TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qgraph.errors import InputError
from qgraph.registry import did_you_mean

Configured = TypeVar("Configured")
FLOAT = "float"
LEVELS = ("auto", "0", "4")
CALIBRATIONS = ("sequential", "parallel")
UNFUSED = ("auto", "float", "portable")
PREFERENCES = ("speed", "size")
_LEVEL_OPTION = "lower_matmul_nbits.accuracy_level"


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--set 'GLOB=FORMAT[:option=value,…][,solver=NAME]'`, or a `[[set]]` table.

    format: a spelled format, `float` to keep the weight, or None for the recipe's own.
    """

    selector: str
    format: str | None = None
    solver: str | None = None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read the command line's spelling.

        Raises:
            InputError: no `=`, or nothing on one side of it.
        """
        selector, equals, rest = text.partition("=")
        if not equals or not selector or not rest:
            raise InputError(
                f"--set {text!r}: wanted 'GLOB=FORMAT', as in 'lm_head*=int8:group=64'"
            )
        pieces = rest.split(",")
        solver = [p.removeprefix("solver=") for p in pieces if p.startswith("solver=")]
        fmt = ",".join(p for p in pieces if not p.startswith("solver="))
        return cls(selector, fmt or None, solver[-1] if solver else None)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Format, solver, sites.

    format: a spelled format (`uint4:group=128`), or `auto`: the best 4-bit format.
    group: weights per scale along K; None for the format's own, 0 for the whole row.
    solver: one, or several composed (`awq+clip+gptq`).
    calibration: `sequential` (each linear is solved on inputs from the model quantized so far)
        or `parallel` (on inputs from the float model).
    embedding: `auto`, `float`, or a format for embedding tables; a tied head follows it.
    accuracy_level: `auto`, `0` (float activations) or `4` (int8 activations); the option
        `lower_matmul_nbits.accuracy_level` may say it where this is `auto`.
    unfused: what becomes of a weight that no kernel takes: `float` (as it is), or `portable`
        (packed, and dequantized block by block in standard operators: small, and slow); `auto`
        is `portable` for formats that are no integers, else `float`.
    prefer: `speed` or `size`, for formats that a fast kernel reads in a larger form.
    dequantize_at_load: linears are stored packed and become floats when the model is loaded,
        whatever their format; no kernel computes on the packed weight.
    min_elements: smaller weights stay as they are.
    options: `PASS.FIELD` → value, for any pass's field.
    """

    format: str = "auto"
    group: int | None = None
    solver: str = "rtn"
    calibration: str = "sequential"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    embedding: str = "auto"
    accuracy_level: str = "auto"
    unfused: str = "auto"
    prefer: str = "speed"
    dequantize_at_load: bool = False
    min_elements: int = 1024
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.accuracy_level not in LEVELS:
            raise InputError(
                f"accuracy level {self.accuracy_level!r}: wanted one of {', '.join(LEVELS)}"
            )
        if self.calibration not in CALIBRATIONS:
            wanted = " or ".join(CALIBRATIONS)
            raise InputError(f"calibration {self.calibration!r}: wanted {wanted}")
        if self.unfused not in UNFUSED:
            raise InputError(f"unfused {self.unfused!r}: wanted one of {', '.join(UNFUSED)}")
        if self.prefer not in PREFERENCES:
            raise InputError(f"prefer {self.prefer!r}: wanted one of {', '.join(PREFERENCES)}")
        if self.min_elements < 0:
            raise InputError(f"min_elements {self.min_elements}: wanted 0 or more")
        level = self.options.get(_LEVEL_OPTION, self.accuracy_level)
        if self.accuracy_level not in ("auto", level):
            raise InputError(
                f"--accuracy-level {self.accuracy_level} and --option {_LEVEL_OPTION}={level} "
                "contradict each other: give one of them"
            )

    def configured(self, name: str, kind: type[Configured]) -> Configured:
        """A pass or solver with the fields that the options `NAME.FIELD` set.

        Raises:
            InputError: a value that its field cannot hold.
        """
        fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, text in self.options.items():
            owner, _, field = key.partition(".")
            if owner == name:
                values[field] = _converted(key, text, fields[field].default)
        return kind(**values)

    @property
    def selectors(self) -> tuple[str, ...]:
        """Every selector that the user wrote."""
        return (*self.include, *self.exclude, *(item.selector for item in self.overrides))

    @classmethod
    def from_toml(cls, path: Path) -> Recipe:
        """Read a recipe file: the fields of this class, and `[[set]]` tables for overrides.

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
        return cls(**_fields(table, path))

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the default: small and stable."""
        default = Recipe()
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == getattr(default, field.name) and field.name not in ("format", "solver"):
                continue
            if field.name == "overrides":
                value = [dataclasses.asdict(item) for item in self.overrides]
            found[field.name] = dict(value) if isinstance(value, Mapping) else value
        return found


def _converted(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise InputError(f"--option {key}={text}: wanted true or false")
        return words[text.lower()]
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(f"--option {key}={text}: wanted {type(default).__name__}") from None


def _fields(table: dict[str, Any], path: Path) -> dict[str, Any]:
    sets = table.pop("set", [])
    if not isinstance(sets, list):
        raise InputError(f"recipe {path}: set wants [[set]] tables, not {sets!r}")
    overrides = tuple(_override(item, path) for item in sets)
    known = {field.name for field in dataclasses.fields(Recipe)} - {"overrides"}
    found: dict[str, Any] = {"overrides": overrides}
    for key, value in table.items():
        if key not in known:
            raise InputError(f"recipe {path}: unknown key {key!r}{did_you_mean(key, known)}")
        default = getattr(Recipe(), key)
        if key in ("include", "exclude"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise InputError(f"recipe {path}: {key} wants a list of selectors, not {value!r}")
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
        elif type(value) is not type(default):
            wanted = type(default).__name__
            raise InputError(f"recipe {path}: {key} wants {wanted}, not {value!r}")
        found[key] = value
    return found


def _override(item: Any, path: Path) -> Override:
    known = {"selector", "format", "solver"}
    if not isinstance(item, dict) or "selector" not in item or not set(item) <= known:
        raise InputError(
            f"recipe {path}: [[set]] wants selector, and format or solver; found {item!r}"
        )
    return Override(**{key: str(value) for key, value in item.items()})
