"""Importance-weighted rounding: ranges of least weight error, weighted by mean square inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array, Format, QuantizedWeight
from qgraph.formats.grouping import smallest_normal
from qgraph.passes.codebook import codebook, has_float_zeros
from qgraph.passes.range_search import TILE, Loss, search, tiles

if TYPE_CHECKING:
    from torch import Tensor

SHRINK = tuple(1.05 - 0.025 * step for step in range(17))
"""Widths that are tried, in units of the range from the least to the largest weight."""
REFITS = 2
"""How often the scale is fitted to the codes, and the weights rounded to it again."""
FLOOR = 1e-4
"""The least that a column counts, in units of its group's mean: columns whose inputs were zero
on the calibration data are not given up, since other data may use them."""


def fit(rows: Tensor, curvature: Tensor, fmt: Format, dtype: ir.DataType) -> QuantizedWeight:
    """Minimise Σ_k h_k (w_k − ŵ_k)² in each group, over scales and zero points.

    Never worse than rounding to nearest, in any group. Rows are worked on in tiles.

    Args:
        rows: float32 `[N, K]`.
        curvature: h, float32 `[K]`, not negative: the mean squares of the inputs.
        fmt: a format whose groups have ranges of their own.
        dtype: in which the scales are stored.

    Raises:
        ScaleOverflow: a scale does not fit `dtype`.
    """
    import torch

    k = rows.shape[1]
    width = fmt.group or k
    given = torch.nn.functional.pad(curvature.clamp(min=0), (0, -k % width)).view(-1, width)
    # The mean of a group is 1, so that no square under- or overflows; a group without is even.
    mean = given.mean(1, keepdim=True)
    exact = torch.where(mean > 0, given / torch.where(mean > 0, mean, 1), 1)
    counted = exact.clamp(min=FLOOR)

    def loss(error: Tensor) -> Tensor:
        return error.square_().mul_(counted).sum(-1)

    def exact_loss(error: Tensor) -> Tensor:
        return error.square_().mul_(exact).sum(-1)

    found = search(rows, fmt, dtype, loss, shrink=SHRINK)
    for tile in tiles(rows, TILE):
        weights, fitted = rows[tile], found.rows(tile)
        for _ in range(REFITS if fmt.free_scales else 0):
            fitted = _refitted(weights, fitted, counted, fmt)
            best = found.rows(tile)
            gains = _losses(weights, fitted, loss, fmt) < _losses(weights, best, loss, fmt)
            _take(found, tile, fitted, gains, fmt)
    keep_better(rows, found, exact_loss, fmt, dtype)
    return found


def keep_better(
    rows: Tensor,
    found: QuantizedWeight,
    loss: Loss,
    fmt: Format,
    dtype: ir.DataType,
    tile: int = TILE,
) -> None:
    """Go back to rounding to nearest, in place, in groups where that has less `loss`.

    Args:
        rows: float32 `[N, K]`. loss: see `range_search.Loss`. tile: weights at once.
    """
    for part in tiles(rows, tile):
        own, mine = fmt.quantize(rows[part].cpu().numpy(), dtype), found.rows(part)
        less = _losses(rows[part], own, loss, fmt) < _losses(rows[part], mine, loss, fmt)
        _take(found, part, own, less, fmt)


def _refitted(
    rows: Tensor, found: QuantizedWeight, counted: Tensor, fmt: Format
) -> QuantizedWeight:
    """The weights rounded on the scales that are best for the codes they have, zeros kept.

    d/ds Σ h (w − q s)² = 0 gives s = Σ h q w / Σ h q², q being level less zero point.
    """
    import torch

    n, k = rows.shape
    width = fmt.group or k
    zeros = torch.zeros(found.scales.shape, device=rows.device)[..., None]
    if found.zeros is not None:
        zeros = _shown(found.zeros, rows)[..., None]
    weights = _grouped(rows, width)
    book = codebook(fmt, rows.device, float_zeros=has_float_zeros(found.zeros))
    levels = fmt.levels[found.codes - np.int32(fmt.code_range[0])]
    steps = _grouped(_shown(levels, rows), width) - zeros
    turned = steps * counted
    right, left = (turned * weights).sum(-1), (turned * steps).sum(-1)
    fitted = (right / torch.where(left > 0, left, 1)).cpu().numpy()
    with np.errstate(over="ignore"):
        fitted = fitted.astype(found.scales.dtype)
    # Formats store normal numbers; and a zero point supposes the sign that the scale has.
    usable = np.isfinite(fitted) & (np.abs(fitted) >= smallest_normal(fitted.dtype))
    scales = np.where(usable & (np.sign(fitted) == np.sign(found.scales)), fitted, found.scales)
    shown = _shown(scales, rows)[..., None]
    codes = book.stored(book.nearest(weights / torch.where(shown == 0, 1, shown), zeros))
    flat = codes.reshape(n, -1)[:, :k].astype(found.codes.dtype)
    return QuantizedWeight(flat, scales, found.zeros)


def _losses(rows: Tensor, found: QuantizedWeight, loss: Loss, fmt: Format) -> Array:
    """The loss of every group, `[n, nb]`."""
    width = fmt.group or rows.shape[1]
    errors = rows - _shown(fmt.dequantize(found), rows)
    found_losses: Array = loss(_grouped(errors, width)).cpu().numpy()
    return found_losses


def _grouped(rows: Tensor, width: int) -> Tensor:
    """`[n, K]` as `[n, nb, width]`, filled up with zeros."""
    import torch

    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % width)).view(len(rows), -1, width)


def _shown(array: Array, like: Tensor) -> Tensor:
    """An array as float32, where `like` is."""
    import torch

    return torch.from_numpy(array.astype(np.float32)).to(like.device)


def _take(
    weight: QuantizedWeight, rows: slice, other: QuantizedWeight, groups: Array, fmt: Format
) -> None:
    """Replace some `groups`, bool `[n, nb]`, of some rows by another's, in place."""
    k = weight.codes.shape[1]
    columns = np.repeat(groups, fmt.group or k, axis=1)[:, :k]
    np.copyto(weight.codes[rows], other.codes, where=columns)
    np.copyto(weight.scales[rows], other.scales, where=groups)
    if weight.zeros is not None and other.zeros is not None:
        np.copyto(weight.zeros[rows], other.zeros, where=groups)
    for name, array in weight.more.items():  # of what belongs to rows, all have the same
        if array.shape == weight.scales.shape:
            np.copyto(array[rows], other.more[name], where=groups)
