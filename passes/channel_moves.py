"""How channels pass one op: which elements of its input they are, given those of its output.

Each op here is positively homogeneous in the input concerned: divide that input's channels by
positive factors, and the output's channels are divided by the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.constants import FLOATS, scalar
from qgraph.passes.scaled_constants import constant_of

Index: TypeAlias = NDArray[np.int64]
Size: TypeAlias = "int | str | None"
"""One dimension: known, named, or neither."""


class Unscalable(Exception):
    """The path ends here; `args[0]` says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Channels:
    """Which elements of a value the channels of an activation are.

    dims: the sizes of the value's last axes, 1 for an axis along which all elements belong to the
        same channel; axes in front of these are all of that kind.
    at: int64 `[K]`, for each channel its index into an array of shape `dims`, laid out flat.
    """

    dims: tuple[int, ...]
    at: Index

    def of_rank(self, rank: int) -> Channels:
        """The same with `rank` axes."""
        extra = len(self.dims) - rank
        if any(size != 1 for size in self.dims[: max(0, extra)]):
            raise Unscalable("the channels have more axes than the value")
        dims = self.dims[extra:] if extra > 0 else (1,) * -extra + self.dims
        return dataclasses.replace(self, dims=dims)

    def before(self, dims: Sequence[int], move: Callable[[Index], Index]) -> Channels:
        """The channels of an input with axes `dims`, which `move` brings where the output's are."""
        labels = np.arange(math.prod(dims), dtype=np.int64).reshape(tuple(dims))
        moved = np.broadcast_to(move(labels), self.dims)
        return Channels(tuple(dims), moved.reshape(-1)[self.at])

    def spread(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """`values` `[K]` as an array of shape `dims`, 1 where no channel lies; no leading ones."""
        spread = np.ones(math.prod(self.dims))
        spread[self.at] = values
        lead = next((i for i, d in enumerate(self.dims) if d != 1), len(self.dims) - 1)
        return spread.reshape(self.dims[lead:])


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A constant on a path: input `index` of `node`, whose elements `channels` are divided.

    factor: it multiplies, or is added.
    """

    node: ir.Node
    index: int
    channels: Channels
    factor: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Hop:
    """One way through a node, from its output to input `index`; `slots` are divided on the way."""

    index: int
    channels: Channels
    slots: tuple[Slot, ...] = ()


Rule: TypeAlias = Callable[[ir.Node, Channels], list[Hop]]


def sizes(value: ir.Value | None) -> tuple[Size, ...] | None:
    """The dimensions of a value, or None where its rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def is_read(value: ir.Value) -> bool:
    """Whether anybody reads a value."""
    return bool(value.uses()) or value.is_graph_output()


def called(node: ir.Node) -> str:
    """A node in a sentence."""
    return f"{node.op_type} {node.name}"


def _same(node: ir.Node, channels: Channels) -> list[Hop]:
    return [Hop(0, channels)]


def _cast(node: ir.Node, channels: Channels) -> list[Hop]:
    if ir.DataType(node.attributes.get_int("to", 0)) not in FLOATS:
        raise Unscalable(f"{called(node)} is not to a float type")
    return [Hop(0, channels)]


def _dropout(node: ir.Node, channels: Channels) -> list[Hop]:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None and scalar(training) != 0:
        raise Unscalable(f"{called(node)} may be in training mode")
    return [Hop(0, channels)]


def _mul(node: ir.Node, channels: Channels) -> list[Hop]:
    """Through either operand, if it is no constant."""
    found: list[Hop] = []
    reason = Unscalable(f"{called(node)} multiplies constants")
    for index in (0, 1):
        if constant_of(node.inputs[index]) is None:
            try:
                found.append(_broadcast(node, index, channels))
            except Unscalable as stop:
                reason = stop
    if not found:
        raise reason
    return found


def _first(node: ir.Node, channels: Channels) -> list[Hop]:
    """Div and Expand: through what is divided or repeated."""
    return [_broadcast(node, 0, channels)]


def _add(node: ir.Node, channels: Channels) -> list[Hop]:
    """Add or Sub of a constant, which is divided too."""
    constants = [i for i in (0, 1) if constant_of(node.inputs[i]) is not None]
    if len(constants) != 1:
        raise Unscalable(f"{called(node)} does not join a computed value and a constant")
    (constant,) = constants
    hop = _broadcast(node, 1 - constant, channels)
    return [dataclasses.replace(hop, slots=(Slot(node, constant, channels),))]


def _broadcast(node: ir.Node, index: int, channels: Channels) -> Hop:
    dims = broadcast_dims(node.inputs[index], channels.dims)
    return Hop(index, channels.before(dims, lambda labels: labels))


def broadcast_dims(value: ir.Value | None, dims: Sequence[int]) -> list[int]:
    """The channels' axes of a value that is broadcast to axes `dims`."""
    known = sizes(value)
    found: list[int] = []
    for back, wanted in enumerate(reversed(dims), start=1):
        size: Size = 1 if wanted == 1 else None
        if size is None and known is not None:
            size = known[-back] if back <= len(known) else 1
        if size not in (1, wanted):
            name = value.name if value is not None else ""
            raise Unscalable(f"the shape of {name} is not known")
        found.insert(0, int(size))
    return found


def _transpose(node: ir.Node, channels: Channels) -> list[Hop]:
    order = node.attributes.get_ints("perm", ())
    if not order:
        known = sizes(node.inputs[0])
        if known is None:
            raise Unscalable(f"the rank of what {called(node)} reads is not known")
        order = range(len(known))[::-1]
    after = channels.of_rank(len(order))
    dims = [1] * len(order)
    for to, source in enumerate(order):
        dims[source] = after.dims[to]
    return [Hop(0, after.before(dims, lambda labels: labels.transpose(order)))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Identity", "Relu", "LeakyRelu", "PRelu", "Abs", "Neg"), _same),
    "Cast": _cast,
    "Dropout": _dropout,
    "Mul": _mul,
    "Div": _first,
    "Add": _add,
    "Sub": _add,
    "Expand": _first,
    "Transpose": _transpose,
}
"""By op of ONNX's own domain; each is about the first output."""
