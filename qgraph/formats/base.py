"""What every weight format offers, and how formats are spelled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.parts import PARTS as PARTS
from qgraph.formats.parts import Array as Array
from qgraph.formats.parts import Layout as Layout
from qgraph.formats.parts import Part as Part
from qgraph.formats.parts import PartSpec as PartSpec
from qgraph.formats.parts import QuantizedWeight as QuantizedWeight

GROUPS: tuple[int, ...] = (16, 32, 64, 128, 256, 0)
"""The group sizes that users may ask for; 0 is one group per row."""


@dataclasses.dataclass(frozen=True)
class Format(ABC):
    """One weight format with its parameters; frozen, comparable, hashable.

    The registry holds one instance per name, with the defaults; `parse` and
    `dataclasses.replace` make the others. `options` are the fields that users may set.
    """

    name: str
    """The name in the registry, as users type it."""
    bits: int
    """Bits of a code."""
    symmetric: bool
    """Whether there are no zero points."""
    group: int = 64
    """Weights along K that share a scale, 0 for the whole row; where it is an option, one of
    GROUPS (a subclass may compute with others, `validate` refuses them)."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """The options that this format takes, each with the values it may have, as spelled."""
        return {"group": tuple(spell_group(g) for g in GROUPS)}

    @property
    def numbers(self) -> str:
        """What kind of number the codes are, as kernels have it: `int`, `uint`, `e4m3`, `nf4`."""
        return self.name

    @property
    def as_sums(self) -> bool:
        """Whether MatMulNBits reads it in the layout "sums", minimums added by another product."""
        return False

    @property
    def as_integers(self) -> tuple[Literal["blocks", "nbits8"], int] | None:
        """The layout in which MatMulNBits reads this format, and its bits; None for none."""
        return None

    @property
    def fits_16_bits(self) -> bool:
        """Whether uint8 times the codes of columns 2i and 2i + 1 always add up in 16 bits."""
        return False

    def spell(self, *, with_group: bool = True) -> str:
        """The format with its parameters, as `parse` reads it: `uint4:group=64`.

        A group that can be chosen is always there unless it is not wanted, other options where
        they differ from the default.
        """
        default = registry.load("format", self.name)
        words = []
        for option in self.options:
            value = getattr(self, option)
            if option == "group":
                words += [f"group={spell_group(value)}"] * with_group
            elif value != getattr(default, option):
                words.append(f"{option}={_spelled(value)}")
        return f"{self.name}:{','.join(words)}" if words else self.name

    @property
    @abstractmethod
    def code_range(self) -> tuple[int, int]:
        """The least and the largest code."""

    @property
    @abstractmethod
    def levels(self) -> Array:
        """What each code of `code_range` stands for before zero point and scale: float32 `[codes]`.

        NaN where a code is no finite number.
        """

    @property
    def free_scales(self) -> bool:
        """Whether each group may have any float as its scale, whatever the other groups have."""
        return False

    @property
    def moves(self) -> tuple[int, ...]:
        """Where each group may have any scale that can be stored, and those are few: which to try.

        In steps from the one that rounding takes to the next larger (1) or smaller one (-1).
        """
        return ()

    @property
    def has_ranges(self) -> bool:
        """Whether the scale of a group is a solver's to choose."""
        return self.free_scales or bool(self.moves)

    @property
    def reach(self) -> float:
        """The largest |ŵ| in units of the scale; zero points are codes."""
        return float(np.nanmax(np.abs(self.levels)))

    def row_step(self, k: int) -> int:
        """Rows that belong together: blocks of rows start at multiples of it."""
        return 1

    @property
    def needs_survey(self) -> bool:
        """Whether rounding has to know something of the whole weight.

        Unless `fitted` told it, `quantize` then takes the rows it gets as the whole weight.
        """
        return False

    def survey(self, rows: Array) -> Array:
        """What rounding has to know of a whole weight, from a block of its rows."""
        return np.empty(0)

    def fitted(self, surveys: Sequence[Array]) -> Format:
        """This format for one weight, given what `survey` found in each block of its rows."""
        return self

    def fitted_to(self, rows: Array) -> Format:
        """This format for the weight `[N, K]` that is in memory as a whole."""
        return self.fitted([self.survey(rows)]) if self.needs_survey else self

    @property
    def default_layout(self) -> Layout:
        """The layout that `qgraph::Dequantize…` reads."""
        return Layout("blocks", self.group)

    @abstractmethod
    def validate(self, n: int, k: int) -> None:
        """Raise InputError, naming value found and wanted, if `[n, k]` cannot take this format."""

    @abstractmethod
    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """Shape and type of every part of an `[n, k]` weight in `layout`.

        Raises:
            InputError: the format has no such layout, or cannot store scales in `scale_dtype`.
        """

    @abstractmethod
    def quantize(self, rows: Array, scale_dtype: ir.DataType) -> QuantizedWeight:
        """Round `rows` (float32 `[n, K]`) to nearest, ties to even, against the scale as stored.

        Rows may lie column by column, as linears store them; so do the codes then.

        Raises:
            ScaleOverflow: a scale does not fit `scale_dtype`.
        """

    def moved(self, weight: QuantizedWeight, steps: Array) -> QuantizedWeight:
        """`weight` with its scales moved by `steps`, int `[n, nb]`, as far as they go; see `moves`.

        The codes stay, whatever they then stand for.
        """
        raise NotImplementedError(f"{self.name} has no moves")

    def settled(self, weight: QuantizedWeight) -> QuantizedWeight:
        """`weight`, whose codes a solver chose one by one, with codes that may stand together."""
        return weight

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight) -> Array:
        """The float32 `[n, K]` that the codes stand for."""

    def same(self, own: QuantizedWeight, found: QuantizedWeight) -> bool:
        """Whether `found`, unpacked from any layout, has the very numbers of `own`."""
        one, other = self.dequantize(own), self.dequantize(found)
        return bool(np.array_equal(one, other, equal_nan=True))

    def addends(self, weight: QuantizedWeight) -> tuple[Array, ...]:
        """Matrices float32 `[n, K]`, Ŵ their sum, that fused kernels multiply one by one.

        The first is the kernel's own, whose activations may be rounded to int8; the others meet
        activations as they are.
        """
        return (self.dequantize(weight),)

    @abstractmethod
    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """The parts of a block of rows in `layout`, each an array whose bytes are those stored.

        "qdq" packs types below one byte flat: every block but the last must have a multiple of
        8/bits rows; blocks then concatenate bytewise.
        """

    @abstractmethod
    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """The inverse of `pack`; `parts` hold raw bytes (u8) or typed arrays of the right size."""

    @abstractmethod
    def size_bits(self, k: int, scale_dtype: ir.DataType) -> float:
        """Bits per weight for rows of length `k`, scales, zero points and padding included."""

    @abstractmethod
    def error_bound(self, weight: QuantizedWeight) -> Array:
        """float32 `[n, nb]`: the largest |w - ŵ| that rounding may leave in each group."""

    @abstractmethod
    def function(self, opset: int) -> ir.Function:
        """`qgraph::Dequantize…V1(codes, scales[, …]) -> W [N, K]` in standard operators.

        Attributes: `k` (INT, the row length), `dtype` (INT, the ONNX type of W, equal to the
        type of the scales where those are stored as floats). Codes and scales lie as "blocks",
        of any size where the group is an option.
        """

    @abstractmethod
    def linear(self, opset: int) -> ir.Function:
        """`qgraph::Linear…V1(x, codes, scales[, …]) -> y`: x · Wᵀ, block of rows by block.

        x: `[…, K]` of any rank, y: `[…, N]`, computed in float32. Attributes: `k`, the row
        length; `dtype`, the ONNX type of y. Parts lie as `function` has them.
        """

    @property
    @abstractmethod
    def function_name(self) -> str:
        """The name of `function`, with the version of its layout: `DequantizeInt4V1`."""

    @property
    def linear_name(self) -> str:
        """The name of `linear`: `LinearInt4V1`."""
        return self.function_name.replace("Dequantize", "Linear")


