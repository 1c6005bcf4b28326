"""Importance-weighted rounding: ranges of least weight error, weighted by mean square inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.range_search import search

if TYPE_CHECKING:
    from torch import Tensor

SHRINK = tuple(1.05 - 0.025 * step for step in range(19))


def fit(rows: Tensor, curvature: Tensor, fmt: Format, dtype: ir.DataType) -> QuantizedWeight:
    """Minimise Σ_k h_k (w_k − ŵ_k)² in each group.

    Args:
        rows: float32 `[N, K]`. curvature: h, float32 `[K]`, mean squares of the inputs.
        fmt: an integer format in groups. dtype: in which scales are stored.

    A column whose inputs are all zero counts a little, so that its group keeps a sane range.
    """
    import torch

    k = rows.shape[1]
    width = fmt.group or k
    floor = 1e-6 * curvature.mean().clamp(min=torch.finfo(torch.float32).tiny)
    weights = torch.nn.functional.pad(curvature.clamp(min=floor), (0, -k % width)).view(-1, width)

    def loss(error: Tensor) -> Tensor:
        return error.square_().mul_(weights).sum(-1)

    return search(rows, fmt, dtype, loss, shrink=SHRINK)
