"""GPTQ (Frantar et al., 2022) on torch: codes that are least off on the layer's own inputs.

The loss of codes Q for weights W is tr((W − Ŵ) H (W − Ŵ)ᵀ), H = Σ x xᵀ over the inputs x.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from qgraph.formats.base import Array, QuantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DAMPING_STEPS = 6
"""How often the damping is made ten times larger before rounding is left as it is."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where codes may lie: ŵ = (code − zero) · scale, `low` ≤ code ≤ `high`.

    scales, zeros: float32 `[N, nb]`; zeros are 0 where the format is symmetric.
    """

    scales: Tensor
    zeros: Tensor
    low: int
    high: int
    group: int

    def columns(self, k: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of every column, `[N, k]` each."""
        import torch

        at = torch.arange(k, device=self.scales.device) // (self.group or k)
        return self.scales[:, at], self.zeros[:, at]

    def dequantize(self, codes: Tensor) -> Tensor:
        """Ŵ `[N, K]`."""
        scales, zeros = self.columns(codes.shape[1])
        return (codes - zeros) * scales


def grid_of(rounded: QuantizedWeight, bits: int, group: int, device: torch.device) -> Grid:
    """The grid that rounding to nearest chose."""
    import torch

    scales = torch.from_numpy(rounded.scales.astype(np.float32)).to(device)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if rounded.zeros is None:
        half = 1 << (bits - 1)
        return Grid(scales, torch.zeros_like(scales), -half, half - 1, group)
    zeros = torch.from_numpy(rounded.zeros.astype(np.float32)).to(device)
    return Grid(scales, zeros, 0, (1 << bits) - 1, group)


def loss(weights: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ) of each row, `[N]`."""
    error = weights - quantized
    return ((error @ hessian) * error).sum(1)


def factor(hessian: Tensor, damping: float) -> tuple[Tensor, float] | None:
    """The upper Cholesky factor U of the damped inverse, H⁻¹ = Uᵀ U, and the damping used.

    In float64; the damping grows tenfold until the matrix factors. None where it never does.
    """
    import torch

    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    for step in range(DAMPING_STEPS):
        used = damping * 10.0**step
        damped = hessian.double() + torch.eye(
            len(hessian), dtype=torch.float64, device=hessian.device
        ) * (used * mean.double())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and torch.isfinite(upper).all():
            return upper.float(), used
    return None


def solve(
    weights: Tensor, hessian: Tensor, grid: Grid, order: Tensor, upper: Tensor, block: int = 128
) -> Tensor:
    """Codes `[N, K]`, column by column, the error of each carried to those that follow.

    Args:
        weights: `[N, K]`. hessian: `[K, K]`.
        order: the columns in the order in which they are rounded.
        upper: `factor` of the Hessian permuted by `order`.
        block: columns whose updates to the rest are done at once.
    """
    import torch

    n, k = weights.shape
    scales, zeros = (part[:, order] for part in grid.columns(k))
    rest = weights[:, order].clone()
    codes = torch.empty_like(rest)
    for start in range(0, k, block):
        stop = min(start + block, k)
        part, errors = rest[:, start:stop].clone(), torch.empty(n, stop - start, device=rest.device)
        inner = upper[start:stop, start:stop]
        for at in range(stop - start):
            column, scale, zero = part[:, at], scales[:, start + at], zeros[:, start + at]
            code = (torch.round(column / scale) + zero).clamp_(grid.low, grid.high)
            codes[:, start + at] = code
            error = (column - (code - zero) * scale) / inner[at, at]
            part[:, at + 1 :].addr_(error, inner[at, at + 1 :], alpha=-1)
            errors[:, at] = error
        rest[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    result = torch.empty_like(codes)
    result[:, order] = codes
    return result


def refine(
    weights: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, sweeps: int, block: int = 128
) -> Tensor:
    """Coordinate descent on the codes: each column takes the code that is best given the others.

    One sweep costs what GPTQ costs and never raises the loss.
    """
    import torch

    k = weights.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True)
    scales, zeros = (part[:, order] for part in grid.columns(k))
    turned = hessian[order][:, order].contiguous()
    curve = turned.diagonal().clamp(min=torch.finfo(torch.float32).tiny)
    codes, target = codes[:, order].clone(), weights[:, order]
    for _ in range(sweeps):
        gradient = (target - (codes - zeros) * scales) @ turned
        for start in range(0, k, block):
            stop = min(start + block, k)
            part, inner = gradient[:, start:stop].clone(), turned[start:stop, start:stop]
            changes = torch.empty_like(part)
            for at in range(stop - start):
                scale, zero = scales[:, start + at], zeros[:, start + at]
                before = (codes[:, start + at] - zero) * scale
                best = before + part[:, at] / curve[start + at]
                code = (torch.round(best / scale) + zero).clamp_(grid.low, grid.high)
                change = (code - zero) * scale - before
                codes[:, start + at] = code
                changes[:, at] = change
                part.addr_(change, inner[at], alpha=-1)
            gradient[:, stop:].addmm_(changes, turned[start:stop, stop:], alpha=-1)
    result = torch.empty_like(codes)
    result[:, order] = codes
    return result


def refit(weights: Tensor, hessian: Tensor, grid: Grid, codes: Tensor) -> Grid:
    """The scales that are best for the codes: least squares per row, `nb` unknowns each."""
    import torch

    n, k = codes.shape
    nb = grid.scales.shape[1]
    width = nb * (grid.group or k)
    pad = width - k
    steps = torch.nn.functional.pad(codes - grid.columns(k)[1], (0, pad)).view(n, nb, -1)
    padded = torch.nn.functional.pad(hessian, (0, pad, 0, pad)).view(nb, -1, width)
    wanted = torch.nn.functional.pad(weights @ hessian, (0, pad)).view(n, nb, -1)
    right = (wanted * steps).sum(-1)
    left = torch.stack(
        [((steps[:, g] @ padded[g]).view(n, nb, -1) * steps).sum(-1) for g in range(nb)], dim=1
    )
    ridge = 1e-4 * left.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30
    left = left + torch.diag_embed(ridge.expand(n, nb))
    right = right + ridge * grid.scales
    scales = torch.linalg.solve(left.double(), right.double().unsqueeze(-1)).squeeze(-1).float()
    keep = torch.isfinite(scales) & (scales * grid.scales > 0)
    return dataclasses.replace(grid, scales=torch.where(keep, scales, grid.scales))


def to_weight(codes: Tensor, grid: Grid, scales: Array, signed: bool) -> QuantizedWeight:
    """Arrays as formats pack them; `scales` as they are stored."""
    kind = np.int8 if signed else np.uint8
    zeros = None if signed else grid.zeros.cpu().numpy().astype(np.uint8)
    return QuantizedWeight(codes.cpu().numpy().astype(kind), scales, zeros)
