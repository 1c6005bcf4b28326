"""Choosing group ranges by trying many: scales and integer zero points, under any loss.

Every range is tried as it is stored, the format's own among them: the result is never worse than
rounding to nearest under the loss that is asked for. As in formats, a scale is stored as a normal
number or 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight

if TYPE_CHECKING:
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
        fmt: an integer format in groups along K.
        dtype: in which the scales are stored.
        loss: of a group.
        shrink: factors of the width of the range from the least to the largest weight.
        shifts: of the zero point from the one that keeps the middle of the range in the middle
            of the codes; symmetric formats have none.
        tile: weights at once.

    Raises:
        OverflowError: a scale does not fit `dtype`; `args[1]` is (row, group).
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
    except OverflowError as error:
        (row, group), why = error.args[1], error.args[0].rpartition(": ")[2]
        at = (start + row, group)
        raise OverflowError(f"row {at[0]}, group {group}: {why}", at) from None


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
    n, k = rows.shape
    nb = own.scales.shape[1]
    width = fmt.group or k
    weights = torch.nn.functional.pad(rows, (0, nb * width - k)).view(n, nb, width)
    least, most = fmt.code_range
    scale = torch.from_numpy(own.scales.astype(np.float32)).to(rows.device)
    zero = torch.zeros_like(scale)
    if own.zeros is not None:
        zero = torch.from_numpy(own.zeros.astype(np.float32)).to(rows.device)
    best = _Best(weights, scale, zero, least, most, loss)
    low, high = weights.amin(-1).clamp(max=0), weights.amax(-1).clamp(min=0)
    for factor in shrink:
        wide = (high - low) / (most - least) if own.zeros is not None else scale
        tried = as_stored(wide * factor, dtype)
        if own.zeros is None:
            best.consider(tried, zero)
            continue
        middle = torch.round((least + most) / 2 - (low + high) / 2 / tried.clamp(min=1e-30))
        for shift in shifts:
            best.consider(tried, (middle + shift).clamp(least, most))
    codes = best.codes().reshape(n, -1)[:, :k].cpu().numpy()
    # A group that is all zero keeps the scale that the format gives it.
    flat = ((low == 0) & (high == 0)).cpu().numpy()
    scales = np.where(flat, own.scales, best.scale.cpu().numpy().astype(own.scales.dtype))
    if own.zeros is None:
        return QuantizedWeight(codes.astype(own.codes.dtype), scales, None)
    zeros = best.zero.cpu().numpy().astype(own.zeros.dtype)
    return QuantizedWeight(codes.astype(own.codes.dtype), scales, zeros)


def as_stored(scale: Tensor, dtype: ir.DataType) -> Tensor:
    """Scales as they read back from `dtype`, those below its normal numbers raised to the least."""
    import torch

    kinds = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
    kind = kinds.get(dtype, torch.float32)
    raised = torch.copysign(scale.abs().clamp(min=torch.finfo(kind).tiny), scale)
    return torch.where(scale == 0, scale, raised).to(kind).float()


class _Best:
    """The best range of each group so far."""

    def __init__(
        self, weights: Tensor, scale: Tensor, zero: Tensor, least: int, most: int, loss: Loss
    ) -> None:
        self.weights, self.scale, self.zero = weights, scale, zero
        self.least, self.most, self._measure = least, most, loss
        self.loss = loss(self._error(scale, zero))

    def _error(self, scale: Tensor, zero: Tensor) -> Tensor:
        import torch

        safe = torch.where(scale == 0, torch.ones_like(scale), scale)[..., None]
        shift = zero[..., None]
        codes = (self.weights / safe).round_().add_(shift).clamp_(self.least, self.most)
        return codes.sub_(shift).mul_(scale[..., None]).sub_(self.weights).neg_()

    def consider(self, scale: Tensor, zero: Tensor) -> None:
        """Take a range where it is better."""
        import torch

        loss = self._measure(self._error(scale, zero))
        better = (loss < self.loss) & (scale != 0) & scale.isfinite()
        self.loss = torch.where(better, loss, self.loss)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def codes(self) -> Tensor:
        """The codes nearest to the weights, `[n, nb, G]`."""
        import torch

        safe = torch.where(self.scale == 0, torch.ones_like(self.scale), self.scale)[..., None]
        codes = (self.weights / safe).round_().add_(self.zero[..., None])
        return codes.clamp_(self.least, self.most)
