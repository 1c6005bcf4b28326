"""Channels through attention: from its result to V, which it averages over positions.

The result is linear in V along the head size, head by head; with grouped queries several heads
of the result come from one of V. A cache of V keeps its meaning: where V goes on into one, or
joins one, there is no way.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD
from qgraph.passes.channel_moves import (
    Channels,
    Hop,
    Slot,
    Unscalable,
    broadcast_dims,
    called,
    is_read,
    sizes,
)
from qgraph.passes.scaled_constants import constant_of

_PAST_VALUE = 5
"""The input of ONNX's Attention that holds the past V."""


def through_matmul(node: ir.Node, channels: Channels) -> list[Hop]:
    """Probabilities times V: along V's last axis and its batch axes, not along what is summed."""
    left, right = sizes(node.inputs[0]), sizes(node.inputs[1])
    if left is None or right is None or min(len(left), len(right)) < 2:
        raise Unscalable(f"the ranks of what {called(node)} reads are not known to be 2 or more")
    after = channels.of_rank(max(len(channels.dims), 2))
    *batch, rows, columns = after.dims
    if rows != 1:
        raise Unscalable(f"{called(node)} has channels along its rows")
    lead = broadcast_dims(node.inputs[1], [*batch, 1, 1])[:-2]
    return [Hop(1, after.before([*lead, 1, columns], lambda labels: labels))]


def through_attention(node: ir.Node, channels: Channels) -> list[Hop]:
    """ONNX's Attention: V `[B, S, heads · size]` if heads are told, else `[B, heads, S, size]`."""
    _refuse_cache(node, node.inputs[_PAST_VALUE] if len(node.inputs) > _PAST_VALUE else None)
    queries = node.attributes.get_int("q_num_heads", 0)
    shared = node.attributes.get_int("kv_num_heads", 0)
    if queries and shared:
        return [Hop(2, _flat(node, channels, queries, shared))]
    after = channels.of_rank(4)
    batch, heads, length, size = after.dims
    if (batch, length) != (1, 1):
        raise Unscalable(f"{called(node)} has channels along its positions")
    if heads == 1:
        return [Hop(2, after)]
    known = sizes(node.inputs[2])
    found = known[1] if known is not None and len(known) == 4 else None
    if not isinstance(found, int) or heads % found:
        raise Unscalable(f"the number of V's heads in {called(node)} is not known")
    return [Hop(2, after.before((1, found, 1, size), lambda v: v.repeat(heads // found, axis=1)))]


def through_multi_head(node: ir.Node, channels: Channels) -> list[Hop]:
    """MultiHeadAttention: V `[B, S, heads · size]`, its bias behind those of Q and K."""
    _refuse_cache(node, MULTI_HEAD.read(node, "past_value"))
    known = sizes(MULTI_HEAD.read(node, "value"))
    if known is None or len(known) != 3:
        raise Unscalable(f"{called(node)} has no V of rank 3")
    heads = node.attributes.get_int("num_heads", 1)
    hop = Hop(MULTI_HEAD.place("value"), _flat(node, channels, heads, heads))
    given = MULTI_HEAD.read(node, "bias")
    if given is None:
        return [hop]
    bias = constant_of(given)
    if bias is None:
        raise Unscalable(f"{called(node)} has a computed bias")
    (total,) = bias.dims
    behind = Channels((total,), hop.channels.at + total - hop.channels.dims[-1])
    return [dataclasses.replace(hop, slots=(Slot(node, MULTI_HEAD.place("bias"), behind),))]


def through_grouped_query(node: ir.Node, channels: Channels) -> list[Hop]:
    """GroupQueryAttention: V `[B, S, heads · size]`, or in one value behind Q and K."""
    _refuse_cache(node, GROUPED_QUERY.read(node, "past_value"))
    if GROUPED_QUERY.read(node, "v_scale") is not None:
        raise Unscalable(f"{called(node)} quantizes V")
    queries = node.attributes.get_int("num_heads", 1)
    shared = node.attributes.get_int("kv_num_heads", 1)
    own = _flat(node, channels, queries, shared)
    if GROUPED_QUERY.read(node, "value") is not None:
        return [Hop(GROUPED_QUERY.place("value"), own)]
    before = own.dims[-1] // shared * (queries + shared)
    return [Hop(0, Channels((before + own.dims[-1],), own.at + before))]


def _flat(node: ir.Node, channels: Channels, queries: int, shared: int) -> Channels:
    """V's channels where its heads lie side by side in one axis."""
    after = channels.of_rank(max(1, len(channels.dims)))
    *lead, width = after.dims
    if any(size != 1 for size in lead) or width % queries or queries % shared:
        raise Unscalable(f"{called(node)} has {queries} heads for {shared} of V, of no known size")
    dims = (shared, width // queries)
    side_by_side = Channels((width,), after.at)
    return side_by_side.before(
        (dims[0] * dims[1],),
        lambda v: v.reshape(dims).repeat(queries // shared, axis=0).reshape(-1),
    )


def _refuse_cache(node: ir.Node, past: ir.Value | None) -> None:
    """A past V is not divided, and a present one must not be."""
    present = node.outputs[2] if len(node.outputs) > 2 else None
    if past is not None or (present is not None and is_read(present)):
        raise Unscalable(f"{called(node)} keeps V in a cache")
