"""Parts of tensors: slices, and elements picked by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import (
    DTYPES,
    Number,
    Value,
    axes_of,
    first,
    ints,
    is_tensor,
    number,
    to_tensor,
)
from qgraph.runtimes.torch.table import op

_ENDS = (2**31 - 1, 2**63 - 1)
"""As bounds these are no places but the end on the way, as ONNX Runtime reads them."""


@op("Slice", host=True, hosts=(1, 2, 3, 4))
def slice_(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    """Every step-th element from start to before end along each axis, all bounds clamped."""
    begins, stops = ints(starts), ints(ends)
    strides = (1,) * len(begins) if steps is None else ints(steps)
    if not is_tensor(x):
        items = ints(x)
        for begin, stop, stride in zip(begins, stops, strides, strict=True):
            items = tuple(items[i] for i in _places(len(items), begin, stop, stride))
        return items
    where = range(len(begins)) if axes is None else axes_of(axes, x.ndim)
    for axis, begin, stop, stride in zip(where, begins, stops, strides, strict=True):
        x = _sliced(x, axis, begin, stop, stride)
    return x


def _places(length: int, begin: Number, stop: Number, stride: int) -> range:
    """The places that a slice takes of an axis: bounds are clamped to it, as ONNX says.

    Python would take none where a negative stride begins before the first element.
    """
    if stride == 0:
        raise InputError("Slice with a step of 0: wanted another one")
    low, high = (-1, length - 1) if stride < 0 else (0, length)
    if length == 0:
        return range(0)
    begin = min(max(begin + length if begin < 0 else begin, max(low, 0)), high)
    if stop in _ENDS:
        stop = low if stride < 0 else high
    else:
        stop = min(max(stop + length if stop < 0 else stop, low), length)
    return range(begin, stop, stride)


def _sliced(x: Tensor, axis: int, begin: Number, stop: Number, stride: int) -> Tensor:
    if 0 < stride < _ENDS[0]:
        whole: tuple[Any, ...] = (slice(None),) * axis
        return x[(*whole, slice(_near(begin), _near(stop), stride))]
    picked = list(_places(x.shape[axis], begin, stop, stride))
    return x.index_select(axis, torch.tensor(picked, dtype=torch.int64, device=x.device))


def _near(bound: Number) -> Number:
    """A bound that torch takes without a warning, beyond any axis if this one is."""
    if isinstance(bound, int) and not -_ENDS[0] <= bound <= _ENDS[0]:
        return _ENDS[0] if bound > 0 else -_ENDS[0]
    return bound


@op("Gather", host=True)
def gather(x: Value, indices: Value, *, axis: int = 0, types: tuple[int, ...] = ()) -> Value:
    """The slices of x at the indices along an axis; negative ones count from the end."""
    if not is_tensor(x) and not is_tensor(indices):
        items = ints(x)
        return tuple(items[i] for i in indices) if isinstance(indices, tuple) else items[indices]
    if not is_tensor(x):
        x = to_tensor(x, indices, DTYPES.get(first(types)))
    axis = axis + x.ndim if axis < 0 else axis
    if not is_tensor(indices) and not isinstance(indices, tuple):
        return x.select(axis, indices)
    indices = to_tensor(indices, x)
    if axis == 0 and x.ndim == 2:
        # The one gather that has a kernel of its own: rows of a table.
        return torch.nn.functional.embedding(from_front(indices, x.shape[0]), x)
    flat = x.index_select(axis, from_front(indices, x.shape[axis]).reshape(-1))
    return flat.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def from_front(indices: Tensor, length: Number) -> Tensor:
    """Indices counted from the front, int64."""
    wide = indices.to(torch.int64)
    return torch.where(wide < 0, wide + length, wide)


@op("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """The element at each index along an axis."""
    return x.gather(axis, from_front(indices, x.shape[axis]))


@op("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """The slices of x at the index vectors in the last axis of `indices`."""
    depth = indices.shape[-1]
    wide = indices.to(torch.int64)
    picked = [wide[..., i] for i in range(depth)]
    lead: list[Tensor] = []
    for axis in range(batch_dims):
        rows = torch.arange(x.shape[axis], device=x.device)
        lead.append(rows.reshape([-1 if a == axis else 1 for a in range(picked[0].ndim)]))
    return x[(*lead, *picked)]


@op("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """The slices along an axis (elements of the flat tensor) where the condition holds."""
    kept = condition.nonzero().reshape(-1)
    return x.reshape(-1)[kept] if axis is None else x.index_select(axis, kept)


@op("ReverseSequence")
def reverse_sequence(
    x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    """The first `lengths[b]` steps of each batch element in reverse order."""
    steps = torch.arange(x.shape[time_axis], device=x.device)[:, None]
    order = torch.where(steps < lengths, lengths - 1 - steps, steps)
    order = order if time_axis < batch_axis else order.transpose(0, 1)
    shape = [x.shape[a] if a in (batch_axis, time_axis) else 1 for a in range(x.ndim)]
    return x.gather(time_axis, order.reshape(shape).expand_as(x))


@op("Trilu", hosts=(1,))
def trilu(x: Tensor, k: Value = None, *, upper: int = 1) -> Tensor:
    """The upper or lower triangle of each matrix, from the k-th diagonal on; zeros elsewhere."""
    diagonal = 0 if k is None else number(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@op("OneHot", hosts=(1,))
def one_hot(indices: Tensor, depth: Value, values: Tensor, *, axis: int = -1) -> Tensor:
    """values[1] at each index along a new axis of size `depth`, values[0] elsewhere."""
    count = int(number(depth))
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    wide = indices.to(torch.int64)
    inside = (wide >= -count) & (wide < count)
    column = torch.arange(count, device=indices.device)
    column = column.reshape([-1] + [1] * (indices.ndim - axis))
    found = (torch.remainder(wide, count).unsqueeze(axis) == column) & inside.unsqueeze(axis)
    return torch.where(found, values[1], values[0])
