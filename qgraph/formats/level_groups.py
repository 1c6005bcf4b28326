"""Formats whose codes are numbers of a table: a weight reads back as level(code)·scale.

Scales serve groups along K, and of one row, of 128 rows or of the whole weight. Quotients are
formed in float32 and get the nearest level, ties to the even code, against the scale as stored.

In "blocks" codes are u8 `[N, nb, bytes of a block]`, a group to a block; scales are `[N, nb]`,
`[ceil(N/128), nb]` or `[1, nb]`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, Layout, Part, PartSpec, QuantizedWeight
from qgraph.formats.grouping import (
    TILE,
    as_stored,
    check_scale_dtype,
    count_groups,
    divisors,
    epsilon,
    extremes,
    group_tiles,
    group_views,
    lying_like,
    overflowing,
    tiles,
)
from qgraph.formats.level_functions import Order, Spelling, dequantize_function, linear_function
from qgraph.formats.nearest import Nearest, nearest
from qgraph.formats.packing import is_turned, pack_bits, packed_bytes, padded, unpack_bits


class Scales(NamedTuple):
    """Scales of a block of rows `[n, nb]`, and what they were made from."""

    values: Array
    more: Mapping[str, Array] = {}


@dataclasses.dataclass(frozen=True)
class LevelGroups(Format):
    """Codes of up to 8 bits that stand for the levels of a table.

    What a subclass gives: the table, how scales are chosen (`_scales`), stored (`_scale_specs`,
    `_pack_scales`, `_unpack_scales`) and read by the ONNX functions (`spelling`). Codes that do
    not fill bytes also give `_blocks`, `_pack_bits` and `_unpack_bits`.
    """

    symmetric: bool = True

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """None: the group is part of what the format is."""
        return {}

    @property
    def code_range(self) -> tuple[int, int]:
        """See `Format.code_range`."""
        return 0, (1 << self.bits) - 1

    @property
    def top(self) -> float:
        """The largest level."""
        return float(np.nanmax(self.levels))

    @property
    def _order(self) -> Order:
        """Which elements of a block lie in the low halves of its bytes."""
        return "low"

    @property
    def _clip(self) -> float:
        """How far beyond the largest level a quotient may lie, in units of the scale."""
        return 0.0

    @abstractmethod
    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        """The scales for groups whose largest magnitudes are `amax` `[n, nb]`.

        Raises:
            ScaleOverflow: see `Format.quantize`.
        """

    @abstractmethod
    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        """Every part but the codes."""

    @abstractmethod
    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        """Every part but the codes, of some rows."""

    @abstractmethod
    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        """The inverse."""

    @abstractmethod
    def spelling(self) -> Spelling:
        """How the ONNX functions read codes and scales."""

    def validate(self, n: int, k: int) -> None:
        """See `Format.validate`; any N and K will do, the last group may be partial."""
        if n < 1 or k < 1:
            raise InputError(f"{self.spell()} needs a weight with elements, found [{n}, {k}]")

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`."""
        self._check_layout(layout)
        nb, width = self._blocks(k)
        codes = PartSpec((n, nb, width), ir.DataType.UINT8)
        return {"codes": codes, **self._scale_specs(n, k, scale_dtype)}

    def _check_layout(self, layout: Layout) -> None:
        if layout != self.default_layout:
            raise InputError(
                f"{self.spell()} cannot lie as {layout.kind} in blocks of {layout.block}: "
                f"wanted {self.default_layout.kind} of {self.default_layout.block or 'row'}"
            )

    def _blocks(self, k: int) -> tuple[int, int]:
        """Blocks in a row, and bytes in a block."""
        return count_groups(k, self.group), packed_bytes(self.group or k, self.bits)

    def size_bits(self, k: int, scale_dtype: ir.DataType) -> float:
        """See `Format.size_bits`; what belongs to the whole weight is not counted."""
        rows = max(128, self.row_step(k))
        specs = self.parts(rows, k, scale_dtype, self.default_layout).values()
        return 8 * sum(spec.nbytes for spec in specs if spec.rows) / (rows * k)

    def quantize(self, rows: Array, scale_dtype: ir.DataType) -> QuantizedWeight:
        """See `Format.quantize`; codes lie like the rows, row by row or column by column."""
        codes = np.empty(rows.shape, np.uint8, order="F" if is_turned(rows) else "C")
        with np.errstate(all="ignore"):  # NaN and Inf are the caller's to find
            scales = self._scales(largest(rows, self.group), scale_dtype)
            units = divisors(scales.values.astype(np.float32))
            look_up, work = self._nearest, np.empty(min(rows.size, TILE), np.float32)
            for tile in group_tiles(rows, codes, self.group):
                if work.size < tile.weights.size:  # a row, or a group, is larger than a tile
                    work = np.empty(tile.weights.size, np.float32)
                values = lying_like(tile.weights, work)
                np.divide(tile.weights, units[tile.rows, tile.at, None], out=values)
                found = look_up.codes(work[: values.size])
                np.copyto(tile.codes, lying_like(tile.weights, found))
        return QuantizedWeight(codes, scales.values, None, scales.more)

    @property
    def _nearest(self) -> Nearest:
        return nearest(self.levels.tobytes())

    def dequantize(self, weight: QuantizedWeight) -> Array:
        """See `Format.dequantize`."""
        n, k = weight.codes.shape
        rows = np.empty((n, k), np.float32)
        for tile in tiles(n, k):
            block = rows[tile]
            np.take(self.levels, weight.codes[tile], out=block, mode="clip")
            scales = weight.scales[tile].astype(np.float32)
            for groups, at in group_views(block, self.group):
                groups *= scales[:, at, None]
        return rows

    def error_bound(self, weight: QuantizedWeight) -> Array:
        """See `Format.error_bound`: half the widest gap between levels, or what may be clipped."""
        steps: Array = np.abs(weight.scales.astype(np.float32)) * np.float32(self._reach(weight))
        return steps

    def _reach(self, weight: QuantizedWeight) -> float:
        """The largest error in units of the scale, float arithmetic included."""
        ordered = np.sort(self.levels[np.isfinite(self.levels)])
        short = epsilon(weight.scales.dtype) / 2
        beyond = max(self._clip, self.top * short)
        return max(float(np.diff(ordered).max()) / 2, beyond) + self.top * 2.0**-20

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        self._check_layout(layout)
        return {"codes": self._pack_codes(weight.codes), **self._pack_scales(weight)}

    def _pack_codes(self, codes: Array) -> Array:
        """u8 `[n, nb, bytes]`, padded with the code of zero."""
        n, k = codes.shape
        nb, width = self._blocks(k)
        packed = np.empty((n, nb * width), np.uint8)
        places = self._places(width)
        for tile in tiles(n, k):
            wide = padded(codes[tile], nb * width * 8 // self.bits, self._zero)
            if places is not None:
                wide = np.take(wide.reshape(-1, len(places)), places, axis=1).reshape(wide.shape)
            self._pack_bits(wide, packed[tile])
        return packed.reshape(n, nb, width)

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        self._check_layout(layout)
        nb, width = self._blocks(k)
        packed = parts["codes"].view(np.uint8).reshape(n, nb * width)
        codes = np.empty((n, k), np.uint8)
        places = self._places(width)
        back = None if places is None else np.argsort(places)
        for tile in tiles(n, k):
            wide = self._unpack_bits(packed[tile])
            if back is not None:
                wide = np.take(wide.reshape(-1, len(back)), back, axis=1).reshape(wide.shape)
            codes[tile] = wide[:, :k]
        scales = self._unpack_scales(parts, n, nb)
        return QuantizedWeight(codes, scales.values, None, scales.more)

    def _pack_bits(self, codes: Array, out: Array) -> None:
        """Put u8 `[n, m]`, each below 2^bits, into u8 `[n, bytes]`; m fills whole blocks."""
        pack_bits(codes, self.bits, out)

    def _unpack_bits(self, packed: Array) -> Array:
        """The inverse of `_pack_bits`."""
        return unpack_bits(packed, self.bits)

    def _places(self, width: int) -> Array | None:
        """Which element lies where in a block, low halves of bytes first; None for their order."""
        if self._order == "high":
            return np.array([1, 0])
        if self._order == "halves":
            return np.arange(2 * width).reshape(2, width).T.reshape(-1)
        return None

    @property
    def _zero(self) -> int:
        """The code of zero."""
        return int(np.flatnonzero(self.levels == 0)[0])

    def function(self, opset: int) -> ir.Function:
        """See `Format.function`."""
        return dequantize_function(self.function_name, opset, self.spelling())

    def linear(self, opset: int) -> ir.Function:
        """See `Format.linear`."""
        return linear_function(self.linear_name, opset, self.spelling())


def largest(rows: Array, group: int) -> Array:
    """The largest magnitude of each group of `rows` `[n, K]`: float32 `[n, nb]`."""
    n, k = rows.shape
    found = np.empty((n, count_groups(k, group)), np.float32)
    work = np.empty(min(rows.size, TILE), np.float32)
    for tile in group_tiles(rows, rows, group):
        weights = np.asarray(tile.weights, np.float32)
        if work.size < weights.size:
            work = np.empty(weights.size, np.float32)
        scratch = lying_like(weights, work)
        found[tile.rows, tile.at] = extremes(weights, scratch, absolute=True)[0][..., 0]
    return found


def float_scales(amax: Array, top: float, scale_dtype: ir.DataType) -> Array:
    """amax/top in `scale_dtype`, `[n, nb]`; see `as_stored`.

    Raises:
        ScaleOverflow: one does not fit.
    """
    check_scale_dtype(scale_dtype)
    stored: np.dtype[np.floating[Any]] = scale_dtype.numpy()
    steps = as_stored(amax / np.float32(top), amax, stored)
    overflowing(steps, stored)
    return steps.astype(stored)


def float_scale_specs(n: int, nb: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
    """One float scale for each group."""
    check_scale_dtype(scale_dtype)
    return {"scales": PartSpec((n, nb), scale_dtype)}
