"""Where the channels of an activation come from, op by op, up to what can be divided.

A path is a chain of ops each of which hands positive factors of its channels on: they can be
moved from the activation to the path's upper end, the weight of a norm or the output rows of a
linear. Nothing beside the path may read what lies on it, for that would be divided too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD
from qgraph.kernel_ops import NBITS
from qgraph.passes import channel_attention, channel_moves, channel_picks
from qgraph.passes.channel_moves import Channels, Hop, Index, Slot, Unscalable, called, is_read
from qgraph.passes.channel_reshape import through_reshape
from qgraph.passes.scaled_constants import constant_of
from qgraph.sites import CONTRIB, Site

_RULES: dict[tuple[str, str], channel_moves.Rule] = {
    **{("", op_type): rule for op_type, rule in channel_moves.RULES.items()},
    **dict.fromkeys(
        [("", op_type) for op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze")],
        through_reshape,
    ),
    ("", "MatMul"): channel_attention.through_matmul,
    ("", "Attention"): channel_attention.through_attention,
    (CONTRIB, MULTI_HEAD.op_type): channel_attention.through_multi_head,
    (CONTRIB, GROUPED_QUERY.op_type): channel_attention.through_grouped_query,
}

_NORMS: dict[tuple[str, str], tuple[int, int | None]] = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1, None),
    ("", "SimplifiedLayerNormalization"): (1, None),
    (CONTRIB, "SimplifiedLayerNormalization"): (1, None),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): (2, None),
    (CONTRIB, "SkipLayerNormalization"): (2, 3),
}
"""The inputs that hold weight and bias. ONNX Runtime has the simplified one in ONNX's domain."""


@dataclasses.dataclass(frozen=True, eq=False)
class Path:
    """How an activation's channels can be divided.

    kind: "norm" where `slots` are all there is, "linear" where the rows of `site` are divided too.
    node: the norm, the Mul by a norm's weight, or the linear.
    rows: int64 `[K]`, the element of the norm or the output row of the linear behind each channel.
    slots: constants to divide: weights and biases of norms, biases on the way.
    """

    kind: Literal["norm", "linear"]
    node: ir.Node
    rows: Index
    slots: tuple[Slot, ...]
    site: Site | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """A value on a path. reader: the node through whose input `index` it was reached."""

    value: ir.Value
    channels: Channels
    slots: tuple[Slot, ...] = ()
    depth: int = 0
    reader: ir.Node | None = None
    index: int = 0
    output: ir.Value | None = None


def trace(activation: ir.Value, k: int, linears: Mapping[int, Site]) -> Path:
    """The path up from `activation` `[…, k]`, whose own readers are the caller's business.

    Args:
        activation: the value to divide.
        k: the size of its last axis.
        linears: every linear of the graph, by the id of its node.

    Raises:
        Unscalable: there is none; the reason is that of the way that led farthest.
    """
    pending = [_Place(activation, Channels((k,), np.arange(k, dtype=np.int64)))]
    depth, reason = -1, ""
    while pending:
        place = pending.pop()
        try:
            _check_readers(place)
            found = _end(place, linears)
            if found is not None:
                return found
            pending += reversed(_next(place))
        except Unscalable as stop:
            if place.depth > depth:
                depth, reason = place.depth, str(stop.args[0])
    raise Unscalable(reason)


def _next(place: _Place) -> list[_Place]:
    """Where the path may go on through the node that makes a value."""
    node = place.value.producer()
    assert node is not None
    found = []
    for hop in _hops(node, place):
        source = node.inputs[hop.index]
        if source is not None:
            slots = (*place.slots, *hop.slots)
            step = _Place(
                source, hop.channels, slots, place.depth + 1, node, hop.index, place.value
            )
            found.append(step)
    return found


def _hops(node: ir.Node, place: _Place) -> list[Hop]:
    if channel_picks.picks(node):
        return channel_picks.through_pick(node, place.value, place.channels)
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None or place.value is not node.outputs[0]:
        raise Unscalable(f"{called(node)} is not homogeneous in each channel")
    return rule(node, place.channels)


