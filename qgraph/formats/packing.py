"""Codes of 1, 2, 4 or 8 bits in bytes, low bits first: the one packing routine of all formats.

Neighbours are folded in pairs: two b-bit codes in adjacent bytes, read as one little-endian
16-bit word, become one 2b-bit code by a shift and an or, until a code fills its byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = np.dtype("<u2")
_CACHE_LINE = 64


def pack_bits(
    codes: NDArray[Any], bits: int, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Pack uint8 `[…, m]`, each below 2^bits, into uint8 `[…, m·bits/8]`, low bits first.

    `m·bits` must be a multiple of 8. A matrix that lies column by column is packed as it lies and
    turned then: the fewer bytes to turn. The result lies row by row, in `out` where that is given.
    """
    turned = is_turned(codes)
    codes = codes if turned else np.ascontiguousarray(codes)
    while bits < 8:
        if turned:
            # numpy multiplies bytes many times faster than it shifts them.
            codes = codes[..., ::2] | codes[..., 1::2] * np.uint8(1 << bits)
        else:
            words = codes.view(_WORD)
            codes = (words | words >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return row_major(codes, out)


def unpack_bits(packed: NDArray[Any], bits: int) -> NDArray[Any]:
    """The inverse of `pack_bits`: uint8 `[…, m]` into uint8 `[…, m·8/bits]`."""
    packed = np.ascontiguousarray(packed)
    width = 8
    while width > bits:
        width //= 2
        words = packed.astype(_WORD)
        words |= words << (8 - width)
        words &= 0x0101 * ((1 << width) - 1)
        packed = words.view(np.uint8)
    return packed


def is_turned(array: NDArray[Any]) -> bool:
    """Whether an array lies column by column: rows (axis 0) closer than elements of one row."""
    return array.ndim > 1 and array.strides[0] < array.strides[-1]


def row_major(array: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """`array` in one piece, row by row; in `out`, or without a copy where it lies that way.

    A matrix that lies column by column is copied in strips of columns, one cache line wide:
    numpy's own copy takes one element of each line at a time and is 3 to 10 times slower.
    """
    if not is_turned(array):
        if out is None:
            return np.ascontiguousarray(array)
        out[...] = array
        return out
    rows = np.empty(array.shape, array.dtype) if out is None else out
    strip = max(1, _CACHE_LINE // array.itemsize)
    for at in range(0, array.shape[1], strip):
        rows[:, at : at + strip] = array[:, at : at + strip]
    return rows


def padded(array: NDArray[Any], width: int, fill: NDArray[Any] | int = 0) -> NDArray[Any]:
    """`array` `[n, m]` widened to `[n, width]` with `fill` (a number, or one per row `[n, 1]`)."""
    n, m = array.shape
    if m == width:
        return array
    wide = np.empty_like(array, shape=(n, width))
    wide[:, :m] = array
    wide[:, m:] = fill
    return wide


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)
