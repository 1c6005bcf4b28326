"""Channels through Slice, Split and Gather: parts of a value, such as V of a fused QKV linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import small_ints
from qgraph.passes.channel_moves import Channels, Hop, Index, Size, Unscalable, called, sizes


@dataclasses.dataclass(frozen=True, eq=False)
class Pick:
    """What one output takes of the node's input: `indices` along `axis`.

    rank: of the input.
    size: the axis's length in the input, None where it is not known.
    indices: int64; of rank 0 where the axis is gone in the output, None where they are not known.
    """

    axis: int
    rank: int
    size: int | None
    indices: Index | None

    @property
    def drops(self) -> bool:
        """Whether the output lacks the axis."""
        return self.indices is not None and self.indices.ndim == 0

    def covers(self, dims: Sequence[int]) -> bool:
        """Whether output axes `dims` tell the elements that are taken apart."""
        if self.indices is None:
            return False
        return self.drops or dims[self.axis] == len(self.indices)

    def take(self, labels: Index) -> Index:
        """What lies in the output, given what lies in the input."""
        assert self.indices is not None
        return np.asarray(np.take(labels, self.indices, axis=self.axis))


def picks(node: ir.Node) -> bool:
    """Whether a node takes parts of its first input."""
    return node.domain == "" and node.op_type in ("Slice", "Split", "Gather")


def pick_of(node: ir.Node, output: ir.Value) -> Pick:
    """What `output` takes.

    Raises:
        Unscalable: the rank is not known, or the node has no constant axis.
    """
    shape = sizes(node.inputs[0])
    if shape is None:
        raise Unscalable(f"the rank of what {called(node)} reads is not known")
    if node.op_type == "Slice":
        return _slice(node, shape)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    size = _known(shape[axis])
    if node.op_type == "Split":
        return Pick(axis, len(shape), size, _part(node, output, size))
    indices = node.inputs[1]
    found, tensor = small_ints(indices), indices.const_value if indices is not None else None
    if found is None or tensor is None or len(tensor.shape) > 1:
        raise Unscalable(f"{called(node)} has no constant list of indices")
    array = np.array(found, np.int64).reshape(tuple(tensor.shape.numpy()))
    return Pick(axis, len(shape), size, array % size if size else array)


def _integers(value: ir.Value | None) -> list[int] | None:
    """A constant's elements, read through the Cast and Reshape that exporters leave unfolded."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Reshape", "Identity"):
            return None
        value = node.inputs[0]
    return small_ints(value)


def _known(size: Size) -> int | None:
    return size if isinstance(size, int) else None


def _part(node: ir.Node, output: ir.Value, size: int | None) -> Index | None:
    lengths = small_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if lengths is None and "split" in node.attributes:
        lengths = list(node.attributes["split"].as_ints())
    count, at = len(node.outputs), next(i for i, v in enumerate(node.outputs) if v is output)
    if lengths is None and size is not None and (len(node.inputs) < 2 or node.inputs[1] is None):
        part = -(-size // count)
        lengths = [max(0, min(part, size - part * i)) for i in range(count)]
    if lengths is None or len(lengths) != count:
        return None
    start = sum(lengths[:at])
    return np.arange(start, start + lengths[at], dtype=np.int64)


def _slice(node: ir.Node, shape: Sequence[Size]) -> Pick:
    starts, ends, axes, steps = (
        _integers(node.inputs[i]) if len(node.inputs) > i else None for i in range(1, 5)
    )
    axes = [*range(len(starts or ()))] if axes is None else axes
    if starts is None or ends is None or len(axes) != 1:
        raise Unscalable(f"{called(node)} does not cut one constant axis at constant bounds")
    axis, step = axes[0] % len(shape), (steps or [1])[0]
    size = _known(shape[axis])
    if size is None or step < 1:
        return Pick(axis, len(shape), size, None)
    indices = np.arange(size, dtype=np.int64)[starts[0] : ends[0] : step]
    return Pick(axis, len(shape), size, indices)


def through_pick(node: ir.Node, output: ir.Value, channels: Channels) -> list[Hop]:
    """First with the axis as one of channels, then as one that all channels run along.

    Raises:
        Unscalable: neither is possible.
    """
    pick = pick_of(node, output)
    after = channels.of_rank(pick.rank - pick.drops)
    others = after.dims[: pick.axis], after.dims[pick.axis + (not pick.drops) :]
    found = []
    if pick.size is not None and pick.covers(after.dims):
        dims = (*others[0], pick.size, *others[1])
        found.append(Hop(0, after.before(dims, pick.take)))
    runs_along = pick.drops or after.dims[pick.axis] == 1
    if runs_along and (pick.size != 1 or not found):
        dims = (*others[0], 1, *others[1])
        found.append(Hop(0, after.before(dims, lambda labels: labels.reshape(after.dims))))
    if not found:
        raise Unscalable(f"{called(node)} cuts the channels at bounds that are not known")
    return found


def takes_others(node: ir.Node, output: ir.Value, channels: Channels) -> bool:
    """Whether `output` surely has none of the channels of the node's first input."""
    if not picks(node):
        return False
    try:
        pick = pick_of(node, output)
        whole = channels.of_rank(pick.rank)
    except Unscalable:
        return False
    if pick.indices is None or whole.dims[pick.axis] != pick.size:
        return False
    labels = np.arange(np.prod(whole.dims), dtype=np.int64).reshape(whole.dims)
    return not np.isin(pick.take(labels), whole.at).any()
