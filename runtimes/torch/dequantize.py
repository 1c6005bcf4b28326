"""Codes to floats in torch: bit-equal with the formats' numpy `unpack` and `dequantize`.

Codes lie as `Layout("blocks")`: u8 `[N, nb, bytes]`; the block is `bytes * 8 // bits` codes.
Integers are low bits first. Arithmetic is float32, the result is rounded to its dtype at the end.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch import levels
from qgraph.runtimes.torch.levels import LevelCodes

_INTEGER = re.compile(r"(?:(Int)|Uint)([248])((?(1)|(?:FloatZero)?))V1")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class IntegerCodes(NamedTuple):
    """What the name of an integer layout says: `Int4V1` is 4 bits, symmetric."""

    bits: int
    symmetric: bool

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes, which are stored unsigned."""
        return 1 << (self.bits - 1)

    @property
    def offset(self) -> int:
        """What was added to every code to make it unsigned."""
        return self.middle if self.symmetric else 0


Codes: TypeAlias = IntegerCodes | LevelCodes


@functools.cache
def integer_codes(layout: str) -> IntegerCodes | None:
    """The integer layout called `layout`, or None if it is another one."""
    found = _INTEGER.fullmatch(layout)
    return IntegerCodes(int(found[2]), found[1] is not None) if found else None


def codes_of(layout: str) -> Codes | None:
    """What the name of a layout says of its codes; None for one that only its function reads."""
    return integer_codes(layout) or levels.level_codes(layout)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    layout: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """W `[N, k]` in `dtype` (`float_type` of the scales if None).

    codes: u8 `[N, nb, bytes]`; scales: float `[N, nb]`; zeros: u8 `[N, ceil(nb·bits/8)]` packed
    like the codes, or float `[N, nb]`, which gives (q - z)·s; None for symmetric layouts. The
    parts of other formats are those of their ONNX function, `zeros` is the third one.

    Raises:
        InputError: `layout` is no layout that this version knows, or zeros do not go with it.
    """
    rows = torch.arange(codes.shape[0], device=codes.device)
    return take(rows, codes, scales, zeros, k, layout, dtype)


def take(
    at: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    layout: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """W[at] `[r, k]` of the rows `at` `[r]`, none negative; see `dequantize`."""
    dtype = dtype or float_type(scales)
    kind = codes_of(layout)
    if kind is None:
        from qgraph.runtimes.torch import format_function

        return format_function.dequantize(codes, scales, zeros, k, layout)[at].to(dtype)
    if isinstance(kind, IntegerCodes):
        check_zeros(zeros, kind, layout)
    some = codes[at]
    if codes.device.type == "cpu":
        values = Scratch(kind, some.numel()).code_values(some)
    elif isinstance(kind, LevelCodes):
        pairs = levels.byte_levels(layout, codes.device)[some.int()]
        values = levels.in_order(pairs, kind).contiguous()
    else:
        values = unpack(some, kind.bits).to(torch.float32).sub_(kind.offset)
    return scaled(values, scales, zeros, kind, at)[:, :k].to(dtype).contiguous()


def float_type(scales: Tensor) -> torch.dtype:
    """The dtype of a dequantized weight: that of its scales, float32 where those are codes."""
    return scales.dtype if scales.dtype in FLOATS else torch.float32


def scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, kind: Codes, at: Tensor) -> Tensor:
    """W, float32 `[r, nb·block]`, the rows `at` `[r]`, written over their levels `[r, nb, block]`.

    Scales and zeros are those of the whole weight.
    """
    if isinstance(kind, LevelCodes):
        return values.mul_(levels.steps(kind, scales, zeros, at).unsqueeze(2)).flatten(1)
    if zeros is not None:
        values.sub_(zero_points(zeros[at], kind.bits, values.shape[1]).unsqueeze(2))
    return values.mul_(scales[at].to(torch.float32).unsqueeze(2)).flatten(1)


def zero_points(zeros: Tensor, bits: int, blocks: int) -> Tensor:
    """float32 `[N, blocks]` of zero points, packed or already float."""
    if zeros.dtype == torch.uint8:
        zeros = unpack(zeros, bits)[:, :blocks]
    return zeros.to(torch.float32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """u8 `[…, m]` into u8 `[…, m·8/bits]`, low bits first."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    planes = [(packed >> shift if shift else packed) & mask for shift in range(0, 8, bits)]
    return torch.stack(planes, -1).flatten(-2)


class Scratch:
    """Room for the codes of `size` bytes as floats, on the CPU; used again, its pages stay.

    A byte is looked up as one number as wide as its floats together: half the time of shifts,
    masks and a stack.
    """

    def __init__(self, kind: Codes, size: int) -> None:
        self.kind = kind
        self.table = _byte_table(kind)
        self.floats = torch.empty(size * 8 // kind.bits)
        self.index = torch.empty(0 if self.table is None else size, dtype=torch.int32)

    def code_values(self, codes: Tensor) -> Tensor:
        """float32 `[r, nb, block]`, levels, or integers less the offset, for u8 `[r, nb, bytes]`.

        The next call writes over it.
        """
        kind, bits = self.kind, self.kind.bits
        block = codes.shape[2] * 8 // bits
        floats = self.floats[: codes.numel() * 8 // bits].view(*codes.shape[:2], block)
        if isinstance(kind, IntegerCodes) and self.table is None:
            return floats.copy_(codes).sub_(kind.offset)
        assert self.table is not None
        index = self.index[: codes.numel()]
        index.view(codes.shape).copy_(codes)
        torch.index_select(self.table, 0, index, out=floats.view(self.table.dtype).view(-1))
        if isinstance(kind, LevelCodes) and bits < 8:
            return levels.in_order(floats.view(*codes.shape, -1), kind)
        return floats


@functools.cache
def _byte_table(kind: Codes) -> Tensor | None:
    """The floats in each byte, seen as 256 numbers of 4, 8 or 16 bytes; None for 8-bit integers."""
    with torch.inference_mode(False):
        if isinstance(kind, LevelCodes):
            floats = levels.byte_levels(kind.layout)
        elif kind.bits == 8:
            return None
        else:
            codes = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(1), kind.bits)
            floats = codes.to(torch.float32).sub_(kind.offset)
        wide = {1: torch.float32, 2: torch.float64, 4: torch.complex128}[floats.shape[1]]
        return floats.contiguous().view(wide).view(-1)


def check_zeros(zeros: Tensor | None, kind: IntegerCodes, layout: str) -> None:
    """Raise InputError if zero points are missing from `layout`, or do not belong to it."""
    if kind.symmetric and zeros is not None:
        raise InputError(
            f"{layout} is symmetric, found zero points of {zeros.dtype}; "
            f"wanted none, or the layout U{layout.lower()[:-2]}V1"
        )
    if not kind.symmetric and zeros is None:
        raise InputError(
            f"{layout} needs zero points, found none: give them, or use Int{kind.bits}V1"
        )
    if zeros is not None and zeros.dtype == torch.uint8 and "FloatZero" in layout:
        raise InputError(
            f"{layout} has float zero points, found uint8: use Uint{kind.bits}V1 for packed ones"
        )
