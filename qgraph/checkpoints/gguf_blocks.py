"""The blocks of GGUF's quantized types: how codes, scales and minimums lie, and what they are.

Layouts are those of ggml (`ggml-quants.c`), which reads a weight back as scale·code, or as
scale·code + minimum, in float32. Types of 32 weights store scales in float16. Types of 256 (K)
store a float16 for the whole block and small integers for its groups of 16 or 32; the product of
the two, formed in float32, is exact and is what is called a scale here.

Codes of a width below 8 bits lie in planes: byte j of a run holds the elements j, j + run,
j + 2·run, …, low bits first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qgraph.formats import small_floats
from qgraph.formats.base import Array
from qgraph.formats.packing import unpack_bits

K = 256
"""Weights in a block of the K types."""
HALF = np.dtype("<f2")
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""The levels of IQ4_NL in units of its scale."""


class Blocks(NamedTuple):
    """What `m` blocks of one type hold: a weight is scale·code, plus its minimum if there are any.

    codes: `[m, size]` int8 or uint8; of MXFP4, indices of E2M1 numbers.
    scales: float32 `[m, size / group]`.
    minimums: float32 `[m, size / group]` or None.
    """

    codes: Array
    scales: Array
    minimums: Array | None = None


@dataclasses.dataclass(frozen=True)
class BlockType:
    """One quantized type: its number in files, and our format that holds it exactly.

    bits: of a code.
    decode: u8 `[m, nbytes]` → `Blocks`.
    """

    name: str
    number: int
    size: int
    nbytes: int
    bits: int
    format: str
    group: int
    decode: Callable[[Array], Blocks]

    @property
    def half_scales(self) -> bool:
        """Whether scales are float16 numbers, and there are no minimums."""
        return self.size < K and self.format in ("int4", "int8")

    def dequantized(self, blocks: Array) -> Array:
        """The formula of ggml: u8 `[m, nbytes]` → float32 `[m, size]`."""
        found = self.decode(blocks)
        levels = small_floats.E2M1[found.codes] if self.name == "MXFP4" else found.codes
        values = levels.astype(np.float32).reshape(len(blocks), -1, self.group)
        with np.errstate(over="ignore"):  # an MXFP4 block may lie beyond float32
            values *= found.scales[..., None]
        if found.minimums is not None:
            values += found.minimums[..., None]
        return values.reshape(len(blocks), -1)


