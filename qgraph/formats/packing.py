"""Codes of 1, 2, 4 or 8 bits in bytes, low bits first: the one packing routine of all formats.

Neighbours are folded in pairs: two b-bit codes in adjacent bytes, read as one little-endian
16-bit word, become one 2b-bit code by a shift and an or, until a code fills its byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = np.dtype("<u2")


def pack_bits(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """Pack uint8 `[…, m]`, each below 2^bits, into uint8 `[…, m·bits/8]`, low bits first.

    `m·bits` must be a multiple of 8.
    """
    codes = np.ascontiguousarray(codes)
    while bits < 8:
        words = codes.view(_WORD)
        codes = (words | words >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return codes


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


def padded(array: NDArray[Any], width: int, fill: NDArray[Any] | int = 0) -> NDArray[Any]:
    """`array` `[n, m]` widened to `[n, width]` with `fill` (a number, or one per row `[n, 1]`)."""
    n, m = array.shape
    if m == width:
        return array
    wide = np.empty((n, width), array.dtype)
    wide[:, :m] = array
    wide[:, m:] = fill
    return wide


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)
