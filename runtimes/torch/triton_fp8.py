"""Tiles of FP8 weights with a scale for the tensor, a row or 128 × 128, x of 16 bits.

A step of K lies within one block, so its scale is one number, and it multiplies the sums and not
the weights, as scales of rows do at the end: FP8 codes are exact in float16 and bfloat16, and
nothing is rounded before the sum. The conversion is the hardware's; what has none, and scales for
shorter blocks, take `triton_tiles`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import autotune
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.levels import LevelCodes
from qgraph.runtimes.torch.triton_decode import INTERPRETED, rounded
from qgraph.runtimes.torch.triton_reduce import partials, reduce_splits
from qgraph.runtimes.torch.triton_tiles import multiply

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def fp8_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    splits: tl.tensor,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """out: y `[m, n]` if splits is 1, else float32 `[splits, m, n]`.

    codes: of an FP8 type, `stride` from row to row; SHARED: rows that share scales, 0 for all.
    """
    split = tl.program_id(1)
    m_tiles = tl.cdiv(m, BLOCK_M)
    row = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // m_tiles * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    live = rows < n
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
            codes + rows[:, None].to(tl.int64) * stride + column[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(x.dtype.element_ty)
        if SHARED == 128:
            step = tl.load(scales + first // 128 * tl.cdiv(k, 128) + start // 128)
            none = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc += multiply(w, x_t, none, INTERPRETED) * step.to(tl.float32)
        else:
            acc = multiply(w, x_t, acc, INTERPRETED)
    if SHARED == 1:
        acc *= tl.load(scales + rows, mask=live, other=0).to(tl.float32)[:, None]
    elif SHARED == 0:
        acc *= tl.load(scales).to(tl.float32)
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
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    k: int,
    kind: LevelCodes,
    config: Config | None = None,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, k]`; see `ops.linear`. `config` None is tuned on a device.

    codes: u8 `[N, nb, bytes]`, E4M3 or E5M2; nb is 1 unless rows share scales by 128.
    """
    m, n = x.shape[0], codes.shape[0]
    x, scales = x.contiguous(), scales.contiguous()
    flat = codes.reshape(n, -1).view(TYPES[kind.numbers])

    def run(config: Config) -> Tensor:
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        out = y if config.splits == 1 else partials(config.splits, y)
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        fp8_kernel[(tiles, config.splits)](
            x,
            flat,
            scales,
            x if bias is None else bias,
            out,
            m,
            n,
            k,
            flat.shape[1],
            config.splits,
            SHARED=kind.shared_rows,
            HAS_BIAS=bias is not None and config.splits == 1,
            BLOCK_M=config.block_m,
            INTERPRETED=INTERPRETED,
            **config.constants(),
        )
        return y if config.splits == 1 else reduce_splits(out, bias, y)

    if config is None:
        rows = triton.next_power_of_2(m)
        key = ("fp8 tiles", x.dtype, rows, n, k, kind.numbers, kind.shared_rows)
        config = autotune.best(key, configs(rows, n, k), run)
    return run(config)
