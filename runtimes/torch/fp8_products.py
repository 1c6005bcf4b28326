"""Products of FP8 on both sides: x by 1 × 128, W by 128 × 128, as DeepSeek-V3 computes them.

Each slice of 128 columns is summed in float32 and multiplied by the scale of the activation's row
and that of the weight's block there (DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Columns of x, and rows and columns of W, that share a scale."""
TOP = 448.0
"""The largest number of E4M3FN."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn `[M, K]` of x, and scales float32 `[M, ceil(K/128)]`, amax / 448.

    The block of the last columns is what is left of K. One of zeros has the scale 0.
    """
    m, k = x.shape
    blocks = pad(x.to(torch.float32), (0, -k % BLOCK)).view(m, -1, BLOCK)
    scales = blocks.abs().amax(-1) / TOP
    steps = torch.where(scales > 0, scales, 1)[:, :, None]
    codes = (blocks / steps).clamp(-TOP, TOP).to(torch.float8_e4m3fn)
    return codes.view(m, -1)[:, :k].contiguous(), scales


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y `[M, N]` of x `[M, K]`, both sides in FP8; see `ops.linear_fp8_w8a8`.

    The reference, and what runs where no kernel does.
    """
    codes, steps = quantize(x)
    n, k = weight.shape
    y = torch.zeros(len(x), n, dtype=torch.float32, device=x.device)
    for block, start in enumerate(range(0, k, BLOCK)):
        columns = slice(start, start + BLOCK)
        sums = codes[:, columns].to(torch.float32) @ weight[:, columns].to(torch.float32).T
        step = scales[:, block].repeat_interleave(BLOCK)[:n]
        y += sums * (steps[:, block, None] * step)
    return (y if bias is None else y + bias).to(x.dtype)
