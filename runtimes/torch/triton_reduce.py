"""Sums over the parts of a split K, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch.triton_decode import INTERPRETED, rounded

_BLOCK = 256


@triton.jit
def reduce_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    size: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Compute y `[m, n]`, the sum of parts `[SPLITS, m, n]` (+ bias `[n]`); size is m·n."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, mask=live, other=0)
    if HAS_BIAS:
        total += tl.load(bias + at % n, mask=live, other=0).to(tl.float32)
    tl.store(y + at, rounded(total, y, INTERPRETED), mask=live)


def partials(splits: int, y: Tensor) -> Tensor:
    """Room for the parts of y: float32 `[splits, M, N]`."""
    return torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)


def reduce_splits(parts: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """Write the sum of `parts` `[splits, M, N]`, and the bias `[N]`, into y."""
    reduce_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        parts,
        y if bias is None else bias,
        y,
        y.shape[1],
        y.numel(),
        SPLITS=parts.shape[0],
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK,
        INTERPRETED=INTERPRETED,
    )
    return y
