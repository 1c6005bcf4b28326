"""How integer codes lie: in blocks of whole bytes, or flat as ONNX's integer types are stored."""

from __future__ import annotations

import dataclasses

import numpy as np

from qgraph.formats.grouping import tiles
from qgraph.formats.packing import pack_bits, packed_bytes, padded, row_major, unpack_bits
from qgraph.formats.parts import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one row lies in "blocks": `count` blocks, the scale of a group on `repeats` of them."""

    bits: int
    block: int
    count: int
    repeats: int

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return packed_bytes(self.block, self.bits)

    @property
    def width(self) -> int:
        """Codes in a row, padding included."""
        return self.count * self.nbytes * 8 // self.bits

    @property
    def zeros_width(self) -> int:
        """Zero points in a row, padding included."""
        return packed_bytes(self.count, self.bits) * 8 // self.bits

    def pack(self, codes: Array, offset: int, fill: int | Array) -> Array:
        """Codes `[n, k]`, made unsigned by `offset`, as bytes `[n, count, nbytes]`.

        fill: the code of the padding, or one for each row `[n, 1]`.
        """
        n, k = codes.shape
        packed = np.empty((n, self.count * self.nbytes), np.uint8)
        for tile in tiles(n, k):
            value = fill if isinstance(fill, int) else fill[tile]
            wide = padded(codes[tile], self.width, value).view(np.uint8)
            wide = wide + np.uint8(offset) if offset else wide
            pack_bits(wide, self.bits, packed[tile])
        return packed.reshape(n, self.count, self.nbytes)

    def unpack(self, part: Array, n: int, k: int, offset: int) -> Array:
        """The inverse of `pack`: uint8 `[n, k]`, two's complement."""
        packed = part.view(np.uint8).reshape(n, -1)
        codes = np.empty((n, k), np.uint8)
        for tile in tiles(n, k):
            wide = unpack_bits(packed[tile], self.bits)[:, :k]
            np.subtract(wide, np.uint8(offset), out=codes[tile])
        return codes

    def repeated(self, values: Array) -> Array:
        """One value a group `[n, nb]` as one a block `[n, count]`."""
        return np.repeat(values, self.repeats, axis=1)[:, : self.count]


def pack_flat(values: Array, bits: int) -> Array:
    """Codes or zero points as ONNX stores its integer types: two's complement, no row padding."""
    if bits == 8:
        return values
    flat = row_major(values).reshape(-1).view(np.uint8)
    packed = np.zeros(packed_bytes(flat.size, bits), np.uint8)
    step = 8 // bits
    for tile in tiles(flat.size, 1):
        piece = flat[tile] & np.uint8((1 << bits) - 1)
        if len(piece) % step:
            piece = np.append(piece, np.zeros(step - len(piece) % step, np.uint8))
        packed[tile.start // step : -(-tile.stop // step)] = pack_bits(piece, bits)
    return packed


def unpack_flat(part: Array, shape: tuple[int, ...], bits: int) -> Array:
    """The inverse of `pack_flat`, unsigned; typed arrays have one element a code already."""
    mask = np.uint8((1 << bits) - 1)
    if part.dtype.kind == "V":
        return part.astype(np.int8).view(np.uint8).reshape(shape) & mask
    flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    codes = np.empty(int(np.prod(shape, dtype=np.int64)), np.uint8)
    step = 8 // bits
    for tile in tiles(codes.size, 1):
        piece = unpack_bits(flat[tile.start // step : -(-tile.stop // step)], bits)
        codes[tile] = piece[: tile.stop - tile.start]
    return codes.reshape(shape)


def sign_extended(codes: Array, half: int) -> Array:
    """Two's complement codes, given unsigned, as int8."""
    return ((codes ^ np.uint8(half)) - np.uint8(half)).view(np.int8)
