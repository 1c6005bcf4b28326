"""Products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.runtimes.torch.table import op


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """A · b in the dtype of b, which a weight is."""
    if a.dtype != b.dtype:
        a = a.to(b.dtype)
    if not a.is_floating_point() and a.device.type != "cpu":
        return torch.matmul(a.double(), b.double()).to(a.dtype)
    return torch.matmul(a, b)


@op("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, broadcast over the axes before the last two."""
    return multiply(a, b)


@op("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Alpha a · b + beta c."""
    a = a.t() if transA else a
    if transB and alpha == 1.0 and (c is None or (beta == 1.0 and c.ndim == 1)):
        bias = None if c is None or c.shape[0] != b.shape[0] else c.to(b.dtype)
        product = torch.nn.functional.linear(a.to(b.dtype), b, bias)
        return product if c is None or bias is not None else product + c
    product = multiply(a, b.t() if transB else b)
    product = product if alpha == 1.0 else _scaled(product, alpha)
    if c is None:
        return product
    return product + (c if beta == 1.0 else _scaled(c, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor if x.is_floating_point() else x * int(factor)


@op("Einsum")
def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Sums of products by Einstein's convention."""
    return torch.einsum(equation.replace(" ", ""), *operands)


@op("MatMulInteger")
def matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """Int32 products of 8-bit matrices, their zero points subtracted first."""
    # Exact: sums of up to 2^37 products of 16 bits fit the 53 of a double.
    return torch.matmul(_centered(a, a_zero, -1), _centered(b, b_zero, -2)).to(torch.int32)


def _centered(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    offset = zero.to(torch.float64)
    return wide - (offset.unsqueeze(axis) if offset.ndim and offset.ndim < x.ndim else offset)
