"""Integer groups along K: `int2`, `int4`, `int8` (symmetric) and `uint2`, `uint4`, `uint8`.

A weight reads back as q·s (symmetric, codes -2^(b-1)…2^(b-1)-1) or (q - z)·s (asymmetric,
codes and zero points 0…2^b-1). Quotients are formed in float32 and rounded to nearest, ties to
even, against the scale as stored.

Scales are stored as normal numbers or 0, never as subnormals, whose few bits would spoil every
code of the group: one that falls below the smallest normal number of its type is raised to it
(the step grows, the half-step bound holds, weights below half a step get code 0). A group of
zeros has scale 0, codes 0 and zero point 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import (
    Array,
    Format,
    Layout,
    Part,
    PartSpec,
    QuantizedWeight,
    check_group,
)
from qgraph.formats.onnx_function import dequantize_function
from qgraph.formats.packing import (
    is_turned,
    pack_bits,
    packed_bytes,
    padded,
    row_major,
    unpack_bits,
)

TILE = 1 << 19
"""Weights worked on at once (2 MB of float32): small enough for the cache, large enough for two
threads not to wait for the interpreter between numpy calls."""
_ROUND = np.float32(1.5 * 2**23)


@dataclasses.dataclass(frozen=True)
class IntegerGroups(Format):
    """Codes of `bits` bits with one scale (and, if not symmetric, one zero point) per group."""

    scale: Literal["absmax", "signed"] = "absmax"
    """How a symmetric scale is chosen: amax/(2^(b-1)-1), or -w_ext/2^(b-1) with w_ext the
    element of largest magnitude (of two, the negative one), which uses all levels and clips the
    opposite extreme by at most one step."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`group`, and `scale` where the format is symmetric."""
        scale = {"scale": ("absmax", "signed")} if self.symmetric else {}
        return {**super().options, **scale}

    @property
    def function_name(self) -> str:
        """`DequantizeInt4V1` and so on; one function reads blocks of any size."""
        return f"Dequantize{self.name.capitalize()}V1"

    @property
    def code_range(self) -> tuple[int, int]:
        """See `Format.code_range`."""
        return (-self._offset, self._offset - 1) if self.symmetric else (0, (1 << self.bits) - 1)

    @property
    def _offset(self) -> int:
        """What "blocks" adds to a code to make it unsigned: MatMulNBits' default zero point."""
        return 1 << (self.bits - 1) if self.symmetric else 0

    def validate(self, n: int, k: int) -> None:
        """See `Format.validate`; any N and K will do, the last group may be partial."""
        check_group(self.group)
        if n < 1 or k < 1:
            raise InputError(f"{self.spell()} needs a weight with elements, found [{n}, {k}]")

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`."""
        _check_scale_dtype(scale_dtype)
        if layout.kind == "qdq":
            grid = (n, _count(k, self.group)) if self.group else (n,)
            code_type = ir.DataType[self.name.upper()]
            codes, zeros = PartSpec((n, k), code_type), PartSpec(grid, code_type)
        else:
            blocks = self._blocks(k, layout)
            grid = (n, blocks.count)
            codes = PartSpec((n, blocks.count, blocks.nbytes), ir.DataType.UINT8)
            zeros = PartSpec((n, packed_bytes(blocks.count, self.bits)), ir.DataType.UINT8)
        specs: dict[Part, PartSpec] = {"codes": codes, "scales": PartSpec(grid, scale_dtype)}
        return specs if self.symmetric else {**specs, "zeros": zeros}

    def size_bits(self, k: int, scale_dtype: ir.DataType) -> float:
        """See `Format.size_bits`."""
        specs = self.parts(1, k, scale_dtype, self.default_layout)
        return 8 * sum(spec.nbytes for spec in specs.values()) / k

    def quantize(self, rows: Array, scale_dtype: ir.DataType) -> QuantizedWeight:
        """See `Format.quantize`; codes lie like the rows, row by row or column by column."""
        _check_scale_dtype(scale_dtype)
        n, k = rows.shape
        nb = _count(k, self.group)
        codes = np.empty((n, k), np.uint8, order="F" if is_turned(rows) else "C")
        scales = np.empty((n, nb), scale_dtype.numpy())
        zeros = None if self.symmetric else np.empty((n, nb), np.uint8)
        work = np.empty(min(n * k, TILE), np.float32)
        with np.errstate(all="ignore"):  # NaN and Inf are the caller's to find
            for tile in _group_tiles(rows, codes, self.group):
                groups = np.asarray(tile.weights, np.float32)
                if work.size < groups.size:  # one row, or one group, is larger than a tile
                    work = np.empty(groups.size, np.float32)
                scratch = _lying_like(groups, work)
                grid = self._grid(groups, scratch, scales.dtype)
                tile.check_overflow(grid.steps * np.float32(self.code_range[1]), scales.dtype)
                scales[tile.rows, tile.at] = grid.steps[..., 0]
                if zeros is not None and grid.zeros is not None:
                    zeros[tile.rows, tile.at] = grid.zeros[..., 0]
                self._round(groups, grid, scratch, tile.codes)
        return QuantizedWeight(codes.view(np.int8) if self.symmetric else codes, scales, zeros)

    def _grid(self, groups: Array, work: Array, stored: np.dtype[np.floating[Any]]) -> _Grid:
        """The grid of each of `groups` `[n, nb, G]`, its scales as they read back from `stored`."""
        low, high = self.code_range
        if self.symmetric and self.scale == "absmax":
            most = _extremes(groups, work, absolute=True)[0]
            return _Grid(_as_stored(most / np.float32(high), most, stored))
        least, most = _extremes(groups, work)
        if self.symmetric:
            furthest = np.where(most > -least, most, least)
            steps = _as_stored(furthest / np.float32(low), furthest, stored)
            opposite = np.where(steps > 0, most, least)
            return _Grid(steps, None, np.rint(opposite / steps) > high)
        least, most = np.minimum(least, 0), np.maximum(most, 0)
        span = most - least
        steps = _as_stored(span / np.float32(high), span, stored)
        divisors = _divisors(steps)
        zeros = np.rint(-least / divisors)
        return _Grid(steps, zeros, np.rint(most / divisors) + zeros > high)

    def _round(self, groups: Array, grid: _Grid, work: Array, codes: Array) -> None:
        """Put the codes of `groups` `[n, nb, G]` into `codes`, uint8 (two's complement)."""
        np.divide(groups, _divisors(grid.steps), out=work)
        # Adding 1.5 * 2^23 leaves no fraction bits: it rounds to nearest, ties to even, and the
        # code is then the low byte.
        work += _ROUND
        if grid.clips is not None and grid.clips.any():
            zeros = 0 if grid.zeros is None else grid.zeros
            np.minimum(work, _ROUND + (np.float32(self.code_range[1]) - zeros), out=work)
        np.copyto(codes, work.view(np.int32), casting="unsafe")
        if grid.zeros is not None:
            codes += grid.zeros.astype(np.uint8)

    def dequantize(self, weight: QuantizedWeight) -> Array:
        """See `Format.dequantize`."""
        n, k = weight.codes.shape
        rows = np.empty((n, k), np.float32)
        for tile in _tiles(n, k):
            block = rows[tile]
            block[...] = weight.codes[tile]
            scales = weight.scales[tile].astype(np.float32)
            zeros = None if weight.zeros is None else weight.zeros[tile].astype(np.float32)
            for groups, at in _group_views(block, self.group):
                if zeros is not None:
                    groups -= zeros[:, at, None]
                groups *= scales[:, at, None]
        return rows

    def error_bound(self, weight: QuantizedWeight) -> Array:
        """See `Format.error_bound`: half a step, plus what float arithmetic may add.

        A float16 scale that was rounded down leaves the far end of an asymmetric grid up to
        (2^b - 1)/2^11 steps short; a signed scale clips its opposite extreme by up to one step,
        visible as the highest code.
        """
        low, high = self.code_range
        arithmetic = (high - low) * 2.0**-21
        short = (high - low) * float(np.finfo(weight.scales.dtype).eps) / 2
        steps = np.full(weight.scales.shape, 0.5 + arithmetic, np.float32)
        if not self.symmetric:
            steps += np.float32(short)
        elif self.scale == "signed":
            starts = np.arange(0, weight.codes.shape[1], self.group or weight.codes.shape[1])
            top = np.maximum.reduceat(weight.codes, starts, axis=1)
            steps[top == high] = 1 + arithmetic + short
        return steps * np.abs(weight.scales.astype(np.float32))

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        codes, scales, zeros = weight.codes, weight.scales, weight.zeros
        parts: dict[Part, Array]
        if layout.kind == "qdq":
            shape = scales.shape if self.group else scales.shape[:1]
            parts = {"codes": _pack_flat(codes, self.bits), "scales": scales.reshape(shape)}
            return parts if zeros is None else {**parts, "zeros": _pack_flat(zeros, self.bits)}
        n, k = codes.shape
        blocks = self._blocks(k, layout)
        packed = np.empty((n, blocks.count * blocks.nbytes), np.uint8)
        for tile in _tiles(n, k):
            fill = 0 if zeros is None else zeros[tile, -1:]
            wide = padded(codes[tile], blocks.width, fill).view(np.uint8)
            wide = wide + np.uint8(self._offset) if self._offset else wide
            pack_bits(wide, self.bits, packed[tile])
        parts = {
            "codes": packed.reshape(n, blocks.count, blocks.nbytes),
            "scales": np.repeat(scales, blocks.repeats, axis=1)[:, : blocks.count],
        }
        if zeros is None:
            return parts
        zeros = np.repeat(zeros, blocks.repeats, axis=1)[:, : blocks.count]
        return {**parts, "zeros": pack_bits(padded(zeros, blocks.zeros_width), self.bits)}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        if layout.kind == "qdq":
            scales = _scales(parts["scales"], n, _count(k, self.group))
            codes = _unpack_flat(parts["codes"], (n, k), self.bits)
            if self.symmetric:
                return QuantizedWeight(_sign_extended(codes, self._offset), scales)
            return QuantizedWeight(
                codes, scales, _unpack_flat(parts["zeros"], scales.shape, self.bits)
            )
        blocks = self._blocks(k, layout)
        packed = parts["codes"].view(np.uint8).reshape(n, -1)
        codes = np.empty((n, k), np.uint8)
        for tile in _tiles(n, k):
            np.subtract(
                unpack_bits(packed[tile], self.bits)[:, :k], np.uint8(self._offset), out=codes[tile]
            )
        scales = _scales(parts["scales"], n, blocks.count)[:, :: blocks.repeats]
        if self.symmetric:
            return QuantizedWeight(codes.view(np.int8), scales)
        zeros = unpack_bits(parts["zeros"].view(np.uint8).reshape(n, -1), self.bits)
        return QuantizedWeight(codes, scales, zeros[:, : blocks.count : blocks.repeats])

    def _blocks(self, k: int, layout: Layout) -> _Blocks:
        """The geometry of a row of length `k` in "blocks"."""
        block = layout.block or (0 if self.group else k)
        if not block or (self.group and self.group % block) or (layout.block * self.bits % 8):
            wanted = f"a divisor of {self.group}" if self.group else "any size"
            raise InputError(
                f"{self.spell()} cannot lie in blocks of {layout.block}: "
                f"wanted {wanted} in whole bytes"
            )
        count = _count(k, block)
        return _Blocks(self.bits, block, count, self.group // block if self.group else count)

    def function(self, opset: int) -> ir.Function:
        """See `Format.function`."""
        levels = np.arange(1 << self.bits) - self._offset
        return dequantize_function(self.function_name, opset, levels, zeros=not self.symmetric)


class _Grid(NamedTuple):
    """What the codes of groups count: float32 `[n, nb, 1]`."""

    steps: Array
    zeros: Array | None = None
    clips: Array | None = None
    """Groups in which a code may exceed the highest; None where none can."""


class _Tile(NamedTuple):
    """What is worked on at once: the groups `at` of `rows`; weights and codes `[rows, at, G]`."""

    rows: slice
    at: slice
    weights: Array
    codes: Array

    def check_overflow(self, ends: Array, stored: np.dtype[np.floating[Any]]) -> None:
        """Refuse groups whose scale, or scale times highest code (`ends`), is infinite."""
        infinite = np.isinf(ends)
        if infinite.any():
            row, group = divmod(int(infinite.argmax()), infinite.shape[1])
            row, group = self.rows.start + row, self.at.start + group
            raise OverflowError(
                f"row {row}, group {group}: its scale does not fit {stored}", (row, group)
            )


@dataclasses.dataclass(frozen=True)
class _Blocks:
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


def _count(k: int, group: int) -> int:
    """Groups in a row of length `k`; group 0 is the whole row."""
    return -(-k // group) if group else 1


def _tile_rows(width: int) -> int:
    return max(1, TILE // width)


def _tiles(n: int, width: int) -> Iterator[slice]:
    """Slices of rows that hold at most TILE weights each, or one row."""
    step = _tile_rows(width)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _group_tiles(weights: Array, codes: Array, group: int) -> Iterator[_Tile]:
    """Tiles of a weight `[n, k]` and its codes, in runs of memory that are as long as possible.

    Whole rows where they lie row by row; else few groups of many rows.
    """
    n, k = weights.shape
    for rows in _tiles(n, (group or k) if is_turned(weights) else k):
        views = zip(
            _group_views(weights[rows], group), _group_views(codes[rows], group), strict=True
        )
        for (groups, at), (places, _) in views:
            for few in _tiles(groups.shape[1], groups.shape[0] * groups.shape[2]):
                found = slice(at.start + few.start, at.start + few.stop)
                yield _Tile(rows, found, groups[:, few], places[:, few])


def _group_views(rows: Array, group: int) -> Iterator[tuple[Array, slice]]:
    """Views `[n, groups, G]` of `rows` and which groups they are: the whole ones, the partial."""
    n, k = rows.shape
    whole = k // group if group else 1
    end = whole * (group or k)
    if whole:
        yield rows[:, :end].reshape(n, whole, -1), slice(0, whole)
    if end < k:
        yield rows[:, None, end:], slice(whole, whole + 1)


def _lying_like(groups: Array, work: Array) -> Array:
    """The first elements of `work` in the shape of `groups` `[n, nb, G]`, in the same order."""
    n, nb, group = groups.shape
    first = work[: groups.size]
    if is_turned(groups):
        return first.reshape(nb, group, n).transpose(2, 0, 1)
    return first.reshape(groups.shape)


def _extremes(groups: Array, work: Array, *, absolute: bool = False) -> list[Array]:
    """Least and greatest of each of `groups` `[n, nb, G]`, or only the greatest magnitude.

    work: scratch that lies like the groups. The results are `[n, nb, 1]`.
    """
    reductions = (np.maximum,) if absolute else (np.minimum, np.maximum)
    n, nb, group = groups.shape
    if is_turned(groups):
        groups = np.absolute(groups, out=work) if absolute else groups
        return [reduction.reduce(groups, axis=2, keepdims=True) for reduction in reductions]
    m = n * nb
    groups, work = groups.reshape(m, group), work.reshape(-1)
    # numpy reduces short rows one by one, slowly: up to 32 long they are first laid side by side,
    # as columns of a width that keeps the copy in the first-level cache.
    whole = m // 256 * 256 if group <= 32 else 0
    columns = work[: whole * group].reshape(-1, group, 256)
    columns[...] = groups[:whole].reshape(-1, 256, group).transpose(0, 2, 1)
    rows = groups[whole:]
    if absolute:
        np.absolute(columns, out=columns)
        rows = np.absolute(rows, out=work[whole * group :].reshape(rows.shape))
    results = [np.empty(m, np.float32) for _ in reductions]
    for reduction, result in zip(reductions, results, strict=True):
        reduction.reduce(columns, axis=1, out=result[:whole].reshape(-1, 256))
        if whole < m:
            starts = np.arange(0, rows.size, group)
            reduction.reduceat(rows.reshape(-1), starts, out=result[whole:])
    return [result.reshape(n, nb, 1) for result in results]


def _as_stored(steps: Array, span: Array, stored: np.dtype[np.floating[Any]]) -> Array:
    """float32 scales as they read back from `stored`: 0 where `span` is, else never subnormal."""
    tiny = np.finfo(stored).smallest_normal.astype(np.float32)
    np.copyto(steps, np.copysign(tiny, steps), where=np.abs(steps) < tiny)
    steps = steps.astype(stored, copy=False).astype(np.float32, copy=False)
    np.copyto(steps, 0, where=span == 0)
    return steps


def _divisors(steps: Array) -> Array:
    """The steps, and 1 for groups of zeros."""
    divisors: Array = steps + (steps == 0)
    return divisors


def _check_scale_dtype(dtype: ir.DataType) -> None:
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise InputError(f"scales in {dtype.name}: wanted FLOAT or FLOAT16")


def _scales(part: Array, n: int, nb: int) -> Array:
    """Scales `[n, nb]`, given as they are or as their bytes."""
    if part.dtype == np.uint8:
        part = part.reshape(-1).view(np.float16 if part.nbytes == 2 * n * nb else np.float32)
    return part.reshape(n, nb)


def _pack_flat(values: Array, bits: int) -> Array:
    """Codes or zero points as ONNX stores its integer types: two's complement, no row padding."""
    if bits == 8:
        return values
    flat = row_major(values).reshape(-1).view(np.uint8)
    packed = np.zeros(packed_bytes(flat.size, bits), np.uint8)
    step = 8 // bits
    for tile in _tiles(flat.size, 1):
        piece = flat[tile] & np.uint8((1 << bits) - 1)
        if len(piece) % step:
            piece = np.append(piece, np.zeros(step - len(piece) % step, np.uint8))
        packed[tile.start // step : -(-tile.stop // step)] = pack_bits(piece, bits)
    return packed


def _unpack_flat(part: Array, shape: tuple[int, ...], bits: int) -> Array:
    """The inverse of `_pack_flat`, unsigned; typed arrays have one element a code already."""
    mask = np.uint8((1 << bits) - 1)
    if part.dtype.kind == "V":
        return part.astype(np.int8).view(np.uint8).reshape(shape) & mask
    flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    codes = np.empty(int(np.prod(shape, dtype=np.int64)), np.uint8)
    step = 8 // bits
    for tile in _tiles(codes.size, 1):
        piece = unpack_bits(flat[tile.start // step : -(-tile.stop // step)], bits)
        codes[tile] = piece[: tile.stop - tile.start]
    return codes.reshape(shape)


def _sign_extended(codes: Array, half: int) -> Array:
    """Two's complement codes, given unsigned, as int8."""
    return ((codes ^ np.uint8(half)) - np.uint8(half)).view(np.int8)


INT4 = IntegerGroups("int4", 4, symmetric=True)
UINT4 = IntegerGroups("uint4", 4, symmetric=False)
INT8 = IntegerGroups("int8", 8, symmetric=True)
UINT8 = IntegerGroups("uint8", 8, symmetric=False)
INT2 = IntegerGroups("int2", 2, symmetric=True)
UINT2 = IntegerGroups("uint2", 2, symmetric=False)
