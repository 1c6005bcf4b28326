"""Choosing group ranges by trying many: scales and zero points, under any loss.

Every range is tried as it is stored, the format's own among them: the result is never worse than
rounding to nearest under the loss that is asked for. As in formats, a scale is stored as a normal
number or 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.formats.grouping import ScaleOverflow
from qgraph.passes.codebook import Codebook, codebook, has_float_zeros

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Loss: TypeAlias = "Callable[[Tensor], Tensor]"
"""Errors w − ŵ float32 `[n, nb, G]` (which it may overwrite) → one loss per group, `[n, nb]`."""

TILE = 1 << 17
"""Weights that are worked on at once: what several arrays of them take stays in the cache."""


def search(
    rows: Tensor,
    fmt: Format,
    dtype: ir.DataType,
    loss: Loss,
    *,
    shrink: Sequence[float],
    shifts: Sequence[int] = (-1, 0, 1),
    tile: int = TILE,
) -> QuantizedWeight:
    """The rows rounded to nearest on the ranges of least loss.

    Args:
        rows: float32 `[N, K]`.
        fmt: a format whose groups have ranges of their own; where only some scales can be stored,
            its `moves` are tried, and neither `shrink` nor `shifts`.
        dtype: in which the scales are stored.
        loss: of a group.
        shrink: factors of the width of the range from the least to the largest weight; of the
            format's own scale where it has no zero points.
        shifts: of the zero point from the one that keeps the middle of the range in the middle
            of the codes.
        tile: weights at once.

    Raises:
        ScaleOverflow: a scale does not fit `dtype`.
    """
    parts = []
    for part in tiles(rows, tile):
        with rows_from(part.start):
            parts.append(_search(rows[part], fmt, dtype, loss, shrink, shifts))
    return QuantizedWeight.joined(parts)


def tiles(rows: Tensor, size: int) -> Iterator[slice]:
    """Slices of rows that hold at most `size` weights each, or one row."""
    step = max(1, size // max(1, rows.shape[1]))
    return (slice(at, at + step) for at in range(0, len(rows), step))


@contextlib.contextmanager
def rows_from(start: int) -> Iterator[None]:
    """Let what does not fit be named by its row in the weight, for rows that begin at `start`."""
    try:
        yield
    except ScaleOverflow as error:
        raise error.below(start) from None


def _search(
    rows: Tensor,
    fmt: Format,
    dtype: ir.DataType,
    loss: Loss,
    shrink: Sequence[float],
    shifts: Sequence[int],
) -> QuantizedWeight:
    import torch

    own = fmt.quantize(rows.cpu().numpy(), dtype)
    if not fmt.free_scales:
        return _moved(rows, fmt, own, loss)
    n, k = rows.shape
    floats = has_float_zeros(own.zeros)
    weights = _grouped(rows, own.scales.shape[1], fmt.group or k, floats)
    scale = torch.from_numpy(own.scales.astype(np.float32)).to(rows.device)
    zero = torch.zeros_like(scale)
    if own.zeros is not None:
        zero = torch.from_numpy(own.zeros.astype(np.float32)).to(rows.device)
    book = codebook(fmt, rows.device, float_zeros=floats)
    best = _Best(weights, scale, zero, book, loss)
    low, high = weights.amin(-1), weights.amax(-1)
    flat = ((low == 0) & (high == 0)).cpu().numpy()
    if not floats:  # the range holds zero
        low, high = low.clamp(max=0), high.clamp(min=0)
    for factor in shrink:
        if own.zeros is None:
            best.consider(as_stored(scale * factor, dtype), zero)
            continue
        for tried, moved in _asymmetric(fmt, dtype, (low, high), factor, shifts, floats):
            best.consider(tried, moved)
    codes = book.stored(best.codes()).reshape(n, -1)[:, :k].astype(own.codes.dtype)
    # A group that is all zero keeps the scale that the format gives it.
    scales = np.where(flat, own.scales, best.scale.cpu().numpy().astype(own.scales.dtype))
    if own.zeros is None:
        return QuantizedWeight(codes, scales, None)
    zeros = best.zero.cpu().numpy().astype(own.zeros.dtype)
    return QuantizedWeight(codes, scales, zeros)


def _moved(rows: Tensor, fmt: Format, own: QuantizedWeight, loss: Loss) -> QuantizedWeight:
    """The rows on the scales of least loss among those near the format's own, `own`."""
    import torch

    n, k = rows.shape
    weights = _grouped(rows, own.scales.shape[1], fmt.group or k, False)
    scale = torch.from_numpy(own.scales.astype(np.float32)).to(rows.device)
    zero, book = torch.zeros_like(scale), codebook(fmt, rows.device)
    best, steps = _Best(weights, scale, zero, book, loss), np.zeros(own.scales.shape, np.int16)
    for step in fmt.moves:
        tried = fmt.moved(own, np.full_like(steps, step)).scales.astype(np.float32)
        better = best.consider(torch.from_numpy(tried).to(rows.device), zero)
        steps[better.cpu().numpy()] = step
    codes = book.stored(best.codes()).reshape(n, -1)[:, :k].astype(own.codes.dtype)
    return dataclasses.replace(fmt.moved(own, steps), codes=codes)


