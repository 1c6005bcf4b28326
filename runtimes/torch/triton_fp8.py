"""FP8 weights in blocks of 128 × 128 with one scale each, activations of 16 or 32 bits.

A step of K lies within one block, so its scale is one number, and it multiplies the sums and not
the weights: E4M3 codes are exact in float16 and bfloat16, and nothing is rounded before the sum.
The tile is that of `triton_tiles`; few rows take its narrowest one, which the bytes of W bound.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import autotune
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.triton_decode import INTERPRETED, rounded
from qgraph.runtimes.torch.triton_reduce import partials, reduce_splits
from qgraph.runtimes.torch.triton_tiles import multiply


@triton.jit
def fp8_block_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    splits: tl.tensor,
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
    first = tl.program_id(0) // m_tiles * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    live = rows < n
    scale_row = scales + first // 128 * tl.cdiv(k, 128)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(split * BLOCK_W, k, splits * BLOCK_W, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_W)
        inside = column < k
        x_t = tl.load(
            x + column[:, None] + row[None, :] * k,
            mask=inside[:, None] & (row < m)[None, :],
            other=0,
        )
        w = tl.load(
            weight + rows[:, None] * k + column[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        none = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        product = multiply(w.to(x.dtype.element_ty), x_t, none, INTERPRETED)
        acc += product * tl.load(scale_row + start // 128)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    where = (split * m + row)[:, None] * n + rows[None, :]
    mask = (row < m)[:, None] & live[None, :]
    tl.store(out + where, rounded(tl.trans(acc), out, INTERPRETED), mask=mask)


@functools.cache
def configs(m: int, n: int, k: int) -> tuple[Config, ...]:
    """What is tried on a device, the best guess first; tiles never cross a block of 128."""
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    found = [
        Config(block_n, block_k, splits, warps, 3, block_m)
        for block_n, block_k, warps in ((64, 128, 4), (128, 128, 8), (128, 64, 8), (64, 64, 4))
        for splits in (1, 2, 4, 8)
        if splits == 1 or splits * block_k < k
    ]
    return autotune.by_occupancy(found, n * triton.cdiv(m, block_m))


def linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, config: Config | None = None
) -> Tensor:
    """Compute y `[M, N]` of x `[M, K]`; see `ops.linear_fp8_block`.

    config: None is tuned on a device.
    """
    m, (n, k) = x.shape[0], weight.shape
    x, weight, scales = x.contiguous(), weight.contiguous(), scales.contiguous()

    def run(config: Config) -> Tensor:
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        out = y if config.splits == 1 else partials(config.splits, y)
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        fp8_block_kernel[(tiles, config.splits)](
            x,
            weight,
            scales,
            x if bias is None else bias,
            out,
            m,
            n,
            k,
            config.splits,
            HAS_BIAS=bias is not None and config.splits == 1,
            BLOCK_M=config.block_m,
            INTERPRETED=INTERPRETED,
            **config.constants(),
        )
        return y if config.splits == 1 else reduce_splits(out, bias, y)

    if config is None:
        rows = triton.next_power_of_2(m)
        key = ("fp8 block", x.dtype, rows, n, k)
        config = autotune.best(key, configs(rows, n, k), run)
    return run(config)
