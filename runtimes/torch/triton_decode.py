"""What the Triton kernels share: codes in registers, and the view of them that they read.

Codes are read as `Layout("blocks")` stores them, 32 bits at a time, so no second copy of the
weight is made: low bits first, a word holds 32/bits neighbours of one row in the order of K, and
a shift and a reshape in registers give a tile of W. Where the order is another one it is the
columns of x that are read in it. Rows that are not whole 16 bytes long, rare outside tests, are
padded once (`Words.of`).

An integer becomes a float without a conversion instruction: 2^23 + q has q in its lowest bits.
Small floats are shifted to where float32 has its exponent and mantissa, with an arithmetic shift
that leaves the sign where it is, and multiplied by the power of two between the biases,
subnormals included. Other levels are looked up in a table in shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import levels, repack
from qgraph.runtimes.torch.dequantize import Codes, IntegerCodes

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python, where bfloat16 needs care: its dots are wrong and casts to it truncate."""
NO_ZEROS, PACKED_ZEROS, FLOAT_ZEROS = 0, 1, 2
INTEGERS = 0
NUMBERS = {"table": 1, "e2m1": 2, "e4m3": 3, "e5m2": 4}
ORDERS = {"low": 0, "high": 1, "halves": 2}
STEPS = {"float": 0, "e8m0": 1, "e4m3": 2}
_LIMIT = 1 << 31