def _grouped(rows: Tensor, nb: int, width: int, repeat: bool) -> Tensor:
    """`[n, K]` as `[n, nb, width]`, filled up with zeros, or with the last weight of each row."""
    import torch

    fill = nb * width - rows.shape[1]
    if repeat and fill:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, fill)], dim=1)
    else:
        rows = torch.nn.functional.pad(rows, (0, fill))
    return rows.view(len(rows), nb, width)


def _asymmetric(
    fmt: Format,
    dtype: ir.DataType,
    ends: tuple[Tensor, Tensor],
    factor: float,
    shifts: Sequence[int],
    floats: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points for `factor` times the range between `ends`, for each shift."""
    import torch

    (low, high), (least, most) = ends, fmt.code_range
    tried = as_stored((high - low) / (most - least) * factor, dtype)
    middle = (least + most) / 2 - (low + high) / 2 / tried.clamp(min=1e-30)
    if not floats:
        middle = torch.round(middle)
    for shift in shifts:
        moved = middle + shift
        yield tried, _zero_as_stored(moved, fmt, dtype) if floats else moved.clamp(least, most)


def _zero_as_stored(zero: Tensor, fmt: Format, dtype: ir.DataType) -> Tensor:
    """Float zero points as they read back from `dtype`, as far out as the format has them."""
    far = fmt.reach - float(np.abs(fmt.levels).max())
    return zero.clamp(-far, far).to(_kind(dtype)).float()


def as_stored(scale: Tensor, dtype: ir.DataType) -> Tensor:
    """Scales as they read back from `dtype`, those below its normal numbers raised to the least."""
    import torch

    kind = _kind(dtype)
    raised = torch.copysign(scale.abs().clamp(min=torch.finfo(kind).tiny), scale)
    return torch.where(scale == 0, scale, raised).to(kind).float()


def _kind(dtype: ir.DataType) -> torch.dtype:
    import torch

    kinds = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
    return kinds.get(dtype, torch.float32)


class _Best:
    """The best range of each group so far."""

    def __init__(
        self, weights: Tensor, scale: Tensor, zero: Tensor, book: Codebook, loss: Loss
    ) -> None:
        self.weights, self.scale, self.zero = weights, scale, zero
        self.book, self._measure = book, loss
        self.loss = loss(self._error(scale, zero))

    def _codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """The codes nearest to the weights, `[n, nb, G]`."""
        import torch

        safe = torch.where(scale == 0, torch.ones_like(scale), scale)[..., None]
        return self.book.nearest(self.weights / safe, zero[..., None])

    def _error(self, scale: Tensor, zero: Tensor) -> Tensor:
        steps = self.book.steps(self._codes(scale, zero), zero[..., None])
        return steps.mul_(scale[..., None]).sub_(self.weights).neg_()

    def consider(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Take a range where it is better: in the groups that are returned, bool `[n, nb]`."""
        import torch

        loss = self._measure(self._error(scale, zero))
        better = (loss < self.loss) & (scale != 0) & scale.isfinite()
        self.loss = torch.where(better, loss, self.loss)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        return better

    def codes(self) -> Tensor:
        """The codes nearest to the weights on the ranges that are best, `[n, nb, G]`."""
        return self._codes(self.scale, self.zero)
