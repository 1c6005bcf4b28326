"""Pooling over spatial axes."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from qgraph.runtimes.torch.onnx_ops.convolution import pad_spatial, same_pads
from qgraph.runtimes.torch.onnx_ops.host import Number, Value, ints
from qgraph.runtimes.torch.table import op

_Ints = tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class _Axis:
    """The windows along one spatial axis.

    size: of the axis; before, behind: what the node pads; lacking: more at the end, so that the
    last window (ceil_mode) is whole. places: `[count, width]`, counted in the axis unpadded.
    """

    size: Number
    before: Number
    behind: Number
    lacking: Number
    places: Tensor

    def inside(self, padded: bool) -> Tensor:
        """How many places of each window lie in the axis, or in the axis and its padding."""
        low = -self.before if padded else 0
        high = self.size + self.behind if padded else self.size
        return ((self.places >= low) & (self.places < high)).sum(-1)


def _axes(
    x: Tensor,
    kernel: tuple[int, ...],
    auto_pad: str,
    ceil_mode: int,
    dilations: _Ints,
    pads: _Ints,
    strides: _Ints,
) -> list[_Axis]:
    rank = len(kernel)
    steps, gaps = strides or (1,) * rank, dilations or (1,) * rank
    before, behind = same_pads(tuple(x.shape[2:]), kernel, steps, gaps, auto_pad, pads)
    found = []
    for i, size in enumerate(x.shape[2:]):
        reach = (kernel[i] - 1) * gaps[i] + 1
        room = size + before[i] + behind[i] - reach
        count = (-(-room // steps[i]) if ceil_mode else room // steps[i]) + 1
        if ceil_mode and (count - 1) * steps[i] >= size + before[i]:
            count -= 1  # a window starts within the axis or the padding before it
        lacking = torch.sym_max(0, (count - 1) * steps[i] - room)
        starts = torch.arange(count, device=x.device) * steps[i] - before[i]
        places = starts[:, None] + torch.arange(kernel[i], device=x.device) * gaps[i]
        found.append(_Axis(size, before[i], behind[i], lacking, places))
    return found


def _windows(x: Tensor, axes: list[_Axis], fill: float) -> Tensor:
    """`[N, C, *counts, elements of a window]`."""
    rank = len(axes)
    x = pad_spatial(x, [a.before for a in axes], [a.behind + a.lacking for a in axes], fill)
    for i, axis in enumerate(axes):
        x = x.index_select(2 + 2 * i, (axis.places + axis.before).reshape(-1))
        x = x.unflatten(2 + 2 * i, axis.places.shape)
    order = [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)]
    return x.permute(order).flatten(2 + rank)


@op("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: _Ints = None,
    pads: _Ints = None,
    storage_order: int = 0,
    strides: _Ints = None,
    outputs: int,
) -> tuple[Tensor, ...]:
    """The largest element of each window, and its place in the flat tensor."""
    axes = _axes(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    work = x if x.is_floating_point() else x.to(torch.float32)
    values, which = _windows(work, axes, float("-inf")).max(-1)
    values = values.to(x.dtype)
    return (values,) if outputs == 1 else (values, _flat_places(x, axes, which, storage_order))


def _flat_places(x: Tensor, axes: list[_Axis], which: Tensor, column_major: int) -> Tensor:
    """The places in the flat x of the elements `which` of the windows."""
    rank = len(axes)
    flat = torch.zeros([1] * (2 * rank), dtype=torch.int64, device=x.device)
    stride: Number = 1
    order = range(rank) if column_major else reversed(range(rank))
    for i in order:
        shape: list[Number] = [1] * (2 * rank)
        shape[i], shape[rank + i] = axes[i].places.shape
        flat = flat + (axes[i].places * stride).reshape(shape)
        stride = stride * axes[i].size
    table = flat.flatten(rank).expand(*which.shape, -1)
    index = table.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    pictures = torch.arange(x.shape[0] * x.shape[1], device=x.device) * stride
    return index + pictures.reshape(x.shape[0], x.shape[1], *([1] * rank))


@op("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: _Ints = None,
    pads: _Ints = None,
    strides: _Ints = None,
) -> Tensor:
    """The mean of each window; padding counts where `count_include_pad` says so."""
    axes = _axes(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    sums = _windows(x, axes, 0.0).sum(-1)
    for i, axis in enumerate(axes):
        shape = [1] * (len(axes) - 1 - i)
        sums = sums / axis.inside(bool(count_include_pad)).reshape(-1, *shape)
    return sums


@op("LpPool")
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    p: int = 2,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: _Ints = None,
    pads: _Ints = None,
    strides: _Ints = None,
) -> Tensor:
    """The p-norm of each window."""
    axes = _axes(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return _windows(torch.abs(x) ** p, axes, 0.0).sum(-1) ** (1 / p)


@op("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean over all spatial axes."""
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@op("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The largest element over all spatial axes."""
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


@op("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """The p-norm over all spatial axes."""
    return (torch.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdim=True) ** (1 / p)


@op("MaxUnpool", hosts=(2,))
def max_unpool(
    x: Tensor,
    indices: Tensor,
    output_shape: Value = None,
    *,
    kernel_shape: tuple[int, ...],
    pads: _Ints = None,
    strides: _Ints = None,
) -> Tensor:
    """Each element at the place it was taken from, zeros elsewhere."""
    rank = len(kernel_shape)
    steps, margins = strides or (1,) * rank, pads or (0,) * (2 * rank)
    own = [
        (n - 1) * steps[i] - margins[i] - margins[rank + i] + kernel_shape[i]
        for i, n in enumerate(x.shape[2:])
    ]
    shape = [*x.shape[:2], *own]
    whole = x.new_zeros(math.prod(shape)).scatter(0, indices.reshape(-1), x.reshape(-1))
    whole = whole.reshape(shape)
    if output_shape is None:
        return whole
    target = ints(output_shape)[2:]
    return pad_spatial(whole, [0] * rank, [t - n for t, n in zip(target, own, strict=True)])