class Words(NamedTuple):
    """Codes as int32 words, and how they lie."""

    codes: Tensor
    """int32 `[N, 4·stride4]`."""
    stride4: int
    """Words from row to row, in fours: every row starts at a multiple of 16 bytes."""
    words: int
    """Words of a row that hold codes."""
    words_in_block: int

    @classmethod
    def of(cls, codes: Tensor, bits: int) -> Words:
        """The words of u8 `[N, nb, bytes]`; a block must be whole words where there are many."""
        n, blocks, nbytes = codes.shape
        row = blocks * nbytes
        if row % 16 or codes.data_ptr() % 16 or not codes.is_contiguous():
            flat = repack.cached("16-byte rows", (codes,), lambda: _padded(codes))
        else:
            flat = codes.view(n, row)
        words = -(-row // 4)
        block = nbytes // 4 if blocks > 1 else words
        return cls(flat.view(torch.int32), flat.shape[1] // 16, words, block)


def fits(bits: int, block: int, blocks: int, n: int) -> str | None:
    """None if the kernels read such codes, else why they do not."""
    if blocks > 1 and block * bits % 32:
        return f"blocks of {block} codes of {bits} bits are not whole 32-bit words"
    if n * blocks * block * bits // 32 >= _LIMIT:
        return "the weight has more than 2^31 words"
    return None


def zeros_kind(zeros: Tensor | None) -> int:
    """Which of NO_ZEROS, PACKED_ZEROS and FLOAT_ZEROS the kernels see."""
    if zeros is None:
        return NO_ZEROS
    return PACKED_ZEROS if zeros.dtype == torch.uint8 else FLOAT_ZEROS


def code_arguments(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: Codes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and the constants of a kernel that say where W lies.

    Scales that no kernel reads as they are, those with scales of their own, are made floats once.
    """
    view = Words.of(codes, kind.bits)
    constants = {"BITS": kind.bits, "WORDS_IN_BLOCK": view.words_in_block}
    table = scales
    if isinstance(kind, IntegerCodes):
        constants |= {"ZEROS": zeros_kind(zeros), "NUMBERS": INTEGERS, "ORDER": ORDERS["low"]}
        constants |= {"STEPS": STEPS["float"], "SHARED": 1}
    else:
        table = levels.levels(kind.layout, codes.device)
        steps = kind.steps
        if kind.third == "nested" or steps == "table":
            parts = (scales, zeros)
            scales = repack.cached("steps", parts, lambda: levels.all_steps(kind, *parts))
            steps, zeros = "float", None
        constants |= {"ZEROS": int(zeros is not None), "NUMBERS": NUMBERS[kind.numbers]}
        constants |= {"ORDER": ORDERS[kind.order], "STEPS": STEPS[steps]}
        constants |= {"SHARED": kind.shared_rows}
    arguments = {
        "codes": view.codes,
        "scales": scales.contiguous(),
        "zeros": scales if zeros is None else zeros.contiguous(),
        "table": table,
        "words": view.words,
        "stride4": view.stride4,
        "blocks": codes.shape[1],
        "zeros_stride": 0 if zeros is None else zeros.shape[-1],
    }
    return arguments, constants


def _padded(codes: Tensor) -> Tensor:
    flat = codes.reshape(codes.shape[0], -1)
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % 16)).contiguous()


@triton.jit
def rounded(values: tl.tensor, like: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """float32 `values` to the nearest in the type that the pointer `like` points to."""
    if INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = bits.to(tl.float32, bitcast=True)
    return values.to(like.dtype.element_ty)


@triton.jit
def e4m3(top: tl.tensor) -> tl.tensor:
    """float32 of E4M3 codes in the highest bytes of int32, whose other bytes may hold anything."""
    value = ((top >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def load_scales(
    scales: tl.tensor,
    tensor: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    STEPS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_TENSOR: tl.constexpr,
) -> tl.tensor:
    """float32 `[rows, block]`, those outside finite.

    SHARED: 1, 0 for all, or how many rows share their scales; tensor: what multiplies them all.
    """
    if SHARED == 1:
        at = rows[:, None] * blocks + block[None, :]
    elif SHARED == 0:
        at = rows[:, None] * 0 + block[None, :]
    else:
        at = (rows // SHARED)[:, None] * blocks + block[None, :]
    stored = tl.load(scales + at, mask=live[:, None] & inside[None, :], other=0)
    if STEPS == 0:
        steps = stored.to(tl.float32)
    elif STEPS == 1:
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
        steps = bits.to(tl.float32, bitcast=True)
    else:
        steps = e4m3(stored.to(tl.int32) << 24)
    if HAS_TENSOR:
        steps = steps * tl.load(tensor).to(tl.float32)
    return steps


@triton.jit
def level(
    packed: tl.tensor,
    place: tl.tensor,
    table: tl.tensor,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> tl.tensor:
    """float32 levels of the codes at bit `place` of int32 words."""
    if NUMBERS > 1:
        top = packed << (32 - BITS - place)
        if NUMBERS == 2:
            bits = (top >> 6) & -0x7E400000
            return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        elif NUMBERS == 3:
            return e4m3(top)
        else:
            half = ((top >> 16) & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True)
            return half.to(tl.float32)
    else:
        size: tl.constexpr = 1 << BITS
        codes = (packed >> place) & (size - 1)
        # Not by tl.load: pipelined, it would stage each level through shared memory by itself.
        held = tl.load(table + tl.arange(0, size))
        return tl.reshape(tl.gather(held, tl.reshape(codes, [codes.numel]), 0), codes.shape)


@triton.jit
def column_of(place: tl.tensor, ORDER: tl.constexpr) -> tl.tensor:
    """The column of the code that lies at `place` of its row, low bits of bytes first."""
    if ORDER == 1:
        return place ^ 1
    elif ORDER == 2:  # of 16 bytes, the high halves are the second 16 columns
        return (place & ~31) | ((place >> 1) & 15) | ((place & 1) << 4)
    else:
        return place


@triton.jit
def load_zeros(
    zeros: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    stride: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
) -> tl.tensor:
    """float32 `[rows, block]`: zero points as they count, the middle code where there are none."""
    mask = live[:, None] & inside[None, :]
    if ZEROS == 1:
        bit = block * BITS
        packed = tl.load(zeros + rows[:, None] * stride + (bit // 8)[None, :], mask=mask, other=0)
        points = (packed.to(tl.int32) >> (bit % 8)[None, :]) & ((1 << BITS) - 1)
        return points.to(tl.float32)
    else:
        at = rows[:, None] * stride + block[None, :]
        return tl.load(zeros + at, mask=mask, other=0).to(tl.float32)


@triton.jit
def dequantized(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    at: tl.tensor,
    words: tl.tensor,
    stride4: tl.tensor,
    blocks: tl.tensor,
    zeros_stride: tl.tensor,
    BITS: tl.constexpr,
    WORDS_IN_BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ORDER: tl.constexpr,
    STEPS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """float32 `[BLOCK_N, BLOCK_W·32/BITS]`: the weights of `rows` in the words `at`.

    They are in the order in which they lie; `column_of` says which they are.
    """
    inside = at < words
    where = rows[:, None] * (stride4 * 4) + at[None, :]
    packed = tl.load(codes + where, mask=live[:, None] & inside[None, :], other=0)
    block = at // WORDS_IN_BLOCK
    HAS_TENSOR: tl.constexpr = NUMBERS > 0 and ZEROS > 0
    steps = load_scales(
        scales, zeros, rows, live, blocks, block, inside, STEPS, SHARED, HAS_TENSOR
    )  # fmt: skip
    places = (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    if NUMBERS > 0:
        values = level(packed[:, :, None], places, table, BITS, NUMBERS)
    else:
        fields = (packed[:, :, None] >> places) & ((1 << BITS) - 1)
        values = (fields | 0x4B000000).to(tl.float32, bitcast=True)
        if ZEROS == 0:
            values = values - (8388608.0 + (1 << (BITS - 1)))
        else:
            points = load_zeros(zeros, rows, live, zeros_stride, block, inside, BITS, ZEROS)
            if ZEROS == 1:
                values = values - (points + 8388608.0)[:, :, None]
            else:
                values = (values - 8388608.0) - points[:, :, None]
    values = values * steps[:, :, None]
    return tl.reshape(values, [BLOCK_N, BLOCK_W * (32 // BITS)])
