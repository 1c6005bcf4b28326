"""What every weight format offers, and the arrays that pass between format, solver and kernel.

`W` is always `[N, K]`: rows are outputs, columns are inputs. `G` is the group size along K
(0 stands for the whole row) and `nb = ceil(K / G)` the number of groups in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph import registry
from qgraph.errors import InputError

Array: TypeAlias = NDArray[Any]
Part = Literal["codes", "scales", "zeros"]
PARTS: tuple[Part, ...] = ("codes", "scales", "zeros")
GROUPS: tuple[int, ...] = (16, 32, 64, 128, 256, 0)
"""The group sizes that users may ask for; 0 is one group per row."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the parts of a quantized weight lie in memory.

    kind "blocks": what `qgraph::Dequantize…` and MatMulNBits read. Codes are unsigned
        (symmetric formats add 2^(bits-1)), packed along K, low bits first, each row padded
        to whole blocks with the zero point: u8 `[N, nb, block·bits/8]`; scales `[N, nb]`;
        zeros u8 `[N, ceil(nb·bits/8)]`, packed like the codes, each row padded to whole bytes.
        `block` is the group, or a smaller block that divides it, whose scales then repeat;
        where the group is the whole row any block will do, and 0 is one block per row
        (u8 `[N, 1, ceil(K·bits/8)]`).
    kind "qdq": what DequantizeLinear reads, axis 1: codes `[N, K]` in the format's own ONNX
        integer type (ONNX packs flat, without padding rows), scales and zeros `[N, nb]`
        (rank 1, `[N]`, where the group is the whole row). `block` is not looked at.
    """

    kind: Literal["blocks", "qdq"]
    block: int = 0


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """Shape and ONNX type of one part of a quantized weight, as stored."""

    shape: tuple[int, ...]
    dtype: ir.DataType

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored; types below one byte are packed flat."""
        return -(-self.size * self.dtype.bitwidth // 8)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """Rows of a quantized weight, unpacked, in any order of memory. Only a format packs.

    codes: `[n, K]`, int8 for symmetric formats (signed codes), uint8 for asymmetric ones.
    scales: `[n, nb]` in the dtype in which they are stored (float32 or float16).
    zeros: `[n, nb]` uint8, or None where the format is symmetric.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None

    def rows(self, rows: slice) -> QuantizedWeight:
        """Some of the rows; views of the arrays."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return QuantizedWeight(self.codes[rows], self.scales[rows], zeros)

    @classmethod
    def joined(cls, pieces: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Blocks of rows of one weight (at least one), one behind the other."""
        if len(pieces) == 1:
            return pieces[0]
        zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
        return cls(
            np.concatenate([piece.codes for piece in pieces]),
            np.concatenate([piece.scales for piece in pieces]),
            np.concatenate(zeros) if zeros else None,
        )


@dataclasses.dataclass(frozen=True)
class Format(ABC):
    """One weight format with its parameters; frozen, comparable, hashable.

    A subclass's fields after `symmetric` are its options. The registry holds one instance per
    name, with the defaults; `parse` and `dataclasses.replace` make the others.
    """

    name: str
    """The name in the registry, as users type it."""
    bits: int
    symmetric: bool
    group: int = 64
    """One of GROUPS; a subclass may compute with others, `validate` refuses them."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """The options that this format takes, each with the values it may have, as spelled."""
        return {"group": tuple(spell_group(g) for g in GROUPS)}

    def spell(self) -> str:
        """The format with its parameters, as `parse` reads it: `uint4:group=64`.

        The group is always there, other options only where they differ from the default.
        """
        default = registry.load("format", self.name)
        words = [f"group={spell_group(self.group)}"]
        for option in self.options:
            value = getattr(self, option)
            if option != "group" and value != getattr(default, option):
                words.append(f"{option}={value}")
        return f"{self.name}:{','.join(words)}"

    @property
    @abstractmethod
    def code_range(self) -> tuple[int, int]:
        """The least and the largest code."""

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
            OverflowError: a scale does not fit `scale_dtype`; `args[1]` is (row, group).
        """

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight) -> Array:
        """The float32 `[n, K]` that the codes stand for."""

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
        """`qgraph::Dequantize…V1(codes, scales[, zeros]) -> W [N, K]` in standard operators.

        Attributes: `k` (INT, the row length), `dtype` (INT, the ONNX type of W, equal to the
        type of the scales). Codes and scales lie as "blocks" of any size.
        """

    @property
    @abstractmethod
    def function_name(self) -> str:
        """The name of `function`, with the version of its layout: `DequantizeInt4V1`."""


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
        if values.setdefault("group", group) != group:
            raise InputError(
                f"format {text!r} and group {spell_group(group)} contradict each other: give one"
            )
    return dataclasses.replace(default, **values)


def _option_value(default: Format, option: str, value: str) -> str | int:
    """`value` of `option` as its field holds it."""
    options = default.options
    if option not in options:
        raise InputError(
            f"{default.name} has no option {option!r}{registry.did_you_mean(option, options)} "
            f"(it has: {', '.join(options)})"
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
    return value
