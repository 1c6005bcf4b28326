"""Padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import Number, Value, axes_of, ints, number
from qgraph.runtimes.torch.table import op


@op("Pad", hosts=(1, 3), scalars=(2,))
def pad(
    x: Tensor,
    pads: Value,
    constant_value: Value = None,
    axes: Value = None,
    *,
    mode: str = "constant",
    value: float = 0.0,
) -> Tensor:
    """X with elements added before and behind each axis; negative counts cut.

    Raises:
        InputError: an unknown mode.
    """
    amounts = ints(pads)
    where = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    count = len(where)
    before, behind = amounts[:count], amounts[count:]
    if mode == "constant":
        return _constant(
            x, where, before, behind, value if constant_value is None else constant_value
        )
    for axis, first, last in zip(where, before, behind, strict=True):
        if not (isinstance(first, int) and isinstance(last, int) and first == last == 0):
            x = x.index_select(axis, _places(x, axis, first, last, mode))
    return x


def _constant(
    x: Tensor,
    where: tuple[int, ...],
    before: tuple[Number, ...],
    behind: tuple[Number, ...],
    value: Value,
) -> Tensor:
    pairs: list[Number] = [0] * (2 * x.ndim)
    for axis, first, last in zip(where, before, behind, strict=True):
        pairs[2 * (x.ndim - 1 - axis)] = first
        pairs[2 * (x.ndim - 1 - axis) + 1] = last
    if isinstance(value, Tensor):
        if torch.compiler.is_compiling():
            kept = functional.pad(torch.ones_like(x, dtype=torch.bool), pairs, value=False)
            return torch.where(kept, functional.pad(x, pairs), value.reshape(()).to(x.dtype))
        value = number(value)
    if x.dtype == torch.bool:
        value = bool(value)
    return functional.pad(x, pairs, value=value)


def _places(x: Tensor, axis: int, first: Number, last: Number, mode: str) -> Tensor:
    size = x.shape[axis]
    places = torch.arange(-first, size + last, device=x.device)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return torch.remainder(places, size)
    if mode == "reflect":
        period = torch.sym_max(2 * (size - 1), 1)
        around = torch.remainder(places, period)
        return torch.minimum(around, period - around) if size > 1 else torch.zeros_like(places)
    raise InputError(f"Pad mode {mode!r}: wanted constant, edge, reflect or wrap")
