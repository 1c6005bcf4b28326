"""How a constant becomes the `[N, K]` weight of a linear: plain views, no copies.

A `View` is the list of the ops that lie between the constant and its reader. It is applied to
numpy arrays; a step that numpy could only do by copying makes the chain no view, and the site
says so instead of materializing the weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.constants import small_ints
from qgraph.formats.base import Array

BEFORE_ALL = -(1 << 62)
"""The end of a slice that runs backwards to the first element."""


class NotAView(Exception):
    """The chain of ops needs a copy or is not constant; `args[0]` says which op and why."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One op of a view: its kind and parameters, hashable."""

    kind: str
    parameters: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class View:
    """The steps from a constant to `[N, K]`, in the order of application.

    factor: Gemm's or FusedMatMul's alpha, multiplied into the weight.
    casts: ONNX types that the data passes on the way, in order.
    """

    steps: tuple[Step, ...] = ()
    casts: tuple[ir.DataType, ...] = ()
    factor: float = 1.0

    def then(self, kind: str, *parameters: Any) -> View:
        """This view with one more step."""
        return View((*self.steps, Step(kind, parameters)), self.casts, self.factor)

    def shape_of(self, array: Array) -> Array:
        """Apply the steps to `array`: a view of the same memory.

        Raises:
            NotAView: a step would copy, or does not fit the shape.
        """
        for step in self.steps:
            try:
                result = _APPLY[step.kind](array, *step.parameters)
            except (ValueError, IndexError) as error:
                raise NotAView(f"{step.kind}{step.parameters}: {error}") from None
            if array.size and result.size and not np.may_share_memory(result, array):
                raise NotAView(f"{step.kind} of a transposed or sliced constant needs a copy")
            array = result
        return array

    def signature(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """Equal for two chains that show the same elements in the same order."""
        return _signature(self, tuple(shape))

    def to_float(self, block: Array) -> Array:
        """`block` through the casts and the factor, as float32 (no copy if it is that already)."""
        with np.errstate(over="ignore"):  # infinities are found, and named, when rounding
            for cast in self.casts:
                block = block.astype(cast.numpy(), copy=False)
        block = np.asarray(block, dtype=np.float32)
        return block if self.factor == 1.0 else block * np.float32(self.factor)


@functools.lru_cache(maxsize=4096)  # a model's weights have few shapes, each asked for often
def _signature(view: View, shape: tuple[int, ...]) -> tuple[Any, ...]:
    # np.empty reserves addresses without touching them; strides are all that is asked.
    dummy = np.empty(shape, np.uint8)
    shown = view.shape_of(dummy)
    offset = shown.__array_interface__["data"][0] - dummy.__array_interface__["data"][0]
    strides = tuple(s for s, d in zip(shown.strides, shown.shape, strict=True) if d > 1)
    return (shown.shape, strides, offset, view.casts, view.factor)


def _take_slice(array: Array, axis: int, start: int, stop: int, step: int) -> Array:
    """ONNX's Slice: negative bounds count from the end, and are clamped by the step's direction."""
    size = array.shape[axis]
    start, stop = (bound + size if bound < 0 else bound for bound in (start, stop))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, stop = min(max(start, 0), high), min(max(stop, low), high)
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = slice(start, None if stop < 0 else stop, step)
    taken: Array = array[tuple(index)]
    return taken


def _index(array: Array, axis: int, at: int) -> Array:
    if not -array.shape[axis] <= at < array.shape[axis]:
        raise IndexError(f"index {at} of axis {axis} with {array.shape[axis]} elements")
    shown: Array = array[(slice(None),) * (axis % array.ndim) + (at,)]
    return shown


def _reshape(array: Array, shape: tuple[int, ...]) -> Array:
    known = tuple(array.shape[i] if d == 0 else d for i, d in enumerate(shape))
    return array.reshape(known)


def _leading(array: Array, rank: int) -> Array:
    """Drop leading axes of length 1 down to rank 2; longer ones (experts) stay."""
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    return array


_APPLY: dict[str, Callable[..., Array]] = {
    "transpose": lambda array, perm: array.transpose(perm or None),
    "reshape": _reshape,
    "squeeze": lambda array, axes: np.squeeze(array, axis=axes or None),
    "unsqueeze": lambda array, axes: np.expand_dims(array, axes),
    "flatten": lambda array, axis: array.reshape(
        int(np.prod(array.shape[:axis], dtype=np.int64)), -1
    ),
    "slice": _take_slice,
    "index": _index,
    "leading": _leading,
}

_MORE = Callable[[View, ir.Node], View]


def _ints(node: ir.Node, position: int, attribute: str) -> tuple[int, ...] | None:
    """A list of integers that old opsets hold as an attribute and new ones as an input."""
    if attribute in node.attributes:
        return tuple(node.attributes[attribute].as_ints())
    if len(node.inputs) <= position or node.inputs[position] is None:
        return None
    found = small_ints(node.inputs[position])
    if found is None:
        raise NotAView(f"{attribute} of {node.op_type} {node.name} is no constant")
    return tuple(found)


def _on_slice(view: View, node: ir.Node) -> View:
    starts = _ints(node, 1, "starts") or ()
    ends = _ints(node, 2, "ends") or ()
    axes = _ints(node, 3, "axes") or tuple(range(len(starts)))
    steps = _ints(node, 4, "steps") or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise NotAView(f"Slice {node.name} has bounds, axes and steps of different lengths")
    for axis, start, stop, step in zip(axes, starts, ends, steps, strict=True):
        view = view.then("slice", axis, start, stop, step)
    return view


def _on_gather(view: View, node: ir.Node) -> View:
    axis = node.attributes.get_int("axis", 0)
    indices = node.inputs[1]
    found = small_ints(indices, limit=1 << 20)
    if found is None or indices is None or indices.const_value is None:
        raise NotAView(f"indices of Gather {node.name} are no constant")
    rank = len(indices.const_value.shape)
    if rank == 0:
        return view.then("index", axis, found[0])
    steps = set(np.diff(found).tolist()) or {1}
    if rank != 1 or not found or len(steps) > 1 or min(found) < 0 or 0 in steps:
        raise NotAView(f"Gather {node.name} picks rows in no regular order")
    step = steps.pop()
    stop = found[-1] + (1 if step > 0 else -1)
    return view.then("slice", axis, found[0], stop if stop >= 0 else BEFORE_ALL, step)


def _on_split(view: View, node: ir.Node, output: ir.Value) -> View:
    axis = node.attributes.get_int("axis", 0)
    sizes = _ints(node, 1, "split")
    source = node.inputs[0]
    if sizes is None:
        shape = tuple(source.shape) if source is not None and source.shape is not None else ()
        total = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(total, int):
            raise NotAView(f"Split {node.name} of unknown shape")
        count = len(node.outputs)
        part = -(-total // count)
        sizes = tuple(min(part, total - part * i) for i in range(count))
    at = next(i for i, value in enumerate(node.outputs) if value is output)
    if at >= len(sizes):
        raise NotAView(f"Split {node.name} has {len(sizes)} sizes for {len(node.outputs)} outputs")
    start = sum(sizes[:at])
    return view.then("slice", axis, start, start + sizes[at], 1)


def _on_reshape(view: View, node: ir.Node) -> View:
    shape = _ints(node, 1, "shape")
    if shape is None:
        raise NotAView(f"Reshape {node.name} without a shape")
    return view.then("reshape", shape)


_TYPES = frozenset(each.value for each in ir.DataType)


def _on_cast(view: View, node: ir.Node) -> View:
    kind = node.attributes.get_int("to", 0)
    if kind not in _TYPES:
        raise NotAView(f"Cast {node.name} to the type {kind}, which ONNX does not have")
    to = ir.DataType(kind)
    if not to.is_floating_point():
        raise NotAView(f"Cast {node.name} to {to.name.lower()}")
    return dataclasses.replace(view, casts=(*view.casts, to))


_OPS: dict[str, _MORE] = {
    "Identity": lambda view, node: view,
    "Cast": _on_cast,
    "Transpose": lambda view, node: view.then(
        "transpose", tuple(node.attributes.get_ints("perm", ()))
    ),
    "Reshape": _on_reshape,
    "Squeeze": lambda view, node: view.then("squeeze", _ints(node, 1, "axes")),
    "Unsqueeze": lambda view, node: view.then("unsqueeze", _ints(node, 1, "axes")),
    "Flatten": lambda view, node: view.then("flatten", node.attributes.get_int("axis", 1)),
    "Slice": _on_slice,
    "Gather": _on_gather,
}


def is_view_op(node: ir.Node) -> bool:
    """Whether `node` may only move or cast elements of its first input."""
    return node.domain == "" and (node.op_type in _OPS or node.op_type == "Split")


@dataclasses.dataclass(frozen=True)
class Chain:
    """The way from a root value to a reader: the nodes between (root first) and their view."""

    root: ir.Value
    view: View
    nodes: tuple[ir.Node, ...]


def trace(value: ir.Value) -> Chain:
    """Walk from a reader's input up through view ops to the value that they show.

    Raises:
        NotAView: an op on the way has parameters that are not constant.
    """
    path: list[tuple[ir.Node, ir.Value]] = []
    while (node := value.producer()) is not None and is_view_op(node):
        path.append((node, value))
        source = node.inputs[0]
        assert source is not None
        value = source
    view = View()
    for node, output in reversed(path):
        split = node.op_type == "Split"
        view = _on_split(view, node, output) if split else _OPS[node.op_type](view, node)
    return Chain(value, view, tuple(node for node, _ in reversed(path)))
