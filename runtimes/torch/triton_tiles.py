"""Products of more rows: tiles of W dequantized in registers and multiplied by tensor cores.

The tile is Wᵀ's transpose: W is the first operand and xᵀ the second, so that few rows of x cost
few columns of the tensor core's shape. Programs that share a tile of W are neighbours (rows of x
vary fastest), so that W is read from memory once and from the L2 cache after that. W is rounded to
x's dtype, as the reference does; sums are float32; K is split where the tiles do not fill the
device, and the parts are added in a fixed order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import autotune
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.dequantize import Codes
from qgraph.runtimes.torch.triton_decode import (
    INTERPRETED,
    code_arguments,
    column_of,
    dequantized,
    rounded,
)
from qgraph.runtimes.torch.triton_reduce import partials, reduce_splits


@triton.jit
def multiply(w: tl.tensor, x: tl.tensor, acc: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Give acc + w · x; the interpreter is given float32, since it computes bfloat16 dots wrong."""
    if INTERPRETED:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def tiles_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    words: tl.tensor,
    stride4: tl.tensor,
    blocks: tl.tensor,
    zeros_stride: tl.tensor,
    splits: tl.tensor,
    BITS: tl.constexpr,
    WORDS_IN_BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ORDER: tl.constexpr,
    STEPS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """out: y `[m, n]` if splits is 1, else float32 `[splits, m, n]`."""
    split = tl.program_id(1)
    m_tiles = tl.cdiv(m, BLOCK_M)
    row = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < n
    width: tl.constexpr = BLOCK_W * (32 // BITS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(split * BLOCK_W, words, splits * BLOCK_W, num_stages=STAGES):
        column = column_of(start * (32 // BITS) + tl.arange(0, width), ORDER)
        x_t = tl.load(
            x + column[:, None] + row[None, :] * k,
            mask=(column < k)[:, None] & (row < m)[None, :],
            other=0,
        )
        w = dequantized(
            codes, scales, zeros, table, rows, live, start + tl.arange(0, BLOCK_W), words, stride4,
            blocks, zeros_stride, BITS, WORDS_IN_BLOCK, ZEROS, NUMBERS, ORDER, STEPS, SHARED,
            BLOCK_N, BLOCK_W,
        )  # fmt: skip
        acc = multiply(rounded(w, x, INTERPRETED), x_t, acc, INTERPRETED)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    where = (split * m + row)[:, None] * n + rows[None, :]
    mask = (row < m)[:, None] & live[None, :]
    tl.store(out + where, rounded(tl.trans(acc), out, INTERPRETED), mask=mask)


@functools.cache
def configs(m: int, n: int, bits: int, words: int) -> tuple[Config, ...]:
    """What is tried on a device, the best guess first."""
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    tall = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4))
    found = []
    for block_n, block_k, warps in tall:
        block_w = max(1, block_k * bits // 32)
        for splits in (1, 2, 4, 8):
            if splits == 1 or splits * block_w < words:
                found.append(Config(block_n, block_w, splits, warps, 3, block_m))
    return autotune.by_occupancy(found, n * triton.cdiv(m, block_m))


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    kind: Codes,
    config: Config | None = None,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, k]`; see `ops.linear`. `config` None is tuned on a device."""
    m, n = x.shape[0], codes.shape[0]
    x = x.contiguous()
    arguments, constants = code_arguments(codes, scales, zeros, kind)

    def run(config: Config) -> Tensor:
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        out = y if config.splits == 1 else partials(config.splits, y)
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        tiles_kernel[(tiles, config.splits)](
            x,
            **arguments,
            bias=x if bias is None else bias,
            out=out,
            m=m,
            n=n,
            k=k,
            splits=config.splits,
            **constants,
            HAS_BIAS=bias is not None and config.splits == 1,
            BLOCK_M=config.block_m,
            INTERPRETED=INTERPRETED,
            **config.constants(),
        )
        return y if config.splits == 1 else reduce_splits(out, bias, y)

    if config is None:
        rows = triton.next_power_of_2(m)
        key = ("tiles", x.dtype, rows, n, k, *constants.values())
        config = autotune.best(key, configs(rows, n, kind.bits, arguments["words"]), run)
    return run(config)
