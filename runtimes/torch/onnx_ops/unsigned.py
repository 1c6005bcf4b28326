"""What torch lacks for uint64: order, quotients and remainders of the bits in int64."""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST = -(2**63)


def _ordered(x: Tensor) -> Tensor:
    """int64 in the order of the unsigned numbers: their sign bit turned."""
    return x.to(torch.int64) ^ _LOWEST


def less(a: Tensor, b: Tensor) -> Tensor:
    """A < b."""
    return _ordered(a) < _ordered(b)


def less_or_equal(a: Tensor, b: Tensor) -> Tensor:
    """A <= b."""
    return _ordered(a) <= _ordered(b)


def greater(a: Tensor, b: Tensor) -> Tensor:
    """A > b."""
    return less(b, a)


def greater_or_equal(a: Tensor, b: Tensor) -> Tensor:
    """A >= b."""
    return less_or_equal(b, a)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger one."""
    return (torch.maximum(_ordered(a), _ordered(b)) ^ _LOWEST).to(torch.uint64)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller one."""
    return (torch.minimum(_ordered(a), _ordered(b)) ^ _LOWEST).to(torch.uint64)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """A / b, rounded down: twice half of a by b, and one more where the rest holds b again."""
    x, y = a.to(torch.int64), b.to(torch.int64)
    huge = y < 0
    by = torch.where(huge, 1, y)
    twice = torch.div((x >> 1) & (2**63 - 1), by, rounding_mode="floor") * 2
    exact = twice + greater_or_equal(x - twice * by, by).to(torch.int64)
    return torch.where(huge, greater_or_equal(x, y).to(torch.int64), exact).to(torch.uint64)


def remainder(a: Tensor, b: Tensor) -> Tensor:
    """What `quotient` leaves."""
    whole = quotient(a, b).to(torch.int64)
    return (a.to(torch.int64) - whole * b.to(torch.int64)).to(torch.uint64)
