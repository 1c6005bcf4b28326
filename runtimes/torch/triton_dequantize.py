"""W as floats by one pass over the codes, for products that a library's matmul does best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch.dequantize import Codes
from qgraph.runtimes.torch.triton_decode import (
    INTERPRETED,
    code_arguments,
    column_of,
    dequantized,
    rounded,
)

_BLOCK_N, _BLOCK_W = 8, 64


@triton.jit
def dequantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
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
    INTERPRETED: tl.constexpr,
) -> None:
    """out: W `[n, k]`."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < n
    start = tl.program_id(1) * BLOCK_W
    w = dequantized(
        codes, scales, zeros, table, rows, live, start + tl.arange(0, BLOCK_W), words, stride4,
        blocks, zeros_stride, BITS, WORDS_IN_BLOCK, ZEROS, NUMBERS, ORDER, STEPS, SHARED,
        BLOCK_N, BLOCK_W,
    )  # fmt: skip
    place = start * (32 // BITS) + tl.arange(0, BLOCK_W * (32 // BITS))
    column = column_of(place, ORDER)
    where = rows[:, None].to(tl.int64) * k + column[None, :]
    mask = live[:, None] & (column < k)[None, :]
    tl.store(out + where, rounded(w, out, INTERPRETED), mask=mask)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    kind: Codes,
    dtype: torch.dtype,
) -> Tensor:
    """W `[N, k]` in `dtype`; see `ops.dequantize`."""
    n = codes.shape[0]
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    arguments, constants = code_arguments(codes, scales, zeros, kind)
    grid = (triton.cdiv(n, _BLOCK_N), triton.cdiv(arguments["words"], _BLOCK_W))
    dequantize_kernel[grid](
        **arguments,
        out=out,
        n=n,
        k=k,
        **constants,
        BLOCK_N=_BLOCK_N,
        BLOCK_W=_BLOCK_W,
        INTERPRETED=INTERPRETED,
    )
    return out
