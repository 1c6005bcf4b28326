"""Attention, however it is spelled: two products with a softmax between them become one op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD
from qgraph.formats.base import Array
from qgraph.ort_versions import NEWEST, QUERY_LENGTHS, Version
from qgraph.passes.attention_core import OtherwiseError, core_of, native_core
from qgraph.passes.attention_mask import NoMaskError
from qgraph.passes.attention_match import Attention, understood
from qgraph.passes.attention_ops import (
    attended,
    is_grouped,
    packed_source,
    turns_in_front,
)
from qgraph.passes.attention_padding import Kept
from qgraph.passes.attention_past import Source
from qgraph.passes.attention_probe import Sizes
from qgraph.passes.fusion import Builder, Candidate, Feed, FusionContext, Miss

_SPELLING = "softmax(q kᵀ · scale + mask) v over heads [B, H, S, D]"
_TABLE = "x · cos + (-x₂, x₁) · sin with the cos and sin of each token's position"


def attention(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """Attentions, each with its rotary embedding, its cache and its mask."""
    for node in context.nodes("Softmax", "Attention"):
        if node.graph is not context.model.graph or node.domain:
            continue
        try:
            core = core_of(node) if node.op_type == "Softmax" else native_core(node)
            if core is not None:
                found = understood(context, core)
                if found.untabled:
                    yield Miss("rotary", node, _TABLE, found.untabled)
                _require_own_text(found)
                candidate = _candidate(found, context)
                if context.has(candidate.into):
                    yield candidate
        except OtherwiseError as error:
            yield Miss("attention", error.node, _SPELLING, error.edge)
        except NoMaskError as error:
            yield Miss("attention", node, _SPELLING, str(error))


def _require_own_text(found: Attention) -> None:
    """Refuse what only the grouped op does, where keys are of another text than queries.

    Raises:
        OtherwiseError: they are; without a cache that op takes as many keys as queries.
    """
    frame = found.frame
    if is_grouped(found) and frame.past is None and found.length != frame.new:
        op = GROUPED_QUERY.op_type
        edge = f"{found.length} tokens are looked at by {frame.new}, which {op} cannot"
        raise OtherwiseError(found.core.node, f"{edge} ({found.summary})")


def _candidate(found: Attention, context: FusionContext) -> Candidate:
    """GroupQueryAttention or MultiHeadAttention, with what it is told by graph inputs."""
    packed = packed_source(found, context.capabilities.oldest)
    inputs = [packed] if packed else [found.query.value, found.key.value, found.value.value]
    outputs = [found.result.value]
    if found.past is not None:
        inputs += [each.past for each in found.past]
        outputs += [each.present for each in found.past]
    positions = found.table.positions if found.table is not None else None
    extra = [found.mask.padding, found.mask.bias, positions]
    source = _source(context, found)

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        return attended(builder, found, source)

    return Candidate(
        "attention",
        found.core.node,
        tuple(dict.fromkeys([*inputs, *(each for each in extra if each is not None)])),
        tuple(outputs),
        (GROUPED_QUERY if is_grouped(found) else MULTI_HEAD).name,
        build,
        feeds=_feeds(found),
        shapes=_shapes(found),
        dims=_dims(found),
        reason=found.summary,
        trials=_trials(found, context.capabilities.oldest),
        missed=_missed(found, context.capabilities.oldest),
    )


def _missed(found: Attention, oldest: Version) -> Miss | None:
    """What a newer runtime's op does besides: it turns heads by positions that it is told."""
    if not turns_in_front(found, oldest) or turns_in_front(found, NEWEST):
        return None
    edge = "heads are turned by ops in front, which keeps their linears apart"
    what = f"rotary embedding in {GROUPED_QUERY.op_type} behind a cache"
    return Miss("rotary", found.core.node, what, edge, QUERY_LENGTHS)


def _trials(found: Attention, oldest: Version) -> tuple[dict[str, int], ...]:
    """The sizes to try where the op is not told how many tokens are new.

    A prompt, a step, and a prompt behind a cache, which it takes of one row alone.
    """
    frame = found.frame
    if frame.past is None or oldest >= QUERY_LENGTHS:
        return ()
    tried = [Sizes(2, 5, 0), Sizes(2, 1, 4), Sizes(1, 3, 6)]
    tried = tried[:2] if frame.batch not in (1, *frame.names) else tried
    return tuple(frame.bindings(sizes) for sizes in tried)


def _source(context: FusionContext, found: Attention) -> Source:
    """Where lengths are read: a graph input of tokens, which all attentions share."""
    wanted = [found.frame.batch, found.frame.new]
    tokens = [each for each in context.model.graph.inputs if _dims_of(each)[:2] == wanted]
    past = found.past[0].past if found.past is not None else None
    mask = found.mask
    return Source(tokens[0] if tokens else found.query.value, mask.padding, past, mask.kept)


def _dims_of(value: ir.Value) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]


def _shapes(found: Attention) -> dict[str, list[int | str]]:
    """The shape of a bias, whose axes the graph may leave open."""
    bias, frame = found.mask.bias, found.frame
    if bias is None:
        return {}
    open_axes: list[int | str] = [1, found.heads, frame.new, found.length]
    known = [dim if dim in (1, *open_axes[:3], frame.batch) else None for dim in _dims_of(bias)]
    made = [a if b is None else b for a, b in zip(open_axes, known, strict=True)]
    return {str(bias.name): made}


def _dims(found: Attention) -> dict[str, str]:
    """What the axes of graph inputs are in the check, where each has names of its own."""
    frame, table = found.frame, found.table
    places: list[tuple[ir.Value | None, dict[int, int | str | None]]]
    places = [(found.mask.padding, {0: frame.batch, 1: found.length})]
    places += [(each.past, {0: frame.batch, 2: frame.past}) for each in found.past or ()]
    if table is not None:
        places.append((table.positions, {0: frame.batch, 1: frame.new}))
    dims: dict[str, str] = {}
    if table is not None and table.one_row and isinstance(frame.batch, str):
        dims[frame.batch] = "1"
    for value, axes in places:
        names = _dims_of(value) if value is not None else []
        for axis, meaning in axes.items():
            name = names[axis] if axis < len(names) else None
            if isinstance(name, str) and name != meaning:
                dims[name] = str(meaning)
    return dims


def _feeds(found: Attention) -> dict[str, Feed]:
    feeds: dict[str, Feed] = {}
    if found.mask.padding is not None:
        feeds[str(found.mask.padding.name)] = _some_padding(found.mask.kept)
    if found.table is not None and found.table.positions is not None:
        feeds[str(found.table.positions.name)] = _some_positions
    return feeds


def _some_padding(kept: Kept) -> Feed:
    """Padding anywhere but in front: a token that sees nothing has no result to compare."""

    def feed(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        found: Array = generator.choice(kept.tried, shape)
        found[:, 0] = generator.choice(kept.open, shape[0])
        return found

    return feed


def _some_positions(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    found: Array = generator.integers(0, 50, shape)
    return found