def spell_group(group: int) -> str:
    """A group size as users type it."""
    return str(group) if group else "row"


def check_group(group: int) -> None:
    """Raise InputError unless users may ask for this group size."""
    if group not in GROUPS:
        raise InputError(f"group {group}: wanted a power of two from 16 to 256, or row")


@functools.cache  # asked again for every site
def parse(text: str, *, group: int | None = None) -> Format:
    """The format that `text` spells: `int4`, `uint4:group=128`, `int4:group=row,scale=signed`.

    `group` is the group size asked for beside the text (0 for the whole row); a text that
    names another one is an error.

    Raises:
        InputError: unknown format, option or value, with what there is and the nearest name.
    """
    name, colon, tail = text.partition(":")
    default: Format = registry.load("format", name.strip())
    values: dict[str, Any] = {}
    for word in tail.split(",") if colon else ():
        option, equals, value = (part.strip() for part in word.partition("="))
        if option in values or not (equals and value):
            wanted = "each option once" if option in values else "OPTION=VALUE"
            raise InputError(f"format {text!r}: found {word!r}, wanted {wanted}")
        values[option] = _option_value(default, option, value)
    if group is not None:
        check_group(group)
        if "group" not in default.options:
            raise InputError(
                f"format {name.strip()} has no groups to choose, found group {spell_group(group)}"
            )
        if values.setdefault("group", group) != group:
            raise InputError(
                f"format {text!r} and group {spell_group(group)} contradict each other: give one"
            )
    return dataclasses.replace(default, **values)


def _spelled(value: str | bool) -> str:
    """An option's value as users type it."""
    return str(value).lower() if isinstance(value, bool) else value


def _option_value(default: Format, option: str, value: str) -> str | int:
    """`value` of `option` as its field holds it."""
    options = default.options
    if option not in options:
        raise InputError(
            f"{default.name} has no option {option!r}{registry.did_you_mean(option, options)} "
            f"(it has: {', '.join(options) or 'none'})"
        )
    if option == "group" and value == "0":
        return 0
    if value not in options[option]:
        raise InputError(
            f"{default.name}: {option} {value!r}{registry.did_you_mean(value, options[option])}"
            f" (wanted one of: {', '.join(options[option])})"
        )
    if option == "group":
        return 0 if value == "row" else int(value)
    return value == "true" if isinstance(getattr(default, option), bool) else value


@functools.cache
def named(function: str) -> Format | None:
    """The format, in its default group, whose `function_name` this is; None for none of ours."""
    return _by_function().get(function)


def function_names() -> tuple[str, ...]:
    """The `function_name` of every format with each of its options, sorted."""
    return tuple(sorted(_by_function()))


@functools.cache
def _by_function() -> dict[str, Format]:
    """Every function name with the first format, in the order of the registry, that has it."""
    found: dict[str, Format] = {}
    for name in registry.names("format"):
        for fmt in variants(registry.load("format", name)):
            found.setdefault(fmt.function_name, fmt)
    return found


def variants(fmt: Format) -> list[Format]:
    """`fmt` with each combination of its options but the group."""
    options = {name: values for name, values in fmt.options.items() if name != "group"}
    found = []
    for values in itertools.product(*options.values()):
        chosen: dict[str, Any] = dict(zip(options, values, strict=True))
        chosen = {name: _option_value(fmt, name, value) for name, value in chosen.items()}
        found.append(dataclasses.replace(fmt, **chosen))
    return found
