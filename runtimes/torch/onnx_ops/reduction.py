"""Sums, means, extremes and the like over axes; running sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qgraph.runtimes.torch.onnx_ops.host import (
    Value,
    axes_of,
    first,
    ints,
    is_tensor,
    number,
    wrapped,
)
from qgraph.runtimes.torch.table import op

_Reduce = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    return torch.mean(x.double(), axes, keepdim=keep).to(x.dtype)


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _largest(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.amax(_padded(x, axes, largest=True), axes, keepdim=keep)


def _smallest(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.amin(_padded(x, axes, largest=False), axes, keepdim=keep)


def _padded(x: Tensor, axes: tuple[int, ...], *, largest: bool) -> Tensor:
    """X, with one element of the other end of its range where a reduced axis is empty."""
    for axis in axes:
        if x.shape[axis] == 0:
            shape = [1 if a == axis else n for a, n in enumerate(x.shape)]
            x = x.new_full(shape, _end(x.dtype, lowest=largest))
    return x


def _end(dtype: torch.dtype, *, lowest: bool) -> float:
    if dtype == torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    limits = torch.iinfo(dtype)
    return float(limits.min if lowest else limits.max)


_REDUCTIONS: dict[str, _Reduce] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _largest,
    "ReduceMin": _smallest,
    "ReduceL1": lambda x, axes, keep: _sum(torch.abs(x), axes, keep),
    "ReduceL2": lambda x, axes, keep: _root(_sum(x * x, axes, keep)),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}


def _root(x: Tensor) -> Tensor:
    return torch.sqrt(x.double()).to(x.dtype) if not x.is_floating_point() else torch.sqrt(x)


def _reduced(
    compute: _Reduce, x: Tensor, axes: Value, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    chosen = () if axes is None else axes_of(axes, x.ndim)
    if not chosen:
        if noop_with_empty_axes:
            # The operator's own function still applies, to each element alone.
            return compute(x.unsqueeze(-1), (-1,), False)
        chosen = tuple(range(x.ndim))
    return compute(x, chosen, bool(keepdims)) if chosen else compute(x[None], (0,), False)


def _enter(name: str, compute: _Reduce) -> None:
    @op(name, hosts=(1,))
    def function(
        x: Tensor, axes: Value = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        return _reduced(compute, x, axes, keepdims, noop_with_empty_axes)

    function.__name__ = function.__qualname__ = name.lower()


for _name, _function in _REDUCTIONS.items():
    _enter(_name, _function)


@op("ReduceProd", host=True, hosts=(1,))
def reduce_prod(
    x: Value,
    axes: Value = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
    types: tuple[int, ...] = (),
) -> Value:
    """The product over axes; of a shape, the number of its elements."""
    if is_tensor(x):
        return _reduced(_product, x, axes, keepdims, noop_with_empty_axes)
    if noop_with_empty_axes and (axes is None or not ints(axes)):
        return x
    result = 1
    for item in ints(x):
        result = wrapped(result * item, first(types))
    return (result,) if keepdims and isinstance(x, tuple) else result


@op("ArgMax")
def argmax(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The index of the first (or last) largest element along an axis."""
    return _extreme(torch.argmax, x, axis, bool(keepdims), bool(select_last_index))


@op("ArgMin")
def argmin(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The index of the first (or last) smallest element along an axis."""
    return _extreme(torch.argmin, x, axis, bool(keepdims), bool(select_last_index))


def _extreme(
    function: Callable[..., Tensor], x: Tensor, axis: int, keep: bool, last: bool
) -> Tensor:
    if last:
        return x.shape[axis] - 1 - function(torch.flip(x, (axis,)), axis, keepdim=keep)
    return function(x, axis, keepdim=keep)


@op("CumSum", hosts=(1,))
def cumsum(x: Tensor, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running sums along an axis; `exclusive` leaves each element out of its own."""
    where = number(axis)
    turned = torch.flip(x, (where,)) if reverse else x
    sums = torch.cumsum(turned, where, dtype=x.dtype)
    sums = _before(sums, where, 0) if exclusive else sums
    return torch.flip(sums, (where,)) if reverse else sums


def _before(running: Tensor, axis: int, start: int) -> Tensor:
    """Each result without its own element: that of the place before, `start` at the first.

    To take the element out again would not give back what it rounded away.
    """
    sizes = list(running.shape)
    sizes[axis] = 1
    moved = torch.cat([running.new_full(sizes, start), running], axis)
    return moved.narrow(axis, 0, running.shape[axis])


@op("CumProd", hosts=(1,))
def cumprod(x: Tensor, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running products along an axis; `exclusive` leaves each element out of its own."""
    where = number(axis)
    turned = torch.flip(x, (where,)) if reverse else x
    products = torch.cumprod(turned, where, dtype=x.dtype)
    products = _before(products, where, 1) if exclusive else products
    return torch.flip(products, (where,)) if reverse else products
