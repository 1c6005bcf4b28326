"""Codes in 32-bit words, low bits first, without gaps: a 3-bit code may straddle two words."""

from __future__ import annotations

import numpy as np

from qgraph.formats.base import Array
from qgraph.formats.packing import pack_bits, padded, unpack_bits

_WORD = np.dtype("<i4")
WORD_BITS = 32


def words_of(count: int, bits: int) -> int:
    """Words that `count` codes of `bits` bits take."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Array, bits: int, count: int) -> Array:
    """int32 `[n, m]` → its first `count` codes, uint8 `[n, count]`."""
    octets = np.ascontiguousarray(words, _WORD).view(np.uint8)
    if 8 % bits == 0:
        return unpack_bits(octets, bits)[:, :count]
    # Rows of whole bytes become rows of bits, and each code its own byte.
    stream = np.unpackbits(octets, axis=1, count=count * bits, bitorder="little")
    codes = stream.reshape(len(words), count, bits)
    return np.packbits(codes, axis=2, bitorder="little")[..., 0]


def pack_words(codes: Array, bits: int) -> Array:
    """uint8 `[n, count]`, each below 2^bits → int32 `[n, words_of(count)]`, padded with zeros."""
    n, count = codes.shape
    width = words_of(count, bits)
    if 8 % bits == 0:
        packed = pack_bits(padded(codes, width * WORD_BITS // bits), bits)
        return packed.view(_WORD)
    stream = np.unpackbits(codes[..., None], axis=2, count=bits, bitorder="little")
    packed = np.packbits(stream.reshape(n, count * bits), axis=1, bitorder="little")
    return np.ascontiguousarray(padded(packed, width * 4)).view(_WORD)
