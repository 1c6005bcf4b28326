"""Updates of some elements."""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.gathering import from_front
from qgraph.runtimes.torch.table import op

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("ScatterElements", "Scatter")
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """X with each update at its index along an axis, or reduced with what is there."""
    where = from_front(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, where, updates)
    return x.scatter_reduce(axis, where, updates, _name(reduction))


@op("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """X with each update slice at its index vector, or reduced with what is there."""
    wide = indices.to(torch.int64)
    places = tuple(wide[..., i] for i in range(indices.shape[-1]))
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    depth = indices.shape[-1]
    flat = torch.zeros_like(wide[..., 0])
    for axis, place in enumerate(places):
        front, size = from_front(place, x.shape[axis]), x.shape[axis]
        # A place beyond its axis would be one in another row.
        outside = (front < 0) | (front >= size) | (flat < 0)
        flat = torch.where(outside, -1, flat * size + front)
    rows = x.flatten(0, depth - 1)
    flat = flat.reshape([-1] + [1] * (rows.ndim - 1))
    new = updates.reshape([-1, *rows.shape[1:]])
    rows = rows.scatter_reduce(0, flat.expand_as(new), new, _name(reduction))
    return rows.reshape(x.shape)


def _name(reduction: str) -> str:
    if reduction not in _REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: wanted one of none, {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[reduction]


@op("TensorScatter")
def tensor_scatter(
    past: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    """A cache with an update written along `axis` from `write_indices[b]` on."""
    axis = axis + past.ndim if axis < 0 else axis
    steps = torch.arange(update.shape[axis], device=past.device)
    starts = steps.new_zeros(past.shape[0]) if write_indices is None else write_indices
    where = starts[:, None] + steps
    if mode == "circular":
        where = where % past.shape[axis]
    shape = [past.shape[0] if a == 0 else -1 if a == axis else 1 for a in range(past.ndim)]
    return past.scatter(axis, where.reshape(shape).expand_as(update), update)
