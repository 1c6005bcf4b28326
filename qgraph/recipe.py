"""What the user asks: one frozen dataclass, from keywords, the command line or TOML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qgraph.activation_kinds import FP8_KINDS, INT8, INT8_AUTO, INT8_ROW, INT8_STATIC
from qgraph.errors import InputError
from qgraph.ort_versions import parse_version
from qgraph.pass_options import converted
from qgraph.registry import did_you_mean

Configured = TypeVar("Configured")
FLOAT = "float"
LEVELS = ("auto", "0", "4")
CALIBRATIONS = ("sequential", "parallel")
UNFUSED = ("auto", "float", "portable")
PREFERENCES = ("speed", "size")
ACTIVATIONS = (FLOAT, INT8, INT8_ROW, INT8_STATIC, INT8_AUTO, *FP8_KINDS)
"""What linears multiply: floats, or bytes that the graph rounds them to."""
CANDIDATES = (
    "uint2:group=32", "uint4:group=256", "uint4:group=128", "int4:group=64,scale=signed",
    "uint4:group=64", "uint4:group=32", "int8:group=64", FLOAT,
)  # fmt: skip
"""What a budget may choose from where nothing else is asked for."""
PURPOSES = ("decode", "prefill", "both")
"""What a model is to be fast at: few rows, many rows, or both."""
_LEVEL_OPTION = "lower_matmul_nbits.accuracy_level"


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--set 'GLOB=FORMAT[:option=value,…][,solver=NAME][,activations=KIND]'`, or `[[set]]`.

    format: a spelled format, `float` to keep the weight, or None for the recipe's own.
    activations: see `Recipe`; None for the recipe's own.
    """

    selector: str
    format: str | None = None
    solver: str | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        given = [self.format, self.solver, self.activations]
        if not self.selector or "" in given or not any(given):
            raise InputError(
                f"the set for {self.selector!r} says nothing of the weights it selects: it takes a "
                "selector, and format (as 'int8:group=64'; 'float' keeps them), solver or "
                f"activations, one or more of them; found {self}"
            )
        if self.activations is not None:
            _check_activations(self.activations)

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
        words = [piece.partition("=") for piece in pieces]
        named = {key: value for key, _, value in words if key in ("solver", "activations")}
        if len(named) < sum(word[0] in ("solver", "activations") for word in words):
            raise InputError(f"--set {text!r}: wanted each of solver and activations once")
        fmt = ",".join("".join(word) for word in words if word[0] not in ("solver", "activations"))
        return cls(selector, fmt or None, **named)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Format, solver, sites.

    format: a spelled format (`uint4:group=128`), `auto`: the best 4-bit format, or `float`: the
        graph is fused alone, and weights stay as they are but where `overrides` say otherwise.
    group: weights per scale along K; None for the format's own, 0 for the whole row.
    solver: one, or several composed (`awq+clip+gptq`).
    calibration: `sequential` (each linear is solved on inputs from the model quantized so far)
        or `parallel` (on inputs from the float model).
    embedding: `auto`, `float`, or a format for embedding tables; a tied head follows it.
    accuracy_level: `auto`, `0` (float activations) or `4` (int8 activations); the option
        `lower_matmul_nbits.accuracy_level` may say it where this is `auto`.
    activations: `float` (the accuracy level says what kernels of packed weights make of them), or
        bytes that the graph makes of the inputs of linears, heads left out: `int8` (one scale for
        the tensor, found as it runs), `int8-row` (one for each row, that is token), `int8-static`
        (scale and zero point from calibration), `int8-auto` (static where calibration data says
        that it costs little more than rows; rows without data). The weights are then
        `int8-pairs`, or `int8-row` if asked for. Or FP8, and floats again for the kernel: `fp8`
        (one scale from calibration), `fp8-token`; with `fp8-e4m3`.
    outliers: input columns of each such linear that stay in float, at most: those of the largest
        activations in calibration.
    unfused: what becomes of a weight that no kernel takes: `float` (as it is), or `portable`
        (packed, and dequantized block by block in standard operators: small, and slow); `auto`
        is `portable` for formats that are no integers, else `float`.
    prefer: `speed` or `size`, for formats that a fast kernel reads in a larger form.
    min_runtime: the oldest ONNX Runtime that has to run the result, as in `1.27`: kernels and fused
        ops that are newer are not used. Empty: the installed one.
    purpose: what the model is to be fast at, one of PURPOSES: formats, groups and activations are
        chosen linear by linear, by measured times where there are any. Empty: as they are asked
        for.
    dequantize_at_load: linears are stored packed and become floats when the model is loaded,
        whatever their format; no kernel computes on the packed weight.
    fuse: whether what exporters spell out around the linears (norms, activations, attention)
        becomes fused ops, where the target is ONNX Runtime.
    add_cache: a decoder that reads the whole text at every step gets inputs and outputs for what
        it has read, past_key_values and present; its attention must have been fused.
    kv_cache: how the cache of fused attention stores keys and values: `int8`, `int4`, `fp8`, also
        `int8:scale=tensor` (see `qgraph.formats.kv_cache`). Empty: floats, as they are.
    last_logits: a decoder gives the logits of the last token of each row alone, [B, 1, V]: text is
        made by no others, and rows must then not be padded behind their tokens.
    min_elements: smaller weights stay as they are.
    target_bits, max_size, mixed: a budget, by which each weight gets a format of its own: bits a
        weight over all linears, scales included; bytes of the file (in TOML also "90MB"); or
        the smallest file that keeps `max_kl`. One of the three, and it takes calibration data.
    max_kl: KL divergence from the float model on samples that are held out, in nats a token; above
        it nothing is written.
    candidates: the formats to choose from, beside the recipe's own; `float` is one.
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
    activations: str = FLOAT
    outliers: int = 0
    unfused: str = "auto"
    prefer: str = "speed"
    min_runtime: str = ""
    purpose: str = ""
    dequantize_at_load: bool = False
    fuse: bool = True
    add_cache: bool = False
    kv_cache: str = ""
    last_logits: bool = False
    min_elements: int = 1024
    target_bits: float | None = None
    max_size: int | None = None
    mixed: bool = False
    max_kl: float | None = None
    candidates: tuple[str, ...] = CANDIDATES
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.accuracy_level not in LEVELS:
            raise InputError(
                f"accuracy level {self.accuracy_level!r}: wanted one of {', '.join(LEVELS)}"
            )
        if self.calibration not in CALIBRATIONS:
            wanted = " or ".join(CALIBRATIONS)
            raise InputError(f"calibration {self.calibration!r}: wanted {wanted}")
        if self.add_cache and not self.fuse:
            raise InputError("--add-cache needs fused attention: leave out --no-fuse")
        if self.kv_cache:
            self._check_cache()
        if self.min_runtime:
            parse_version(self.min_runtime)
        if self.unfused not in UNFUSED:
            raise InputError(f"unfused {self.unfused!r}: wanted one of {', '.join(UNFUSED)}")
        if self.prefer not in PREFERENCES:
            raise InputError(f"prefer {self.prefer!r}: wanted one of {', '.join(PREFERENCES)}")
        if self.purpose not in ("", *PURPOSES):
            near = did_you_mean(self.purpose, PURPOSES)
            raise InputError(f"for {self.purpose!r}{near}: wanted one of {', '.join(PURPOSES)}")
        self._check_purpose()
        if self.min_elements < 0:
            raise InputError(f"min_elements {self.min_elements}: wanted 0 or more")
        _check_activations(self.activations)
        self._check_rounded()
        self._check_budget()
        level = self.options.get(_LEVEL_OPTION, self.accuracy_level)
        if self.accuracy_level not in ("auto", level):
            raise InputError(
                f"--accuracy-level {self.accuracy_level} and --option {_LEVEL_OPTION}={level} "
                "contradict each other: give one of them"
            )

    def _check_cache(self) -> None:
        from qgraph.formats.kv_cache import CacheFormat  # loads numpy, which help does without

        CacheFormat.parse(self.kv_cache)
        if not self.fuse:
            raise InputError(
                f"--kv-cache {self.kv_cache} needs fused attention: leave out --no-fuse"
            )

    def _check_budget(self) -> None:
        given = [self.target_bits is not None, self.max_size is not None, self.mixed]
        if sum(given) > 1:
            raise InputError(
                "--target-bits, --max-size and --mixed are three budgets: give one of them"
            )
        if self.mixed and self.max_kl is None:
            raise InputError(
                "--mixed looks for the smallest file within a loss: add --max-kl X, or give "
                "--target-bits or --max-size instead"
            )
        limits = {"target bits": self.target_bits, "max size": self.max_size, "max kl": self.max_kl}
        for name, value in limits.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} {value}: wanted a number above 0")
        if self.budgeted and self.activations != FLOAT:
            raise InputError(
                f"--activations {self.activations} says what the weights are: leave it out, or "
                "the budget"
            )
        if self.candidates != CANDIDATES and not self.budgeted:
            raise InputError(
                "candidates are what a budget chooses from: add --target-bits, --max-size or "
                "--mixed, or name one format with --format"
            )

    @property
    def budgeted(self) -> bool:
        """Whether each weight gets a format of its own, within a budget."""
        return self.target_bits is not None or self.max_size is not None or self.mixed

    @property
    def judged(self) -> bool:
        """Whether what is made is measured on samples that are held out."""
        return self.budgeted or self.max_kl is not None

    def _check_rounded(self) -> None:
        """Refuse what contradicts, or wants, rounded activations."""
        kinds = {item.activations or FLOAT for item in self.overrides} | {self.activations}
        rounded = kinds - {FLOAT}
        if self.outliers < 0:
            raise InputError(f"outliers {self.outliers}: wanted 0 or more input columns")
        if self.purpose in ("prefill", "both") and not rounded:
            rounded = {INT8_ROW}  # where it is faster
        if self.outliers and not rounded:
            raise InputError(
                f"--outliers {self.outliers} keeps columns of rounded activations in float, and "
                "these are all floats: add --activations int8-row, or leave it out"
            )
        if self.outliers and not rounded.difference(FP8_KINDS):
            raise InputError(
                f"--outliers {self.outliers} and activations {min(rounded)} contradict each other: "
                "columns stay in float beside int8 activations only; give one of them"
            )
        if self.dequantize_at_load and rounded:
            raise InputError(
                f"--dequantize-at-load and activations {min(rounded)} contradict each other: "
                "float weights are multiplied with floats; give one of them"
            )

    def _check_purpose(self) -> None:
        """Refuse what contradicts a choice by speed."""
        if not self.purpose:
            return
        asked = f"--for {self.purpose}"
        if self.budgeted:
            raise InputError(
                f"{asked} chooses formats by speed, and --target-bits, --max-size and --mixed by "
                "loss: give one of them"
            )
        if self.dequantize_at_load:
            raise InputError(
                f"{asked} chooses kernels, and with --dequantize-at-load there are none: give one "
                "of them"
            )
        if self.accuracy_level == "0":
            raise InputError(
                f"{asked} and --accuracy-level 0 contradict each other: kernels are fast with int8 "
                "activations; give one of them"
            )
        if self.activations in FP8_KINDS:
            raise InputError(
                f"{asked} and --activations {self.activations} contradict each other: no CPU has "
                "kernels of FP8 to choose from; give one of them"
            )
        if self.purpose == "decode" and self.activations != FLOAT:
            raise InputError(
                f"--for decode and --activations {self.activations} contradict each other: integer "
                "kernels are for many rows; --for prefill or both takes them"
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
                values[field] = converted(key, text, fields[field].default)
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
        from qgraph.recipe_file import fields  # which imports this module

        return cls(**fields(path))

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


def _check_activations(kind: str) -> None:
    if kind not in ACTIVATIONS:
        wanted = ", ".join(ACTIVATIONS)
        near = did_you_mean(kind, ACTIVATIONS)
        raise InputError(f"activations {kind!r}{near} (wanted one of {wanted})")
