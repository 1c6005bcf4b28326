"""Triton kernels of `fp8_products`: x to FP8 by 1 × 128, and the product of FP8 codes.

A step of K is one block of 128 or half of one, so its scales are one number for W and one for each
row of x: they multiply the float32 sum of the step. Tensor cores add FP8 products with fewer bits
than float32 has; sums of more than a block never are theirs. A GPU that multiplies no FP8 takes the
codes as float16, which holds them exactly.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import autotune
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.backends import FP8_CAPABILITY
from qgraph.runtimes.torch.fp8_products import BLOCK
from qgraph.runtimes.torch.triton_decode import INTERPRETED, rounded
from qgraph.runtimes.torch.triton_reduce import partials, reduce_splits

ROWS = 16
"""Rows of x that a program quantizes."""


@triton.jit
def e4m3_values(x: tl.tensor) -> tl.tensor:
    """float32 `x`, |x| ≤ 448, to the nearest number of E4M3FN, ties to even."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # 2^20 times a unit of the result: adding and subtracting it rounds as float32 rounds.
    unit = tl.maximum(exponent, 121) + 20
    large = (unit << 23).to(tl.float32, bitcast=True)
    large = tl.where(x < 0, -large, large)
    return (x + large) - large


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """codes: FP8 `[m, k]`; scales: float32 `[m, ceil(k / BLOCK)]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    where = row.to(tl.int64)[:, None] * k + column[None, :]
    mask = (row < m)[:, None] & (column < k)[None, :]
    values = tl.load(x + where, mask=mask, other=0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(values), 1), tl.full([ROWS], 448.0, tl.float32))
    steps = tl.where(scale > 0, scale, 1.0)
    quotients = tl.minimum(tl.maximum(tl.math.div_rn(values, steps[:, None]), -448.0), 448.0)
    tl.store(codes + where, e4m3_values(quotients).to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + row * tl.cdiv(k, BLOCK) + block, scale, mask=row < m)


@triton.jit
def product_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
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
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """out: y `[m, n]` if splits is 1, else float32 `[splits, m, n]`.

    x: FP8 `[m, k]`; x_scales: `[m, ceil(k / 128)]`; codes: FP8 `[n, k]`; scales: float32
    `[ceil(n / 128), ceil(k / 128)]`. BLOCK_N and BLOCK_W divide 128. WIDE: products of float16.
    """
    split = tl.program_id(1)
    m_tiles = tl.cdiv(m, BLOCK_M)
    row = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // m_tiles * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(k, 128)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(split * BLOCK_W, k, splits * BLOCK_W, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_W)
        inside = column < k
        x_t = tl.load(
            x + column[:, None] + row.to(tl.int64)[None, :] * k,
            mask=inside[:, None] & (row < m)[None, :],
            other=0.0,
        )
        w = tl.load(
            codes + rows.to(tl.int64)[:, None] * k + column[None, :],
            mask=(rows < n)[:, None] & inside[None, :],
            other=0.0,
        )
        if INTERPRETED:
            x_t, w = x_t.to(tl.float32), w.to(tl.float32)
        elif WIDE:
            x_t, w = x_t.to(tl.float16), w.to(tl.float16)
        sums = tl.dot(w, x_t, input_precision="ieee")
        block = start // 128
        step = tl.load(scales + first // 128 * blocks + block)
        steps = tl.load(x_scales + row * blocks + block, mask=row < m, other=0)
        acc += sums * (steps * step)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=rows < n, other=0).to(tl.float32)[:, None]
    where = (split * m + row).to(tl.int64)[:, None] * n + rows[None, :]
    mask = (row < m)[:, None] & (rows < n)[None, :]
    tl.store(out + where, rounded(tl.trans(acc), out, INTERPRETED), mask=mask)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_products.quantize`."""
    x = x.contiguous()
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, triton.cdiv(k, BLOCK), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(m, ROWS), triton.cdiv(k, BLOCK))
    quantize_kernel[grid](x, codes, scales, m, k, ROWS=ROWS, BLOCK=BLOCK)
    return codes, scales


@functools.cache
def configs(m: int, n: int, k: int) -> tuple[Config, ...]:
    """What is tried on a device, the best guess first; tiles never cross a block of 128."""
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    found = [
        Config(block_n, block_k, splits, warps, stages, block_m)
        for block_n, block_k, warps, stages in (
            (64, 128, 4, 4), (128, 128, 8, 3), (128, 128, 4, 4), (64, 64, 4, 4),
        )
        for splits in (1, 2, 4, 8)
        if splits == 1 or splits * block_k < k
    ]  # fmt: skip
    return autotune.by_occupancy(found, n * triton.cdiv(m, block_m))


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    config: Config | None = None,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, K]`; see `ops.linear_fp8_w8a8`.

    `config` None is tuned on a device.
    """
    m, (n, k) = x.shape[0], weight.shape
    codes, steps = quantize(x)
    weight, scales = weight.contiguous(), scales.contiguous()
    wide = x.is_cuda and torch.cuda.get_device_capability(x.device) < FP8_CAPABILITY

    def run(config: Config) -> Tensor:
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        out = y if config.splits == 1 else partials(config.splits, y)
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        product_kernel[(tiles, config.splits)](
            codes,
            steps,
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
            WIDE=wide,
            INTERPRETED=INTERPRETED,
            **config.constants(),
        )
        return y if config.splits == 1 else reduce_splits(out, bias, y)

    if config is None:
        rows = triton.next_power_of_2(m)
        key = ("fp8 products", x.dtype, rows, n, k)
        config = autotune.best(key, configs(rows, n, k), run)
    return run(config)
