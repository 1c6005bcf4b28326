"""What the Triton kernels share: integer codes in registers, and the view of them that they read.

Codes are read as `Layout("blocks")` stores them, 32 bits at a time, so no second copy of the
weight is made: low bits first, a word holds 32/bits neighbours of one row in the order of K, and
a shift and a reshape in registers give a tile of W. Rows that are not whole 16 bytes long, rare
outside tests, are padded once (`Words.of`).

A code becomes a float without a conversion instruction: 2^23 + q has q in its lowest bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import repack
from qgraph.runtimes.torch.dequantize import IntegerCodes

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python, where bfloat16 needs care: its dots are wrong and casts to it truncate."""
NO_ZEROS, PACKED_ZEROS, FLOAT_ZEROS = 0, 1, 2
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
    codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: IntegerCodes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and the constants of a kernel that say where W lies."""
    view = Words.of(codes, kind.bits)
    arguments = {
        "codes": view.codes,
        "scales": scales.contiguous(),
        "zeros": scales if zeros is None else zeros.contiguous(),
        "words": view.words,
        "stride4": view.stride4,
        "blocks": codes.shape[1],
        "zeros_stride": 0 if zeros is None else zeros.shape[1],
    }
    constants = {
        "BITS": kind.bits,
        "WORDS_IN_BLOCK": view.words_in_block,
        "ZEROS": zeros_kind(zeros),
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
def load_scales(
    scales: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """float32 `[rows, block]`, 0 outside."""
    at = rows[:, None] * blocks + block[None, :]
    return tl.load(scales + at, mask=live[:, None] & inside[None, :], other=0).to(tl.float32)


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
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """float32 `[BLOCK_N, BLOCK_W·32/BITS]`: the weights of `rows` in the words `at`."""
    inside = at < words
    where = rows[:, None] * (stride4 * 4) + at[None, :]
    packed = tl.load(codes + where, mask=live[:, None] & inside[None, :], other=0)
    block = at // WORDS_IN_BLOCK
    steps = load_scales(scales, rows, live, blocks, block, inside)
    shifts = tl.arange(0, 32 // BITS) * BITS
    fields = (packed[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
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
