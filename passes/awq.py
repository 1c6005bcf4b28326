"""AWQ (Lin et al., 2023) on torch: factors for the input channels that quantize with least error.

Channels with large activations are multiplied by more before rounding, and their inputs divided:
what is rounded finer is what the outputs depend on most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

GRID = 20
"""How many exponents alpha are tried: 0, 0.05, …, 0.95."""
ROWS = 256
"""How many rows, of all linears together, the exponents are compared on."""
RANGE = 1e4
"""Factors lie between 1/RANGE and RANGE, so that their inverses fit float16 as well."""

Quantize: TypeAlias = "Callable[[int, Tensor], Tensor]"


def search(
    weights: Sequence[Tensor],
    hessian: Tensor,
    magnitude: Tensor,
    ties: Tensor,
    quantize: Quantize,
) -> tuple[Tensor, dict[str, float]]:
    """The factors s = m^alpha, of the alpha that leaves the least error in the linears' outputs.

    The error is Σ tr(E H Eᵀ) over the linears, E = W − Q(W diag(s)) diag(s)⁻¹. It costs one
    product with H per exponent, on at most `ROWS` rows, evenly spaced, the same ones each time;
    where that is not all of them, the best is compared with no scaling on all rows. So the result
    is never worse than no scaling, which alpha = 0 stands for.

    Args:
        weights: `[N_i, K]` of each linear that reads the activation, float32.
        hessian: `[K, K]`, Σ x xᵀ up to a factor.
        magnitude: `[K]`, mean |x|; only ratios matter. Channels at 0 get the factor 1.
        ties: int64 `[K]`: channels of one number get one factor, from the mean of their
            magnitudes.
        quantize: for the i-th linear and some of its rows `[n, K]`, scaled: what they are after
            rounding, `[n, K]`. An OverflowError says that no scale holds them: the exponent is
            passed over.

    Returns:
        s float32 `[K]`, of geometric mean 1 over the channels that are not 0, and figures: `alpha`,
        `loss`, `unscaled` (that of no scaling), `rows`, the number that both are sums over, and
        `overflowed`, how many exponents were passed over.
    """
    import torch

    shared = _mean_of_tied(magnitude.double(), ties)
    total = sum(len(part) for part in weights)
    chosen = [some(part, total) for part in weights]
    ones = torch.ones_like(hessian[0])
    unscaled = _loss(chosen, hessian, ones, quantize)
    best, alpha, least = ones, 0.0, unscaled
    rows, overflowed = sum(len(part) for part in chosen), 0
    for step in range(1, GRID):
        scale = power(shared, step / GRID).to(hessian.dtype)
        found = _loss(chosen, hessian, scale, quantize)
        overflowed += found == math.inf
        if found < least:
            best, alpha, least = scale, step / GRID, found
    if alpha and rows < total:
        rows = total
        unscaled = _loss(weights, hessian, ones, quantize)
        least = _loss(weights, hessian, best, quantize)
        overflowed += least == math.inf
        if not least < unscaled:
            best, alpha, least = ones, 0.0, unscaled
    figures = {"alpha": alpha, "loss": least, "unscaled": unscaled, "rows": rows}
    return best, {**figures, "overflowed": overflowed}


def _mean_of_tied(magnitude: Tensor, ties: Tensor) -> Tensor:
    import torch

    _, group, count = torch.unique(ties, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=magnitude.dtype, device=magnitude.device)
    return (sums.index_add_(0, group, magnitude) / count)[group]


def some(rows: Tensor, total: int) -> Tensor:
    """This linear's part of `ROWS` rows, evenly spaced."""
    import torch

    count = max(1, len(rows) * ROWS // total)
    if total <= ROWS or count >= len(rows):
        return rows
    at = torch.arange(count, device=rows.device) * len(rows) // count
    return rows[at]


def power(magnitude: Tensor, alpha: float) -> Tensor:
    """m^alpha over its geometric mean, within `RANGE`; 1 where m is 0."""
    import torch

    known = magnitude > 0
    if not bool(known.any()):
        return torch.ones_like(magnitude)
    logs = torch.where(known, magnitude, torch.ones_like(magnitude)).log() * alpha
    logs = logs - logs[known].mean()
    scale = logs.exp().clamp(1 / RANGE, RANGE)
    return torch.where(known, scale, torch.ones_like(scale))


def _loss(weights: Sequence[Tensor], hessian: Tensor, scale: Tensor, quantize: Quantize) -> float:
    """The loss with factors; infinite where a format cannot hold the rows times them."""
    import torch

    found = []
    for i, rows in enumerate(weights):
        try:
            found.append(rows - quantize(i, rows * scale) / scale)
        except OverflowError:
            return math.inf
    errors = torch.cat(found)
    return float(((errors @ hessian) * errors).sum(dtype=torch.float64))
