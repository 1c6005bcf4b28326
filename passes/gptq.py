"""GPTQ (Frantar et al., 2022) on torch: codes that are least off on the layer's own inputs.

The loss of codes Q for weights W is tr((W − Ŵ) H (W − Ŵ)ᵀ), H = Σ x xᵀ over the inputs x.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.codebook import Codebook, codebook, has_float_zeros
from qgraph.passes.range_search import as_stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor


NEAR = 16
"""Columns that are updated after every single one; groups start at multiples of it."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: for many small operations, waiting for others costs more than it gains.

    On a machine that also does other work it costs hundreds of times more.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where weights may lie: ŵ = step(code, zero) · scale.

    scales, zeros: float32 `[N, nb]`; zeros are 0 where the format has none.
    """

    scales: Tensor
    zeros: Tensor
    book: Codebook
    group: int

    def columns(self, k: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of every column, `[N, k]` each."""
        import torch

        at = torch.arange(k, device=self.scales.device) // (self.group or k)
        return self.scales[:, at], self.zeros[:, at]

    def dequantize(self, codes: Tensor) -> Tensor:
        """Ŵ `[N, K]`."""
        scales, zeros = self.columns(codes.shape[1])
        return self.book.steps(codes, zeros) * scales


def grid_of(rounded: QuantizedWeight, fmt: Format, device: torch.device) -> Grid:
    """The grid on which a weight of format `fmt` was rounded.

    Groups of zeros get a scale: one that is as good as 0 where theirs must stay as it is.
    """
    import torch

    least = 1.0 if fmt.free_scales else torch.finfo(torch.float32).tiny
    scales = torch.from_numpy(rounded.scales.astype(np.float32)).to(device)
    scales = torch.where(scales == 0, torch.full_like(scales, least), scales)
    zeros = torch.zeros_like(scales)
    if rounded.zeros is not None:
        zeros = torch.from_numpy(rounded.zeros.astype(np.float32)).to(device)
    book = codebook(fmt, device, float_zeros=has_float_zeros(rounded.zeros))
    return Grid(scales, zeros, book, fmt.group)


def loss(weights: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ) of each row, `[N]`."""
    error = weights - quantized
    return ((error @ hessian) * error).sum(1)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The format's own way to find the range of a group, for ranges that are found on the way."""

    fmt: Format
    dtype: ir.DataType

    def grid(self, columns: Tensor) -> Grid:
        """The grid of one group, `[N, group]` or the part of it that there is."""
        rows = columns.cpu().numpy()
        return grid_of(self.fmt.quantize(rows, self.dtype), self.fmt, columns.device)


def solve(
    weights: Tensor,
    grid: Grid,
    order: Tensor,
    upper: Tensor,
    rounding: Rounding | None = None,
    block: int = 128,
) -> tuple[Tensor, Grid]:
    """Codes `[N, K]`, column by column, the error of each carried to those that follow.

    Args:
        weights: `[N, K]`.
        grid: where codes may lie; replaced group by group where `rounding` is given.
        order: the columns in the order in which they are rounded; as they are for `rounding`.
        upper: U `[K, K]` in that order, H⁻¹ = Uᵀ U.
        block: columns whose updates to the rest are done at once.
    """
    import torch

    k = weights.shape[1]
    group = grid.group or k
    if rounding is not None:
        block = max(block, group)  # a group's range is read when all updates to it are done
        grid = dataclasses.replace(grid, scales=grid.scales.clone(), zeros=grid.zeros.clone())
    # Columns are worked on as rows: contiguous, and several times faster.
    scales, zeros = (part[:, order].T.contiguous() for part in grid.columns(k))
    rest = weights[:, order].T.contiguous()
    book, codes = grid.book, torch.empty_like(rest, dtype=grid.book.dtype)
    errors = torch.empty_like(rest)
    for start in range(0, k, block):
        stop = min(start + block, k)
        # Updates go to the next few columns at once, to the rest of the block, then to the rest:
        # a column that is far away is touched once in many.
        with one_thread():
            for near in range(start, stop, NEAR):
                end = min(near + NEAR, stop)
                for at in range(near, end):
                    if rounding is not None and at % group == 0:
                        last = min(at + group, stop)
                        found = rounding.grid(rest[at:last].T)
                        place = at // group
                        grid.scales[:, place] = found.scales[:, 0]
                        grid.zeros[:, place] = found.zeros[:, 0]
                        scales[at:last], zeros[at:last] = found.scales[:, 0], found.zeros[:, 0]
                    column, scale, zero = rest[at], scales[at], zeros[at]
                    code = book.nearest(column / scale, zero)
                    codes[at] = code
                    step = book.steps(code, zero)
                    errors[at] = step.mul_(scale).sub_(column).div_(-upper[at, at])
                    rest[at + 1 : end].addr_(upper[at, at + 1 : end], errors[at], alpha=-1)
                rest[end:stop].addmm_(upper[near:end, end:stop].T, errors[near:end], alpha=-1)
        rest[stop:].addmm_(upper[start:stop, stop:].T, errors[start:stop], alpha=-1)
    result = torch.empty_like(weights, dtype=codes.dtype)
    result[:, order] = codes.T
    return result, grid