def _planes(data: Array, bits: int, run: int) -> Array:
    """Codes u8 `[m, x·8/bits]` of bytes `[m, x]` that lie in planes."""
    codes = unpack_bits(data, bits).reshape(len(data), -1, run, 8 // bits)
    return np.ascontiguousarray(codes.swapaxes(2, 3)).reshape(len(data), -1)


def _half(data: Array) -> Array:
    """float32 `[m, x/2]` of the bytes of float16 numbers `[m, x]`."""
    return np.ascontiguousarray(data).view(HALF).astype(np.float32)


def _q4_0(data: Array) -> Blocks:
    codes = _planes(data[:, 2:], 4, 16) - np.uint8(8)
    return Blocks(codes.view(np.int8), _half(data[:, :2]))


def _q4_1(data: Array) -> Blocks:
    return Blocks(_planes(data[:, 4:], 4, 16), _half(data[:, :2]), _half(data[:, 2:4]))


def _fifth(high: Array, low: Array) -> Array:
    """5-bit codes: the highest bits u8 `[m, 4]` in order, the low ones `[m, 16]` in planes."""
    found: Array = _planes(low, 4, 16) | unpack_bits(high, 1) << np.uint8(4)
    return found


def _q5_0(data: Array) -> Blocks:
    codes = _fifth(data[:, 2:6], data[:, 6:]) - np.uint8(16)
    return Blocks(codes.view(np.int8), _half(data[:, :2]))


def _q5_1(data: Array) -> Blocks:
    codes = _fifth(data[:, 4:8], data[:, 8:])
    return Blocks(codes, _half(data[:, :2]), _half(data[:, 2:4]))


def _q8_0(data: Array) -> Blocks:
    return Blocks(np.ascontiguousarray(data[:, 2:]).view(np.int8), _half(data[:, :2]))


def _iq4_nl(data: Array) -> Blocks:
    return Blocks(_IQ4_NL[_planes(data[:, 2:], 4, 16)], _half(data[:, :2]))


def _mxfp4(data: Array) -> Blocks:
    scales = small_floats.E8M0[data[:, :1]]
    return Blocks(_planes(data[:, 1:], 4, 16), scales)


def _q2_k(data: Array) -> Blocks:
    packed = data[:, :16]
    scales = _half(data[:, 80:82]) * (packed & np.uint8(15))
    minimums = _half(data[:, 82:]) * (packed >> np.uint8(4))
    return Blocks(_planes(data[:, 16:80], 2, 32), scales, -minimums)


def _q3_k(data: Array) -> Blocks:
    high = _planes(data[:, :32], 1, 32)
    codes = (_planes(data[:, 32:96], 2, 32) | high << np.uint8(2)) - np.uint8(4)
    packed = data[:, 96:108]
    small = _planes(packed[:, :8], 4, 8) | _planes(packed[:, 8:], 2, 4) << np.uint8(4)
    scales = _half(data[:, 108:]) * (small.view(np.int8) - np.int8(32))
    return Blocks(codes.view(np.int8), scales)


def _sixes(packed: Array) -> tuple[Array, Array]:
    """The 6-bit scales and minimums u8 `[m, 8]` of a Q4_K or Q5_K block, from u8 `[m, 12]`.

    Of the first four of each six bits lie in one byte; the last four have their low halves in
    the last four bytes, and their two high bits on top of the first four.
    """
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, high = np.uint8(63), np.uint8(48)
    scales = [first & six, low & np.uint8(15) | first >> np.uint8(2) & high]
    minimums = [second & six, low >> np.uint8(4) | second >> np.uint8(2) & high]
    return np.concatenate(scales, axis=1), np.concatenate(minimums, axis=1)


def _k_grid(data: Array) -> tuple[Array, Array]:
    """Scales and minimums `[m, 8]` of a Q4_K or Q5_K block."""
    scales, minimums = _sixes(data[:, 4:16])
    return _half(data[:, :2]) * scales, -(_half(data[:, 2:4]) * minimums)


def _q4_k(data: Array) -> Blocks:
    return Blocks(_planes(data[:, 16:], 4, 32), *_k_grid(data))


def _q5_k(data: Array) -> Blocks:
    high = _planes(data[:, 16:48], 1, 32)
    return Blocks(_planes(data[:, 48:], 4, 32) | high << np.uint8(4), *_k_grid(data))


def _q6_k(data: Array) -> Blocks:
    high = _planes(data[:, 128:192], 2, 32)
    codes = (_planes(data[:, :128], 4, 64) | high << np.uint8(4)) - np.uint8(32)
    scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8)
    return Blocks(codes.view(np.int8), _half(data[:, 208:]) * scales)


BLOCK_TYPES = {
    each.number: each
    for each in (
        BlockType("Q4_0", 2, 32, 18, 4, "int4", 32, _q4_0),
        BlockType("Q4_1", 3, 32, 20, 4, "uint4:zero=float", 32, _q4_1),
        BlockType("Q5_0", 6, 32, 22, 5, "int8", 32, _q5_0),
        BlockType("Q5_1", 7, 32, 24, 5, "uint8:zero=float", 32, _q5_1),
        BlockType("Q8_0", 8, 32, 34, 8, "int8", 32, _q8_0),
        BlockType("Q2_K", 10, K, 84, 2, "uint4:zero=float", 16, _q2_k),
        BlockType("Q3_K", 11, K, 110, 3, "int4", 16, _q3_k),
        BlockType("Q4_K", 12, K, 144, 4, "uint4:zero=float", 32, _q4_k),
        BlockType("Q5_K", 13, K, 176, 5, "uint8:zero=float", 32, _q5_k),
        BlockType("Q6_K", 14, K, 210, 6, "int8", 16, _q6_k),
        BlockType("IQ4_NL", 20, 32, 18, 4, "int8", 32, _iq4_nl),
        BlockType("MXFP4", 39, 32, 17, 4, "mxfp4:order=halves", 32, _mxfp4),
    )
}
"""By their number in files."""
