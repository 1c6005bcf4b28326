"""Formats of a decoder's cache whose scales are known beforehand, as attention kernels read it.

A key or value x `[B, H, T, D]` (heads, tokens, channels) is stored as the code
clip(round(x / s)) and read as code · s; rounding is to the nearest, ties to even. One scale s holds
for the tensor, `[1]`, or for each channel of each head, `[1, H, 1, D]`. Source: the documentation
of GroupQueryAttention in ONNX Runtime's operators (domain com.microsoft), section "Quantization".
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.packing import pack_bits, unpack_bits
from qgraph.formats.parts import Array
from qgraph.formats.small_floats import E4M3_MAX
from qgraph.registry import did_you_mean

Spread = Literal["tensor", "channel"]
_LIMITS = {"int8": 127.0, "int4": 7.0, "fp8": E4M3_MAX}
"""The largest code on both sides of 0; integers have one more below."""
NAMES = tuple(_LIMITS)
SPREADS: tuple[Spread, ...] = ("channel", "tensor")
_DATA_TYPES = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.UINT8,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """How keys and values are stored: `int8`, `int4` (two to a byte) or `fp8` (E4M3).

    scale: one scale for each `channel` of each head, or for the whole `tensor`.
    """

    name: str
    scale: Spread = "channel"

    @classmethod
    def parse(cls, text: str) -> CacheFormat:
        """Read `NAME` or `NAME:scale=channel|tensor`.

        Raises:
            InputError: another name, option or value.
        """
        name, _, option = (part.strip() for part in text.partition(":"))
        if name not in NAMES:
            near = did_you_mean(name, NAMES)
            raise InputError(f"kv cache {text!r}{near}: wanted one of {', '.join(NAMES)}")
        key, _, value = (part.strip() for part in option.partition("="))
        found = [each for each in SPREADS if (key, value) == ("scale", each)]
        if ":" in text and not found:
            wanted = " or ".join(f"{name}:scale={each}" for each in SPREADS)
            raise InputError(f"kv cache {text!r}: wanted {name}, {wanted}")
        return cls(name, *found)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.name == "int4" else 8

    @property
    def clips(self) -> bool:
        """Whether there are so few codes that ranges had better leave the farthest values out."""
        return self.name == "int4"

    @property
    def data_type(self) -> ir.DataType:
        """The element type of the cache."""
        return _DATA_TYPES[self.name]

    def width(self, size: int) -> int:
        """Elements of the cache's last axis for heads of `size` channels.

        Raises:
            InputError: half a byte would be left over.
        """
        if size * self.bits % 8:
            raise InputError(f"kv cache {self.name}: heads of {size} channels fill no whole bytes")
        return size * self.bits // 8

    def scales(self, largest: Array) -> Array:
        """The scales for magnitudes that are kept up to `largest` `[H, D]`, float32.

        A channel that was 0 throughout has the scale of the largest one: it may not stay so.
        """
        top = float(largest.max(initial=0.0)) or 1.0
        if self.scale == "tensor":
            return np.array([top / _LIMITS[self.name]], np.float32)
        each = np.where(largest > 0, largest, top) / _LIMITS[self.name]
        return each.astype(np.float32)[None, :, None, :]

    def quantize(self, x: Array, scales: Array) -> Array:
        """Codes `[B, H, T, D]` of x `[B, H, T, D]`.

        Those of int4 are uint8 `[B, H, T, D/2]`: 0 to 15 for -8 to 7, even channels in low bits.
        """
        limit = _LIMITS[self.name]
        scaled = np.asarray(x, np.float32) * (np.float32(1) / scales)
        if self.name == "fp8":
            return np.clip(scaled, -limit, limit).astype(ml_dtypes.float8_e4m3fn)
        codes = np.clip(np.rint(scaled), -limit - 1, limit).astype(np.int8)
        if self.bits == 8:
            return codes
        return pack_bits((codes + self._offset).astype(np.uint8), 4)

    def dequantize(self, codes: Array, scales: Array) -> Array:
        """The values that codes stand for, float32 `[B, H, T, D]`."""
        plain = unpack_bits(codes, 4) if self.bits == 4 else codes
        found: Array = (plain.astype(np.float32) - self._offset) * scales
        return found

    @property
    def _offset(self) -> int:
        """What is added to codes where they are stored without a sign."""
        return 8 if self.bits == 4 else 0
