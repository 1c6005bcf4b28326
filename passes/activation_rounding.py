"""Activations rounded as the kernels of quantized products round them, on rows kept for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from qgraph.activation_kinds import FP8, FP8_TOKEN, INT8, INT8_AUTO, INT8_ROW, INT8_STATIC, TOP_CODE
from qgraph.formats.base import Array
from qgraph.formats.small_floats import E4M3_MAX

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Some of the rows that linears read, to see on them what rounding activations costs.

    rows: float32 `[T, K]`.
    weights: `[T]`, how much each counts; None where all count the same.
    """

    rows: Tensor
    weights: Tensor | None = None

    @classmethod
    def of(cls, rows: Array, weights: Array | None) -> Inputs:
        """Rows `[T, K]` and weights `[T]` of a sample."""
        import torch

        from qgraph.passes.moments import best_device

        found = [
            None if array is None else torch.from_numpy(array).to(best_device())
            for array in (rows, weights)
        ]
        assert found[0] is not None
        return cls(found[0], found[1])

    def error(
        self,
        activations: str,
        outliers: int = 0,
        scale: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor | None:
        """D, float32 `[T, K]`: ‖D ŵ‖² is what rounding the inputs costs an output w · x.

        In the unit of `Moments.hessian`, 2/Σω Σ ω x xᵀ: each row is the rounded x less x, times
        the root of 2 ω/Σω. None where activations stay floats.

        Args:
            activations: how they are rounded, a key of `ROUNDINGS`, or `float`.
            outliers: columns that stay in float, those of the largest |x|, here in the sample.
            scale: `[K]`; it is x / scale that is rounded.
            order: int64 `[K]`, of the channels after that.
        """
        import torch

        if activations not in ROUNDINGS or not len(self.rows):
            return None
        x = self.rows if scale is None else self.rows / scale
        if order is not None:
            x = x[:, order]
        weights = torch.ones(len(x), device=x.device) if self.weights is None else self.weights
        share = (2 * weights / weights.sum()).sqrt()
        if outliers:
            x = x.index_fill(1, x.abs().amax(0).topk(outliers).indices, 0)
        return (ROUNDINGS[activations](x) - x) * share[:, None]


def _int8(x: Tensor) -> Tensor:
    """256 steps from the least to the largest value, zero among them (DynamicQuantizeLinear)."""
    import torch

    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    step = (high - low) / TOP_CODE
    if not float(step) > 0:
        return x
    zero = torch.round(-low / step)
    return (torch.clamp(torch.round(x / step) + zero, 0, TOP_CODE) - zero) * step


def _int8_rows(x: Tensor) -> Tensor:
    """254 steps on each row, of its largest magnitude by 127."""
    import torch

    step = x.abs().amax(1, keepdim=True) / 127
    return torch.round(x / _divisor(step)) * step


def _fp8(x: Tensor) -> Tensor:
    """E4M3 of all values by one scale."""
    return _e4m3(x, x.abs().max() / E4M3_MAX)


def _fp8_rows(x: Tensor) -> Tensor:
    """E4M3 of each row by its own scale."""
    return _e4m3(x, x.abs().amax(1, keepdim=True) / E4M3_MAX)


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    import torch

    codes = (x / _divisor(scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.to(x.dtype) * scale


def _divisor(scale: Tensor) -> Tensor:
    import torch

    return torch.where(scale > 0, scale, torch.ones_like(scale))


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    INT8: _int8,
    INT8_ROW: _int8_rows,
    INT8_STATIC: _int8,
    INT8_AUTO: _int8_rows,
    FP8: _fp8,
    FP8_TOKEN: _fp8_rows,
}
"""How activations `[T, K]` are rounded, by `Recipe.activations`; static ranges are those of the
rows at hand."""
