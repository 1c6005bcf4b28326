"""The parts of a quantized weight: how they lie, and the arrays they are made from.

`W` is always `[N, K]`: rows are outputs, columns are inputs. `G` is the group size along K
(0 stands for the whole row) and `nb = ceil(K / G)` the number of groups in a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Part = Literal["codes", "scales", "zeros", "tensor", "nested", "minimums"]
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which `qgraph::Dequantize…` reads them. Every format has codes and scales, and
at most one more: zero points, a scale of the whole tensor, or the scales of its scales; minimums,
in the layout "sums", stand for zero points."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the parts of a quantized weight lie in memory.

    kind "blocks": what `qgraph::Dequantize…` and MatMulNBits read. Codes are unsigned
        (symmetric formats add 2^(bits-1)), packed along K, low bits first, each row padded
        to whole blocks with the zero point: u8 `[N, nb, block·bits/8]`; scales `[N, nb]`;
        zeros u8 `[N, ceil(nb·bits/8)]`, packed like the codes, each row padded to whole bytes.
        `block` is the group, or a smaller block that divides it, whose scales then repeat;
        where the group is the whole row any block will do, and 0 is one block per row
        (u8 `[N, 1, ceil(K·bits/8)]`).
        Formats of level tables say in their files how their codes and scales lie.
    kind "qdq": what DequantizeLinear reads, axis 1: codes `[N, K]` in the format's own ONNX
        integer type (ONNX packs flat, without padding rows), scales and zeros `[N, nb]`
        (rank 1, `[N]`, where the group is the whole row). `block` is not looked at.
    kind "flat": what MatMulBnb4 reads: codes u8 `[N·K/2]`, scales `[N·nb]`, as "blocks" has them.
    kind "nbits8": what MatMulNBits reads at 8 bits, for levels that are multiples of one half:
        codes 2·level + 128, scales halved; u8 `[N, nb, block]` and `[N, nb]`.
    kind "own": what the format's own fused operator reads (MatMulBlockQuantizedFp8Weight, …Fp4…).
    kind "sums": codes and scales as "blocks" has them, and minimums float32 `[N, nb]` in place of
        float zero points: see `formats.minimums`.
    kind "kn": what MatMulIntegerToFloat and DynamicQuantizeMatMul read, for whole rows of 8 bits:
        codes int8 `[K, N]`, row by row of that; scales `[N]`.
    kind "knu": the same with unsigned codes, uint8, plus 128.
    """

    kind: Literal["blocks", "qdq", "flat", "nbits8", "sums", "own", "kn", "knu"]
    block: int = 0

    def of(self, part: Part) -> Layout:
        """The layout that has the very bytes of this one for `part`: one copy serves both."""
        shared = self.kind == "sums" and part in ("codes", "scales")
        return Layout("blocks", self.block) if shared else self


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """Shape and ONNX type of one part of a quantized weight, as stored.

    rows: rows of the weight to one slice of `axis`; 0 where the part belongs to the whole weight.
    axis: the axis of the part along which the rows of the weight lie: 0, or 1 of a matrix of whole
        bytes, whose rows of the weight are columns.
    """

    shape: tuple[int, ...]
    dtype: ir.DataType
    rows: Fraction | int = 1
    axis: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored; types below one byte are packed flat."""
        return -(-self.size * self.dtype.bitwidth // 8)

    def slices(self, start: int, stop: int) -> tuple[int, int]:
        """The slices of `axis` (first, last + 1) that rows `start:stop` of the weight need."""
        if not self.rows:
            return 0, self.shape[0] if self.shape else 1
        return math.floor(start / Fraction(self.rows)), math.ceil(stop / Fraction(self.rows))

    def index(self, start: int, stop: int) -> tuple[slice, ...]:
        """Where rows `start:stop` of the weight lie in an array of this shape; all of a scalar."""
        if not self.shape:
            return ()
        return (*(slice(None),) * self.axis, slice(*self.slices(start, stop)))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes (first, last + 1) of those slices, where they lie in one piece (`axis` 0)."""
        bits = math.prod(self.shape[1:]) * self.dtype.bitwidth
        first, last = self.slices(start, stop)
        return first * bits // 8, -(-last * bits // 8)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The runs of bytes (first, last + 1) of those slices, in the order of the part."""
        if not self.axis:
            return [self.span(start, stop)]
        first, last = self.slices(start, stop)
        count, width = self.shape
        if last - first == width:
            return [(0, self.nbytes)]
        size = self.dtype.bitwidth // 8
        return [((at + first) * size, (at + last) * size) for at in range(0, count * width, width)]


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """Rows of a quantized weight, unpacked, in any order of memory. Only a format packs.

    codes: `[n, K]`, int8 for symmetric integers (signed codes), else uint8 (bit patterns).
    scales: `[n, nb]`, what the levels of the codes are multiplied by, each row's own even where
        rows share one; float16 where they are stored so, else float32.
    zeros: `[n, nb]` uint8, or floats like the scales; None where the format has none.
    more: what the scales were made from, where they are not stored as they are, and `minimums`
        where those are stored; `[n, …]` each.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    more: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    def rows(self, rows: slice) -> QuantizedWeight:
        """Some of the rows; views of the arrays."""
        zeros = None if self.zeros is None else self.zeros[rows]
        more = {name: array[rows] for name, array in self.more.items()}
        return QuantizedWeight(self.codes[rows], self.scales[rows], zeros, more)

    @classmethod
    def joined(cls, pieces: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Blocks of rows of one weight (at least one), one behind the other."""
        if len(pieces) == 1:
            return pieces[0]
        zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
        return cls(
            np.concatenate([piece.codes for piece in pieces]),
            np.concatenate([piece.scales for piece in pieces]),
            np.concatenate(zeros) if zeros else None,
            {
                name: np.concatenate([piece.more[name] for piece in pieces])
                for name in pieces[0].more
            },
        )
