"""SmoothQuant (Xiao et al., 2023) on torch: factors that move outliers from inputs to weights.

A channel that is large in the activation takes the steps of rounding from all others. Divided by
a factor, and its weights multiplied by it, it costs both sides less than it cost the one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from qgraph.passes import awq

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 20
"""The exponents alpha that are tried: 0, 0.05, …, 1; and half a step beside the best one."""

Rounding: TypeAlias = "Callable[[int, Tensor], Tensor | None]"


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The linears that read one activation, and what their quantized products differ by.

    weights: `[N_i, K]` of each, float32.
    hessian: `[K, K]`, 2/Σω Σ ω x xᵀ.
    quantize: as in `awq.search`: for the i-th linear and some of its rows, times the factors,
        what they are after rounding.
    rounding: for the i-th linear and factors s `[K]`: the error D `[T, K]` of its inputs x / s,
        as `Inputs.error` gives it; None where they stay floats.
    """

    weights: Sequence[Tensor]
    hessian: Tensor
    quantize: awq.Quantize
    rounding: Rounding

    def losses(self, scale: Tensor) -> list[float]:
        """Of each linear tr(E H Eᵀ) + ‖D Ŵᵀ‖², E = W − Ŵ diag(s)⁻¹, Ŵ = Q(W diag(s)).

        Infinite where a format cannot hold the rows times the factors. The two errors are taken
        for independent: the product of both is left out.
        """
        import torch

        found = []
        for i, rows in enumerate(self.weights):
            try:
                quantized = self.quantize(i, rows * scale)
            except OverflowError:
                return [math.inf] * len(self.weights)
            error = rows - quantized / scale
            loss = ((error @ self.hessian) * error).sum(dtype=torch.float64)
            rounding = self.rounding(i, scale)
            if rounding is not None:
                loss = loss + (rounding @ quantized.T).square().sum(dtype=torch.float64)
            found.append(float(loss))
        return found


def search(stage: Stage, absmax: Tensor, ties: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The factors s = max|x|^a / max|w|^(1 - a) of the exponent a that costs the outputs least.

    The error is that of the quantized products, inputs and weights both rounded. Only factors
    with which no linear is worse than without count; so no factors at all are always a candidate,
    and the result is never worse. As in `awq.search` the exponents are compared on a part of the
    rows, and the best one with no factors on all.

    Args:
        stage: the linears.
        absmax: `[K]`, the largest |x| of each channel. Channels at 0, there or in the weights,
            get the factor 1.
        ties: int64 `[K]`: channels of one number get one factor, from the largest of them.

    Returns:
        s float32 `[K]`, of geometric mean 1, and figures: `alpha` (NaN for no factors), `loss`,
        `unscaled` (that of no factors), and `overflowed`, how many exponents a format could not
        hold.
    """
    import torch

    largest = torch.stack([rows.abs().amax(0) for rows in stage.weights]).amax(0)
    inputs, weights = _of_tied(absmax, ties), _of_tied(largest, ties)
    total = sum(len(rows) for rows in stage.weights)
    part = dataclasses.replace(stage, weights=[awq.some(rows, total) for rows in stage.weights])
    ones = torch.ones_like(absmax)
    plain = part.losses(ones)
    best, alpha, least = ones, math.nan, sum(plain)
    overflowed = 0
    tried = [step / STEPS for step in range(STEPS + 1)]
    for at, exponent in enumerate(tried):
        scale = factors(inputs, weights, exponent).to(ones.dtype)
        found = part.losses(scale)
        overflowed += math.isinf(found[0])
        if sum(found) < least and _none_worse(found, plain):
            best, alpha, least = scale, exponent, sum(found)
        if at == STEPS and not math.isnan(alpha):  # and between the best one and its neighbours
            near = (alpha - 0.5 / STEPS, alpha + 0.5 / STEPS)
            tried += [each for each in near if 0 < each < 1]
    if not math.isnan(alpha) and sum(map(len, part.weights)) < total:
        plain, found = stage.losses(ones), stage.losses(best)
        overflowed += math.isinf(found[0])
        least = sum(found)
        if not (least < sum(plain) and _none_worse(found, plain)):
            best, alpha, least = ones, math.nan, sum(plain)
    figures = {"alpha": alpha, "loss": least, "unscaled": sum(plain)}
    return best, {**figures, "overflowed": overflowed}


def factors(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha), of geometric mean 1, float64 `[K]`; 1 where one is 0."""
    import torch

    known = (inputs > 0) & (weights > 0)
    one = torch.ones_like(inputs)
    ratio = torch.where(known, inputs, one) ** alpha / torch.where(known, weights, one) ** (
        1 - alpha
    )
    return awq.power(torch.where(known, ratio, torch.zeros_like(ratio)), 1.0)


def _none_worse(found: Sequence[float], plain: Sequence[float]) -> bool:
    return all(one <= other for one, other in zip(found, plain, strict=True))


def _of_tied(magnitude: Tensor, ties: Tensor) -> Tensor:
    """The largest magnitude among tied channels, float64 `[K]`."""
    import torch

    _, group = np.unique(ties.cpu().numpy(), return_inverse=True)
    found = np.zeros(group.max(initial=0) + 1)
    np.maximum.at(found, group, magnitude.double().cpu().numpy())
    return torch.from_numpy(found[group]).to(magnitude.device)
