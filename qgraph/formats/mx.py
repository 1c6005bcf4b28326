"""`mxfp4` and `mxfp8`: small floats in blocks of 32 along K that share a power of two.

Open Compute Project, "Microscaling Formats (MX) Specification v1.0". The scale is
2^(floor(log2(amax)) − e), e the exponent of the elements' largest binade, stored as a byte (E8M0:
exponent + 127); what then lies beyond the largest element is clipped to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.formats import small_floats
from qgraph.formats.base import Array, Part, PartSpec, QuantizedWeight
from qgraph.formats.doubled import DoubledLevels
from qgraph.formats.grouping import count_groups
from qgraph.formats.level_functions import Order, Spelling
from qgraph.formats.level_groups import LevelGroups, Scales

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Mx(LevelGroups):
    """Elements of a table, one E8M0 byte per block of 32."""

    group: int = BLOCK

    @property
    def _exponent(self) -> int:
        """That of the largest binade."""
        return int(np.frexp(self.top)[1]) - 1

    @property
    def _clip(self) -> float:
        return float(2.0 ** (self._exponent + 1)) - self.top

    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        return _scales(small_floats.e8m0_scale(amax, self._exponent))

    @property
    def moves(self) -> tuple[int, ...]:
        """The next powers of two: one clips more, the other nothing."""
        return 1, -1

    def moved(self, weight: QuantizedWeight, steps: Array) -> QuantizedWeight:
        """See `Format.moved`."""
        codes = np.clip(_codes(weight.scales) + steps, 0, 254).astype(np.uint8)
        return dataclasses.replace(weight, scales=_scales(codes).values)

    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        return {"scales": PartSpec((n, count_groups(k, self.group)), ir.DataType.UINT8)}

    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        return {"scales": _codes(weight.scales).astype(np.uint8)}

    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        return _scales(parts["scales"].view(np.uint8).reshape(n, nb))


def _codes(scales: Array) -> Array:
    """The bytes of scales: a power of two says by itself what its byte is."""
    exponents: Array = np.frexp(scales)[1] + 126
    return exponents


def _scales(codes: Array) -> Scales:
    return Scales(small_floats.E8M0[codes])


@dataclasses.dataclass(frozen=True)
class Mxfp4(DoubledLevels, Mx):
    """E2M1 elements; two orders of the nibbles of a block are in use."""

    bits: int = 4
    group: int = BLOCK
    order: Literal["interleaved", "halves"] = "interleaved"
    """Elements 2j and 2j + 1 in a byte (gpt-oss), or j and j + 16 (GGUF)."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`order`."""
        return {"order": ("interleaved", "halves")}

    @property
    def numbers(self) -> str:
        """`mxfp4`."""
        return self.name

    @property
    def levels(self) -> Array:
        """See `Format.levels`."""
        return small_floats.E2M1

    @property
    def _order(self) -> Order:
        return "halves" if self.order == "halves" else "low"

    @property
    def function_name(self) -> str:
        """`DequantizeMxfp4V1`, or `DequantizeMxfp4HalvesV1`."""
        return f"DequantizeMxfp4{'Halves' if self.order == 'halves' else ''}V1"

    def spelling(self) -> Spelling:
        """See `LevelGroups.spelling`."""
        return Spelling(self.levels, self._order, small_floats.E8M0)


@dataclasses.dataclass(frozen=True)
class Mxfp8(Mx):
    """E4M3 or E5M2 elements."""

    bits: int = 8
    element: Literal["e4m3", "e5m2"] = "e4m3"

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`element`."""
        return {"element": ("e4m3", "e5m2")}

    @property
    def levels(self) -> Array:
        """See `Format.levels`; NaN for codes that are no finite number."""
        return _FINITE[self.element]

    @property
    def function_name(self) -> str:
        """`DequantizeMxfp8E4m3V1`, or `DequantizeMxfp8E5m2V1`."""
        return f"DequantizeMxfp8{self.element.capitalize()}V1"

    def spelling(self) -> Spelling:
        """See `LevelGroups.spelling`."""
        return Spelling(_VALUES[self.element], scale_levels=small_floats.E8M0)


_VALUES = {"e4m3": small_floats.E4M3, "e5m2": small_floats.E5M2}
_FINITE = {name: small_floats.finite(values) for name, values in _VALUES.items()}

MXFP4 = Mxfp4("mxfp4")
MXFP8 = Mxfp8("mxfp8")