def _check_readers(place: _Place) -> None:
    """Nobody but the path may read the channels; their shape is free to all."""
    value = place.value
    if place.reader is None:
        return
    if value.is_graph_output():
        raise Unscalable(f"{value.name} is an output of the graph")
    for user, index in value.uses():
        if is_shape_reader(user):
            continue
        on_path = user is place.reader and index == place.index
        if on_path and not channel_picks.picks(user):
            continue
        for output in user.outputs:
            if on_path and output is place.output:
                continue
            free = index == 0 and channel_picks.takes_others(user, output, place.channels)
            if is_read(output) and not free:
                raise Unscalable(f"{value.name} is also read by {called(user)}")


def is_shape_reader(node: ir.Node) -> bool:
    """Whether a node looks at shapes only."""
    return node.domain == "" and node.op_type in ("Shape", "Size")


def _end(place: _Place, linears: Mapping[int, Site]) -> Path | None:
    """The path's upper end, if the node that makes the value is one."""
    node = place.value.producer()
    if node is None:
        raise Unscalable(f"{place.value.name} is no result of a node")
    site = linears.get(id(node))
    if site is not None:
        return _linear_end(site, place, linears)
    if place.value is not node.outputs[0] or not _is_in_order(place.channels):
        return None
    return _norm_end(node, place) or _factor_end(node, place)


def _is_in_order(channels: Channels) -> bool:
    """Whether channel i is element i of the last axis."""
    k = len(channels.at)
    return channels.dims[-1] == k and bool((channels.at == np.arange(k)).all())


def _norm_end(node: ir.Node, place: _Place) -> Path | None:
    """A node that is a norm by its name."""
    inputs = _NORMS.get((node.domain, node.op_type))
    if inputs is None:
        return None
    slots, axis = [], node.attributes.get_int("axis", -1)
    rank = None if place.value.shape is None else len(place.value.shape)
    if axis != -1 and (rank is None or axis != rank - 1):
        raise Unscalable(f"{called(node)} is not over the last axis alone")
    for index, factor in ((inputs[0], True), (inputs[1], False)):
        if index is None or len(node.inputs) <= index or node.inputs[index] is None:
            continue
        if constant_of(node.inputs[index]) is None:
            raise Unscalable(f"a weight of {called(node)} is no constant")
        slots.append(Slot(node, index, place.channels, factor))
    return Path("norm", node, place.channels.at, (*place.slots, *slots))


def _factor_end(node: ir.Node, place: _Place) -> Path | None:
    """A Mul by a constant `[K]`, the last op of a norm that is spelled out, or of anything else.

    A scalar is left alone: as a vector it would keep runtimes from fusing what it belongs to
    (Gelu's 0.5).
    """
    if node.domain != "" or node.op_type != "Mul":
        return None
    for index in (0, 1):
        weight = constant_of(node.inputs[index])
        if weight is not None and weight.dims[-1:] == (len(place.channels.at),):
            slot = Slot(node, index, place.channels, factor=True)
            return Path("norm", node, place.channels.at, (*place.slots, slot))
    return None


def _linear_end(site: Site, place: _Place, linears: Mapping[int, Site]) -> Path:
    """A linear, each channel one of its output rows."""
    node, channels = site.node, place.channels
    if channels.dims[-1] != site.n or any(size != 1 for size in channels.dims[:-1]):
        raise Unscalable(f"the channels are not the output rows of {called(node)}")
    fused = (site.state, site.op) == ("fused", NBITS.op_type)
    scales = constant_of(NBITS.read(node, "scales")) if fused else None
    is_float = site.state == "float" and site.refusal is None and site.weight is not None
    if not is_float and scales is None:
        raise Unscalable(f"{called(node)} has no constant weight that can be divided")
    if is_float and _shares_weight(site, linears):
        raise Unscalable(f"the weight of {called(node)} serves other linears too")
    slots = place.slots
    at = {"Gemm": 2, NBITS.op_type: NBITS.inputs.index("bias")}.get(site.op, len(node.inputs))
    if at < len(node.inputs) and node.inputs[at] is not None:
        if constant_of(node.inputs[at]) is None:
            raise Unscalable(f"the bias of {called(node)} is no constant")
        slots = (*slots, Slot(node, at, channels))
    return Path("linear", node, channels.at, slots, site)


def _shares_weight(site: Site, linears: Mapping[int, Site]) -> bool:
    assert site.weight is not None
    return any(
        other is not site and other.weight is not None and other.weight.key == site.weight.key
        for other in linears.values()
    )