def refine(
    weights: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, sweeps: int, block: int = 128
) -> Tensor:
    """Coordinate descent on the codes: each column takes the code that is best given the others.

    One sweep costs what GPTQ costs and never raises the loss.
    """
    import torch

    k = weights.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True)
    # Columns are worked on as rows, as in `solve`.
    scales, zeros = (part[:, order].T.contiguous() for part in grid.columns(k))
    turned = hessian[order][:, order].contiguous()
    curve = turned.diagonal().clamp(min=torch.finfo(torch.float32).tiny)
    book, codes = grid.book, codes[:, order].T.contiguous()
    target = weights[:, order].T
    for _ in range(sweeps):
        gradient = turned @ (target - book.steps(codes, zeros) * scales)
        changes = torch.empty_like(gradient)
        for start in range(0, k, block):
            stop = min(start + block, k)
            with one_thread():
                for at in range(start, stop):
                    scale, zero = scales[at], zeros[at]
                    before = book.steps(codes[at], zero).mul_(scale)
                    best = before + gradient[at] / curve[at]
                    code = book.nearest(best / scale, zero)
                    codes[at] = code
                    changes[at] = book.steps(code, zero).mul_(scale).sub_(before)
                    gradient[at:stop].addr_(turned[at, at:stop], changes[at], alpha=-1)
            gradient[stop:].addmm_(turned[stop:, start:stop], changes[start:stop], alpha=-1)
    result = torch.empty_like(weights, dtype=codes.dtype)
    result[:, order] = codes.T
    return result


def refit(weights: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, dtype: ir.DataType) -> Grid:
    """The scales that are best for the codes: least squares per row, `nb` unknowns each.

    They are as `dtype` stores them; one that it cannot hold, or of another sign, stays as it was.
    """
    import torch

    n, k = codes.shape
    nb = grid.scales.shape[1]
    width = nb * (grid.group or k)
    pad = width - k
    steps = grid.book.steps(codes, grid.columns(k)[1])
    steps = torch.nn.functional.pad(steps, (0, pad)).view(n, nb, -1)
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
    scales = as_stored(scales, dtype)
    keep = torch.isfinite(scales) & (scales * grid.scales > 0)
    return dataclasses.replace(grid, scales=torch.where(keep, scales, grid.scales))


def to_weight(codes: Tensor, grid: Grid, start: QuantizedWeight, fmt: Format) -> QuantizedWeight:
    """Arrays as formats pack them; scales that are not free are those of `start`."""
    kept, scales, zeros = grid.book.stored(codes), start.scales, start.zeros
    if fmt.free_scales:
        scales = grid.scales.cpu().numpy().astype(scales.dtype)
    if zeros is not None:
        zeros = grid.zeros.cpu().numpy().astype(zeros.dtype)
    return QuantizedWeight(kept.astype(start.codes.dtype), scales, zeros, start.more)
