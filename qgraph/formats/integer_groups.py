"""Integer groups along K: `int2`, `int4`, `int8` (symmetric) and `uint2`, `uint4`, `uint8`.

A weight reads back as q·s (symmetric, codes -2^(b-1)…2^(b-1)-1) or (q - z)·s (asymmetric,
codes and zero points 0…2^b-1; or float zero points, z = -min/s, as GGUF's Q4_1 has them).
`int4-row` and `int8-row` have one scale per row, and no options. Quotients are formed in float32
and rounded to nearest, ties to even, against the scale as stored.

Scales are stored as normal numbers or 0, never as subnormals, whose few bits would spoil every
code of the group: one that falls below the smallest normal number of its type is raised to it
(the step grows, the half-step bound holds, weights below half a step get code 0). A group of
zeros has scale 0, codes 0 and zero point 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

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
    read_scales,
    tiles,
)
from qgraph.formats.integer_grids import FAR, Grid, float_grid, integer_grid, signed_grid
from qgraph.formats.integer_layout import Blocks, pack_flat, sign_extended, unpack_flat
from qgraph.formats.linear_function import linear_function
from qgraph.formats.minimums import MINIMUMS, minimums, zero_points
from qgraph.formats.onnx_function import Zeros, dequantize_function
from qgraph.formats.packing import (
    is_turned,
    pack_bits,
    packed_bytes,
    padded,
    row_major,
    unpack_bits,
)

_ROUND = np.float32(1.5 * 2**23)


@dataclasses.dataclass(frozen=True)
class IntegerGroups(Format):
    """Codes of `bits` bits with one scale (and, if not symmetric, one zero point) per group."""

    scale: Literal["absmax", "signed"] = "absmax"
    """How a symmetric scale is chosen: amax/(2^(b-1)-1), or -w_ext/2^(b-1) with w_ext the
    element of largest magnitude (of two, the negative one), which uses all levels and clips the
    opposite extreme by at most one step."""
    zero: Literal["integer", "float"] = "integer"
    """What an asymmetric zero point is: a code, or a float stored like the scales, which lets
    the grid run from the least to the largest weight wherever zero lies."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`group`, `scale` where the format is symmetric, else `zero`; none for whole rows."""
        if self.name.endswith("-row"):
            return {}
        own = {"scale": ("absmax", "signed")} if self.symmetric else {"zero": ("integer", "float")}
        return {**super().options, **own}

    @property
    def numbers(self) -> str:
        """`int`, `uint`, or `uint-float` with float zero points."""
        return ("int" if self.symmetric else "uint") + ("-float" if self._float_zeros else "")

    @property
    def as_integers(self) -> tuple[Literal["blocks", "nbits8"], int]:
        """See `Format.as_integers`."""
        return "blocks", self.bits

    @property
    def as_sums(self) -> bool:
        """With float zero points, which the kernels of integers have not."""
        return self._float_zeros

    @property
    def _float_zeros(self) -> bool:
        return self.zero == "float"

    @property
    def _zeros(self) -> Zeros:
        """What the functions read besides codes and scales."""
        return "none" if self.symmetric else "float" if self._float_zeros else "codes"

    @property
    def _middle(self) -> int:
        """MatMulNBits' zero point where it is given none."""
        return 1 << (self.bits - 1)

    @property
    def function_name(self) -> str:
        """`DequantizeInt4V1` and so on; one function reads blocks of any size."""
        zeros = "FloatZero" if self._float_zeros else ""
        return f"Dequantize{'Int' if self.symmetric else 'Uint'}{self.bits}{zeros}V1"

    @property
    def free_scales(self) -> bool:
        """Always."""
        return True

    @property
    def reach(self) -> float:
        """See `Format.reach`; float zero points lie further out."""
        return super().reach + (FAR if self._float_zeros else 0)

    @property
    def levels(self) -> Array:
        """See `Format.levels`."""
        low, high = self.code_range
        return np.arange(low, high + 1, dtype=np.float32)

    @property
    def code_range(self) -> tuple[int, int]:
        """See `Format.code_range`."""
        return (-self._offset, self._offset - 1) if self.symmetric else (0, (1 << self.bits) - 1)

    @property
    def _offset(self) -> int:
        """What "blocks" adds to a code to make it unsigned."""
        return self._middle if self.symmetric else 0

    def validate(self, n: int, k: int) -> None:
        """See `Format.validate`; any N and K will do, the last group may be partial."""
        check_group(self.group)
        if n < 1 or k < 1:
            raise InputError(f"{self.spell()} needs a weight with elements, found [{n}, {k}]")

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`."""
        check_scale_dtype(scale_dtype)
        if layout.kind in ("kn", "knu"):
            if self.bits != 8 or self.group or not self.symmetric:
                wanted = "8 bits without zero points, one scale a row"
                raise InputError(f"{self.spell()} cannot lie as integer kernels read it: {wanted}")
            dtype = ir.DataType.INT8 if layout.kind == "kn" else ir.DataType.UINT8
            codes = PartSpec((k, n), dtype, axis=1)
            # Integer products are float32, whatever the model is.
            return {"codes": codes, "scales": PartSpec((n,), ir.DataType.FLOAT)}
        if layout.kind == "qdq":
            grid = (n, count_groups(k, self.group)) if self.group else (n,)
            if self._float_zeros:
                raise InputError(f"{self.spell()}: DequantizeLinear has no float zero points")
            code_type = ir.DataType[f"{'' if self.symmetric else 'U'}INT{self.bits}"]
            codes, zeros = PartSpec((n, k), code_type), PartSpec(grid, code_type)
        else:
            blocks = self._blocks(k, layout)
            grid = (n, blocks.count)
            codes = PartSpec((n, blocks.count, blocks.nbytes), ir.DataType.UINT8)
            zeros = PartSpec((n, packed_bytes(blocks.count, self.bits)), ir.DataType.UINT8)
            if self._float_zeros:
                zeros = PartSpec(grid, scale_dtype)
        specs: dict[Part, PartSpec] = {"codes": codes, "scales": PartSpec(grid, scale_dtype)}
        if layout.kind == "sums":
            # The product of two numbers of 11 bits has 22: float16 would round it.
            return {**specs, "minimums": PartSpec(grid, ir.DataType.FLOAT)}
        return specs if self.symmetric else {**specs, "zeros": zeros}

    def size_bits(self, k: int, scale_dtype: ir.DataType) -> float:
        """See `Format.size_bits`."""
        specs = self.parts(1, k, scale_dtype, self.default_layout)
        return 8 * sum(spec.nbytes for spec in specs.values()) / k

    def quantize(self, rows: Array, scale_dtype: ir.DataType) -> QuantizedWeight:
        """See `Format.quantize`; codes lie like the rows, row by row or column by column."""
        check_scale_dtype(scale_dtype)
        n, k = rows.shape
        nb = count_groups(k, self.group)
        codes = np.empty((n, k), np.uint8, order="F" if is_turned(rows) else "C")
        scales = np.empty((n, nb), scale_dtype.numpy())
        zeros = None if self.symmetric else np.empty((n, nb), self._zeros_type(scales.dtype))
        work = np.empty(min(n * k, TILE), np.float32)
        with np.errstate(all="ignore"):  # NaN and Inf are the caller's to find
            for tile in group_tiles(rows, codes, self.group):
                groups = np.asarray(tile.weights, np.float32)
                if work.size < groups.size:  # one row, or one group, is larger than a tile
                    work = np.empty(groups.size, np.float32)
                scratch = lying_like(groups, work)
                grid = self._grid(groups, scratch, scales.dtype)
                tile.check_overflow(grid.steps * np.float32(self.code_range[1]), scales.dtype)
                scales[tile.rows, tile.at] = grid.steps[..., 0]
                if zeros is not None and grid.zeros is not None:
                    zeros[tile.rows, tile.at] = grid.zeros[..., 0]
                self._round(groups, grid, scratch, tile.codes)
        return QuantizedWeight(codes.view(np.int8) if self.symmetric else codes, scales, zeros)

    def _grid(self, groups: Array, work: Array, stored: np.dtype[np.floating[Any]]) -> Grid:
        """The grid of each of `groups` `[n, nb, G]`, its scales as they read back from `stored`."""
        if self.symmetric and self.scale == "absmax":
            most = extremes(groups, work, absolute=True)[0]
            return Grid(as_stored(most / np.float32(self.code_range[1]), most, stored))
        make = signed_grid if self.symmetric else float_grid if self._float_zeros else integer_grid
        least, most = extremes(groups, work)
        return make(least, most, self.code_range, stored)

    def _round(self, groups: Array, grid: Grid, work: Array, codes: Array) -> None:
        """Put the codes of `groups` `[n, nb, G]` into `codes`, uint8 (two's complement)."""
        np.divide(groups, divisors(grid.steps), out=work)
        if self._float_zeros:
            work += grid.zeros
            np.clip(work, *self.code_range, out=work)
        # Adding 1.5 * 2^23 leaves no fraction bits: it rounds to nearest, ties to even, and the
        # code is then the low byte.
        work += _ROUND
        if grid.clips is not None and grid.clips.any():
            zeros = 0 if grid.zeros is None else grid.zeros
            np.minimum(work, _ROUND + (np.float32(self.code_range[1]) - zeros), out=work)
        np.copyto(codes, work.view(np.int32), casting="unsafe")
        if grid.zeros is not None and not self._float_zeros:
            codes += grid.zeros.astype(np.uint8)

    def dequantize(self, weight: QuantizedWeight) -> Array:
        """See `Format.dequantize`; minimums, where the weight has them, stand for its zeros."""
        if MINIMUMS in weight.more:
            first, second = self.addends(weight)
            return np.add(first, second, out=first)
        return self._scaled(weight, weight.zeros)

    def _scaled(self, weight: QuantizedWeight, points: Array | None) -> Array:
        """The codes less the zero points `[n, nb]`, times the scales."""
        n, k = weight.codes.shape
        rows = np.empty((n, k), np.float32)
        for tile in tiles(n, k):
            block = rows[tile]
            block[...] = weight.codes[tile]
            scales = weight.scales[tile].astype(np.float32)
            zeros = None if points is None else points[tile].astype(np.float32)
            for groups, at in group_views(block, self.group):
                if zeros is not None:
                    groups -= zeros[:, at, None]
                groups *= scales[:, at, None]
        return rows

    def addends(self, weight: QuantizedWeight) -> tuple[Array, ...]:
        """See `Format.addends`: s·(q − h), and the minimums."""
        if MINIMUMS not in weight.more:
            return (self._scaled(weight, weight.zeros),)
        k = weight.codes.shape[1]
        middle = np.full(weight.scales.shape, self._middle, np.float32)
        added = np.repeat(weight.more[MINIMUMS], self.group or k, axis=1)[:, :k]
        return self._scaled(weight, middle), added

    def same(self, own: QuantizedWeight, found: QuantizedWeight) -> bool:
        """See `Format.same`."""
        if MINIMUMS in found.more:
            more = {MINIMUMS: minimums(own, self._middle)}
            own = dataclasses.replace(own, more=more)
        return super().same(own, found)

    def error_bound(self, weight: QuantizedWeight) -> Array:
        """See `Format.error_bound`: half a step, plus what float arithmetic may add.

        A float16 scale that was rounded down leaves the far end of an asymmetric grid up to
        (2^b - 1)/2^11 steps short; a signed scale clips its opposite extreme by up to one step,
        visible as the highest code.
        """
        low, high = self.code_range
        arithmetic = (high - low) * 2.0**-21
        short = (high - low) * epsilon(weight.scales.dtype) / 2
        steps = np.full(weight.scales.shape, 0.5 + arithmetic, np.float32)
        if weight.zeros is not None and self._float_zeros:
            # The zero point's own rounding moves the grid, and may clip one of its ends.
            away = np.abs(weight.zeros.astype(np.float32))
            steps += 2 * away * np.float32(short / (high - low)) + np.float32(short)
            if MINIMUMS in weight.more:  # as is the minimum, once more
                steps += (away + np.float32(self._middle)) * np.float32(2.0**-22)
        elif not self.symmetric:
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
        if layout.kind in ("kn", "knu"):
            turned = row_major(codes.T)
            turned = turned if layout.kind == "kn" else turned.view(np.uint8) ^ np.uint8(128)
            return {"codes": turned, "scales": scales.reshape(-1).astype(np.float32)}
        if layout.kind == "qdq":
            shape = scales.shape if self.group else scales.shape[:1]
            parts = {"codes": pack_flat(codes, self.bits), "scales": scales.reshape(shape)}
            return parts if zeros is None else {**parts, "zeros": pack_flat(zeros, self.bits)}
        blocks = self._blocks(codes.shape[1], layout)
        fill = self._middle * self._float_zeros
        codes = blocks.pack(
            codes, self._offset, fill if zeros is None or self._float_zeros else zeros[:, -1:]
        )
        parts = {"codes": codes, "scales": blocks.repeated(scales)}
        if layout.kind == "sums":
            return {**parts, "minimums": blocks.repeated(minimums(weight, self._middle))}
        if zeros is None:
            return parts
        zeros = blocks.repeated(zeros)
        if self._float_zeros:
            return {**parts, "zeros": zeros}
        return {**parts, "zeros": pack_bits(padded(zeros, blocks.zeros_width), self.bits)}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        if layout.kind in ("kn", "knu"):
            turned = np.ascontiguousarray(parts["codes"]).view(np.uint8).reshape(k, n)
            turned = turned if layout.kind == "kn" else turned ^ np.uint8(128)
            return QuantizedWeight(turned.view(np.int8).T, read_scales(parts["scales"], n, 1))
        if layout.kind == "qdq":
            scales = read_scales(parts["scales"], n, count_groups(k, self.group))
            codes = unpack_flat(parts["codes"], (n, k), self.bits)
            if self.symmetric:
                return QuantizedWeight(sign_extended(codes, self._offset), scales)
            return QuantizedWeight(
                codes, scales, unpack_flat(parts["zeros"], scales.shape, self.bits)
            )
        blocks = self._blocks(k, layout)
        codes = blocks.unpack(parts["codes"], n, k, self._offset)
        scales = read_scales(parts["scales"], n, blocks.count)[:, :: blocks.repeats]
        if self.symmetric:
            return QuantizedWeight(codes.view(np.int8), scales)
        if layout.kind == "sums":
            found = read_scales(parts["minimums"], n, blocks.count)[:, :: blocks.repeats]
            zeros = zero_points(scales, found, self._middle)
            return QuantizedWeight(codes, scales, zeros, {MINIMUMS: found})
        if self._float_zeros:
            zeros = read_scales(parts["zeros"], n, blocks.count)[:, :: blocks.repeats]
            return QuantizedWeight(codes, scales, zeros)
        zeros = unpack_bits(parts["zeros"].view(np.uint8).reshape(n, -1), self.bits)
        return QuantizedWeight(codes, scales, zeros[:, : blocks.count : blocks.repeats])

    def _blocks(self, k: int, layout: Layout) -> Blocks:
        """The geometry of a row of length `k` in "blocks" and "sums"."""
        if layout.kind == "sums" and not self._float_zeros:
            raise InputError(f"{self.spell()} has no float zero points to be stored as minimums")
        block = layout.block or (0 if self.group else k)
        if not block or (self.group and self.group % block) or (layout.block * self.bits % 8):
            wanted = f"a divisor of {self.group}" if self.group else "any size"
            raise InputError(
                f"{self.spell()} cannot lie in blocks of {layout.block}: "
                f"wanted {wanted} in whole bytes"
            )
        count = count_groups(k, block)
        return Blocks(self.bits, block, count, self.group // block if self.group else count)

    def function(self, opset: int) -> ir.Function:
        """See `Format.function`."""
        levels = np.arange(1 << self.bits) - self._offset
        return dequantize_function(self.function_name, opset, levels, zeros=self._zeros)

    def linear(self, opset: int) -> ir.Function:
        """See `Format.linear`."""
        return linear_function(self.linear_name, opset, self.bits, self._zeros)

    def _zeros_type(self, stored: np.dtype[np.floating[Any]]) -> np.dtype[Any]:
        return stored if self._float_zeros else np.dtype(np.uint8)


INT4 = IntegerGroups("int4", 4, symmetric=True)
UINT4 = IntegerGroups("uint4", 4, symmetric=False)
INT8 = IntegerGroups("int8", 8, symmetric=True)
UINT8 = IntegerGroups("uint8", 8, symmetric=False)
INT8_ROW = IntegerGroups("int8-row", 8, symmetric=True, group=0)
INT4_ROW = IntegerGroups("int4-row", 4, symmetric=True, group=0)
INT2 = IntegerGroups("int2", 2, symmetric=True)
UINT2 = IntegerGroups("uint2", 2, symmetric=False)
