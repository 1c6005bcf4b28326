"""Group ranges by output error: each group's own share of the loss tr((W − Ŵ) H (W − Ŵ)ᵀ)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.range_search import TILE, Loss, search
from qgraph.passes.weighted import FLOOR, keep_better

if TYPE_CHECKING:
    from torch import Tensor

SHRINK = tuple(1.0 - 0.025 * step for step in range(21))
"""Widths that are tried, in units of the range from the least to the largest weight."""
SHIFTS = (-1, 0, 1)
"""Of the zero point: each moves both ends of the range by a step."""
ROWS = 128
"""Rows of a tile, at least: products with H are then bound by arithmetic, not by memory."""
LARGEST = 1 << 21
"""Weights of a tile, at most: 8 MB of float32 in each of a handful of arrays."""


def fit(rows: Tensor, hessian: Tensor, fmt: Format, dtype: ir.DataType) -> QuantizedWeight:
    """Minimise e H_g eᵀ in each group, H_g being the group's block of the Hessian.

    Never worse than rounding to nearest, in any group. The weight error would be another judge's:
    it gives up the largest weights, which often meet the largest inputs.

    Args:
        rows: float32 `[N, K]`; worked on in tiles of rows.
        hessian: float32 `[K, K]`, the mean of x xᵀ or a multiple of it.
        fmt: a format whose groups have ranges of their own.
        dtype: in which the scales are stored.

    Raises:
        ScaleOverflow: a scale does not fit `dtype`.
    """
    k = rows.shape[1]
    blocks = _blocks(hessian, fmt.group or k)
    # What no calibration input reached counts a little: other data may reach it.
    damping = FLOOR * blocks.diagonal(dim1=1, dim2=2).mean(1)
    tile = min(max(TILE, ROWS * k), LARGEST)
    loss, exact = _loss(blocks, damping), _loss(blocks, 0 * damping)
    found = search(rows, fmt, dtype, loss, shrink=SHRINK, shifts=SHIFTS, tile=tile)
    keep_better(rows, found, exact, fmt, dtype, tile)
    return found


def _blocks(hessian: Tensor, width: int) -> Tensor:
    """The blocks of H on its diagonal, `[nb, width, width]`, the last one filled up with zeros."""
    k = len(hessian)
    if width == k:
        return hessian[None]
    blocks = hessian.new_zeros(-(-k // width), width, width)
    for at in range(0, k, width):
        part = hessian[at : at + width, at : at + width]
        blocks[at // width, : len(part), : len(part)] = part
    return blocks


def _loss(blocks: Tensor, damping: Tensor) -> Loss:
    """E (H_g + damping I) eᵀ of the errors of each group."""
    import torch

    def loss(error: Tensor) -> Tensor:
        turned = error.transpose(0, 1)  # [nb, n, G]
        product = torch.bmm(turned, blocks).addcmul_(turned, damping[:, None, None])
        return product.mul_(turned).sum(-1).T

    return loss
