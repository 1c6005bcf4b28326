"""Shapes of tensors, and tensors made from shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import (
    DTYPES,
    Number,
    Value,
    axes_of,
    device_of,
    first,
    ints,
    is_tensor,
    number,
    to_tensor,
)
from qgraph.runtimes.torch.table import op


@op("Shape", host=True)
def shape(x: Value, *, start: int = 0, end: int | None = None) -> Value:
    """The sizes of axes `start` to `end`."""
    if is_tensor(x):
        return tuple(x.shape[start:end])
    sizes = (len(x),) if isinstance(x, (tuple, list)) else ()
    return sizes[start:end]


@op("Size", host=True)
def size(x: Value) -> Value:
    """The number of elements."""
    if is_tensor(x):
        return math.prod(x.shape)
    return len(x) if isinstance(x, tuple) else 1


@op("Identity", host=True)
def identity(x: Value) -> Value:
    """X."""
    return x


@op("Reshape", host=True, hosts=(1,))
def reshape(
    x: Value,
    shape: Value,
    *,
    allowzero: int = 0,
    like: Tensor | None = None,
    types: tuple[int, ...] = (),
) -> Value:
    """X with another shape: 0 keeps a size, -1 takes what is left."""
    wanted = ints(shape)
    if not is_tensor(x):
        if wanted in ((-1,), (len(ints(x)),)):
            return ints(x)
        if wanted == ():
            return number(x)
        x = to_tensor(x, like, DTYPES.get(first(types)))
    if not allowzero:
        wanted = tuple(
            x.shape[axis] if isinstance(item, int) and item == 0 else item
            for axis, item in enumerate(wanted)
        )
    return x.reshape(wanted)


@op("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """A matrix: the axes before `axis`, and the others."""
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Squeeze", host=True, hosts=(1,))
def squeeze(x: Value, axes: Value = None) -> Value:
    """X without axes of size one."""
    if not is_tensor(x):
        return number(x)
    if axes is None:
        return x.squeeze()
    return x.squeeze(axes_of(axes, x.ndim))


@op("Unsqueeze", host=True, hosts=(1,))
def unsqueeze(
    x: Value, axes: Value = None, *, like: Tensor | None = None, types: tuple[int, ...] = ()
) -> Value:
    """X with new axes of size one, counted in the result."""
    axes = ints(axes)
    if not is_tensor(x):
        if not isinstance(x, tuple) and len(axes) == 1:
            return (x,)
        if not axes:
            return x
        x = to_tensor(x, like, DTYPES.get(first(types)))
    for axis in sorted(axes_of(axes, x.ndim + len(axes))):
        x = x.unsqueeze(axis)
    return x


@op("Expand", host=True, hosts=(1,))
def expand(
    x: Value, shape: Value, *, like: Tensor | None = None, types: tuple[int, ...] = ()
) -> Value:
    """X broadcast with a shape.

    Raises:
        InputError: sizes that differ, neither of them 1.
    """
    wanted = ints(shape)
    if not is_tensor(x):
        if wanted == ():
            return x
        x = to_tensor(x, like, DTYPES.get(first(types)))
    missing = max(0, x.ndim - len(wanted))
    wanted = (1,) * missing + wanted
    x = x.reshape((1,) * (len(wanted) - x.ndim) + tuple(x.shape))
    return x.expand([_broadcast(have, want) for have, want in zip(x.shape, wanted, strict=True)])


def _broadcast(have: Number, want: Number) -> Number:
    """The size that an axis of size `have` gets, for torch, whose -1 keeps it.

    A traced size stands for sizes above one, which a broadcast keeps.
    """
    if isinstance(have, int) and have == 1:
        return want
    if isinstance(have, int) and isinstance(want, int) and want not in (1, have):
        raise InputError(f"Expand of an axis of {have} to {want}: wanted {have} or 1")
    return -1


@op("Tile", hosts=(1,))
def tile(x: Tensor, repeats: Value) -> Tensor:
    """X repeated along each axis."""
    return x.repeat(ints(repeats))


@op("ConstantOfShape", hosts=(0,))
def constant_of_shape(
    shape: Value,
    *,
    value: tuple[Number, torch.dtype] = (0.0, torch.float32),
    like: Tensor | None,
) -> Tensor:
    """A tensor full of one number."""
    item, dtype = value
    return torch.full(ints(shape), item, dtype=dtype, device=device_of(like))


@op("Range", hosts=(0, 1, 2))
def value_range(
    start: Value, limit: Value, delta: Value, *, like: Tensor | None, types: tuple[int, ...]
) -> Tensor:
    """Numbers from `start` to below `limit` in steps of `delta`."""
    numbers = [_whole(number(item)) for item in (start, limit, delta)]
    known = [DTYPES[kind] for kind in types if kind]
    dtype = known[0] if known else torch.int64
    begin, end, step = numbers
    python = all(isinstance(item, (int, float)) for item in numbers)
    if python and step and (end - begin) / step <= 0:
        return torch.empty(0, dtype=dtype, device=device_of(like))
    return torch.arange(begin, end, step, dtype=dtype, device=device_of(like))


def _whole(item: Number) -> Number:
    """Integers for floats that are some: from a float bound torch cannot tell the length."""
    return int(item) if isinstance(item, float) and item.is_integer() else item


@op("EyeLike")
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    """Ones on the k-th diagonal of a matrix as large as x."""
    kind = x.dtype if dtype is None else DTYPES[dtype]
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return (torch.arange(x.shape[1], device=x.device) - rows == k).to(kind)


@op("Transpose")
def transpose(x: Tensor, *, perm: tuple[int, ...] | None = None) -> Tensor:
    """X with its axes in another order, reversed where none is given."""
    return x.permute(tuple(range(x.ndim))[::-1] if perm is None else perm)


@op("Concat", host=True)
def concat(*values: Value, axis: int) -> Value:
    """The operands one behind the other along an axis."""
    if any(is_tensor(value) for value in values):
        like = next(value for value in values if is_tensor(value))
        return torch.cat([to_tensor(value, like, like.dtype) for value in values], axis)
    return tuple(item for value in values for item in ints(value))


@op("Split", hosts=(1,))
def split(
    x: Tensor,
    split: Value = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    outputs: int,
) -> tuple[Tensor, ...]:
    """X in pieces along an axis, of the sizes given, or of equal ones but for the last."""
    if split is not None:
        return tuple(torch.split(x, ints(split), axis))
    length, count = x.shape[axis], num_outputs or outputs
    step = -(-length // count)
    sizes = [step] * (count - 1)
    return tuple(torch.split(x, [*sizes, length - step * (count - 1)], axis))


@op("CenterCropPad", hosts=(1,))
def center_crop_pad(x: Tensor, shape: Value, *, axes: tuple[int, ...] | None = None) -> Tensor:
    """X cut or padded with zeros about its centre, to the sizes wanted."""
    where = range(x.ndim) if axes is None else axes_of(axes, x.ndim)
    for axis, want in zip(where, ints(shape), strict=True):
        have = x.shape[axis]
        if have > want:
            x = x.narrow(axis, (have - want) // 2, want)
        elif have < want:
            before = (want - have) // 2
            pads = [0] * (2 * (x.ndim - 1 - axis)) + [before, want - have - before]
            x = torch.nn.functional.pad(x, pads)
    return x


@op("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """`[N, C b², H, W]` → `[N, C, H b, W b]`."""
    n, c, h, w = x.shape
    depth = c // (blocksize * blocksize)
    if mode == "DCR":
        grid = x.reshape(n, blocksize, blocksize, depth, h, w).permute(0, 3, 4, 1, 5, 2)
    elif mode == "CRD":
        grid = x.reshape(n, depth, blocksize, blocksize, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        raise InputError(f"DepthToSpace mode {mode!r}: wanted DCR or CRD")
    return grid.reshape(n, depth, h * blocksize, w * blocksize)


@op("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """`[N, C, H b, W b]` → `[N, C b², H, W]`."""
    n, c, h, w = x.shape
    grid = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return grid.permute(order).reshape(n, c * blocksize * blocksize, h // blocksize, w // blocksize)
