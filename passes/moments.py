"""What a linear's inputs were on the calibration data, as the second moments that solvers need."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DAMPING_STEPS = 6
"""How often the damping is made ten times larger before a matrix counts as singular."""
_SYRK_FROM = 1024
"""From this width on numpy, which computes one triangle of XᵀX only, is faster than torch."""


@dataclasses.dataclass(eq=False)
class Moments:
    """Sums over the tokens of one activation, each token with its weight; all float32.

    hessian: 2/Σw Σ w x xᵀ `[K, K]`, x from the model quantized so far, in parallel mode
        from the float one.
    cross: 2/Σw Σ w (x_f − x) xᵀ `[K, K]`, x_f from the float model; None in parallel mode.
    magnitude, absmax: mean and largest |x| `[K]`.
    tokens: T.
    """

    hessian: Tensor
    cross: Tensor | None
    magnitude: Tensor
    absmax: Tensor
    tokens: int
    _factors: dict[tuple[bool, float], Factor | None] = dataclasses.field(default_factory=dict)

    @property
    def dead(self) -> int:
        """How many channels are zero on all tokens."""
        return int((self.absmax == 0).sum())

    def transformed(self, scale: Tensor | None, order: Tensor | None) -> Moments:
        """The moments of x / scale, its channels in `order`; without `cross`."""
        hessian, magnitude, absmax = self.hessian, self.magnitude, self.absmax
        if scale is not None:
            hessian = hessian / scale[:, None] / scale
            magnitude, absmax = magnitude / scale, absmax / scale
        if order is not None:
            hessian, magnitude = hessian[order][:, order], magnitude[order]
            absmax = absmax[order]
        return Moments(hessian, None, magnitude, absmax, self.tokens)

    def factor(self, sort: bool, damping: float) -> Factor | None:
        """See `factor`; computed once for all linears that read the activation."""
        key = (sort, damping)
        if key not in self._factors:
            self._factors[key] = factor(self.hessian, sort, damping)
        return self._factors[key]


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A damped Hessian's inverse, H⁻¹ = Uᵀ U, its columns in the order in which GPTQ takes them.

    order: int64 `[K]`. inverse: U, float64, upper triangular.
    damping: what it took, relative to the mean of the diagonal.
    """

    order: Tensor
    inverse: Tensor
    damping: float

    @property
    def upper(self) -> Tensor:
        """U in float32."""
        return self.inverse.float()

    def solve(self, right: Tensor) -> Tensor:
        """R H⁻¹ for rows R `[n, K]`, columns in their original order; float32."""
        import torch

        found = right[:, self.order].double() @ self.inverse.T @ self.inverse
        result = torch.empty_like(right)
        result[:, self.order] = found.to(right.dtype)
        return result


def factor(hessian: Tensor, sort: bool, damping: float) -> Factor | None:
    """Factor H + λ·mean(diag H)·I in float64; λ grows tenfold until it factors.

    Args:
        hessian: `[K, K]`, symmetric.
        sort: take the columns by falling diagonal, the most active first.
        damping: the first λ to try.

    Returns None where it never does: the matrix is not finite, or far from semidefinite.
    """
    import torch

    order = torch.arange(len(hessian), device=hessian.device)
    if sort:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    # Backwards, H = R Rᵀ has an upper R, and U is its inverse: no second Cholesky is needed.
    back = order.flip(0)
    double = hessian[back][:, back].double()
    mean = double.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    eye = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    for step in range(DAMPING_STEPS):
        used = damping * 10.0**step
        lower, failed = torch.linalg.cholesky_ex(double + eye * (used * mean))
        if failed:
            continue
        inverse = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
        if torch.isfinite(inverse).all():
            return Factor(order, inverse, used)
    return None


def best_device() -> torch.device:
    """Where solvers compute: the GPU where torch has one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Accumulator:
    """Sums moments batch by batch: memory is two `[K, K]` matrices, whatever the data is."""

    def __init__(self, k: int, crossed: bool) -> None:
        import torch

        self.device = best_device()
        self.hessian = torch.zeros(k, k, device=self.device)
        self.cross = torch.zeros(k, k, device=self.device) if crossed else None
        self.total = torch.zeros(k, device=self.device)
        self.absmax = torch.zeros(k, device=self.device)
        self.tokens = 0
        self.weight = 0.0

    def add(
        self,
        rows: NDArray[np.float32],
        floats: NDArray[np.float32] | None,
        weights: Tensor | None = None,
    ) -> None:
        """Inputs `[T, K]` of the model quantized so far, and of the float model; weights `[T]`."""
        import torch

        x = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        even = x if weights is None else x * weights.sqrt()[:, None]
        if x.shape[1] >= _SYRK_FROM and self.device.type == "cpu":
            array = even.numpy()
            self.hessian += torch.from_numpy(array.T @ array)
        else:
            self.hessian.addmm_(even.T, even)
        if self.cross is not None and floats is not None:
            ahead = torch.from_numpy(np.ascontiguousarray(floats)).to(self.device).sub(x)
            right = x if weights is None else x * weights[:, None]
            self.cross.addmm_(ahead.T, right)
        size = x.abs()
        self.total += size.sum(0)
        if len(x):
            self.absmax = torch.maximum(self.absmax, size.amax(0))
        self.tokens += len(x)
        self.weight += len(x) if weights is None else float(weights.sum())

    def moments(self) -> Moments:
        """What was summed, divided by the sum of the weights."""
        share = 2 / self.weight if self.weight else 0.0
        cross = None if self.cross is None else self.cross.mul_(share)
        magnitude = self.total / max(1, self.tokens)
        return Moments(self.hessian.mul_(share), cross, magnitude, self.absmax, self.tokens)

    @property
    def finite(self) -> bool:
        """Whether every input so far was finite (and its square, in float32)."""
        return bool(self.absmax.isfinite().all()) and bool(self.hessian.isfinite().all())
