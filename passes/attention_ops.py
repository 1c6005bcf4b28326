"""The runtime's ops of attention, and what they are told: heads, lengths, tables, bias."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD
from qgraph.ort_versions import QUERY_LENGTHS, WITHOUT_CACHE, Version
from qgraph.passes.attention_heads import HEADS_FIRST
from qgraph.passes.attention_match import Attention
from qgraph.passes.attention_past import Source, bias_of, size
from qgraph.passes.fuse_rotary import cos_and_sin
from qgraph.passes.fusion import MICROSOFT, Attributes, Builder
from qgraph.passes.matching import made_by

ROTARY = "RotaryEmbedding"


def is_grouped(found: Attention) -> bool:
    """Whether GroupQueryAttention is wanted; the other one is faster where it will do."""
    needed = found.mask.causal or found.core.cap is not None
    return needed or found.groups != found.heads or bool(found.past) or found.table is not None


def turns_in_front(found: Attention, oldest: Version) -> bool:
    """Whether heads are turned by an op of its own.

    Without a cache the kernel counts positions itself, whatever it is told of them; where it is
    not told how many tokens are new, it does so for a first prompt.
    """
    counts = found.past is None or oldest < QUERY_LENGTHS
    return found.table is not None and found.table.positions is not None and counts


def packed_source(found: Attention, oldest: Version) -> ir.Value | None:
    """The `[B, S, (H + 2 KV)·D]` that queries, keys and values are split from, in that order."""
    parts = [found.query, found.key, found.value]
    split = made_by(parts[0].value, "Split")
    if split is None or not is_grouped(found) or turns_in_front(found, oldest):
        return None
    if any(each.layout != "packed" for each in parts):
        return None
    if [each.value for each in parts] != list(split.outputs):
        return None
    return split.inputs[0] if split.attributes.get_int("axis", 0) in (2, -1) else None


def attended(builder: Builder, found: Attention, source: Source) -> list[ir.Value]:
    """The op; its result as the graph goes on with it, then the cache's."""
    told, attributes = (_grouped if is_grouped(found) else _multi_head)(builder, found, source)
    if abs(found.scale * found.size**0.5 - 1) > 1e-6:
        attributes["scale"] = float(found.scale)
    while told[-1] is None:
        told.pop()
    result = found.result.value
    like: list[ir.Value | None] = [result]
    if found.past is not None:
        like += [each.present for each in found.past]
    elif is_grouped(found):  # a kernel that wants a past has a present as well
        first = GROUPED_QUERY.place("past_key")
        like += told[first : first + 2]
    while like[-1] is None:
        like.pop()
    op = GROUPED_QUERY if is_grouped(found) else MULTI_HEAD
    made, *present = builder.ops(op.op_type, told, like, domain=MICROSOFT, attributes=attributes)
    present = present if found.past is not None else []
    if found.result.layout == "packed":
        return [made, *present]
    made.shape = None
    return [_split(builder, made, found), *present]


def _multi_head(
    builder: Builder, found: Attention, source: Source
) -> tuple[list[ir.Value | None], Attributes]:
    packed = [each.packed(builder) for each in (found.query, found.key, found.value)]
    bias = bias_of(builder, source, found.mask.bias, found.core.query.dtype)
    return [*packed, None, None, bias], {"num_heads": found.heads}


def _grouped(
    builder: Builder, found: Attention, source: Source
) -> tuple[list[ir.Value | None], Attributes]:
    """Inputs and attributes.

    How many of the tokens are new is told as well where there is a cache, and a kernel that takes
    it: without it a first prompt's positions are 0, 1, …, and a prompt behind a cache is of one
    row. A kernel that does not do without a cache gets one of no tokens.
    """
    oldest = builder.context.capabilities.oldest
    attributes: Attributes = {"num_heads": found.heads, "kv_num_heads": found.groups}
    if not found.mask.causal:
        attributes["causal"] = 0
    if found.mask.window is not None:
        attributes["local_window_size"] = found.mask.window
    if found.core.cap is not None:
        attributes["softcap"] = float(found.core.cap)
    table: list[ir.Value | None] = [None, None, None]
    whole = packed_source(found, oldest)
    parts: list[ir.Value | None] = [whole, None, None]
    if whole is None:
        parts = [each.packed(builder) for each in (found.query, found.key, found.value)]
    if found.table is not None and turns_in_front(found, oldest):
        angles, half = cos_and_sin(builder, found.table, found.frame), found.table.half
        parts[:2] = [
            turned(builder, part, count, found.table.positions, angles,
                   interleaved=int(found.table.interleaved),
                   part=0 if 2 * half == found.size else 2 * half)
            for part, count in zip(parts[:2], (found.heads, found.groups), strict=True)
            if part is not None
        ]  # fmt: skip
    elif found.table is not None:
        attributes["do_rotary"] = 1
        if found.table.interleaved:
            attributes["rotary_interleaved"] = 1
        table = [*cos_and_sin(builder, found.table, found.frame), found.table.positions]
    past: list[ir.Value | None] = [None, None]
    if found.past is not None:
        past = [each.past for each in found.past]
    elif oldest < WITHOUT_CACHE:
        past = [_empty(builder, found, source)] * 2
    lengths = source.lengths(builder)
    bias = bias_of(builder, source, found.mask.bias, found.core.query.dtype)
    new = lengths.new if found.past is not None and oldest >= QUERY_LENGTHS else None
    given = [*parts, *past, lengths.last, lengths.total, *table, bias]
    told = dict(zip(GROUPED_QUERY.inputs, given, strict=False))
    return GROUPED_QUERY.arranged(told, query_seqlens=new), attributes


def _empty(builder: Builder, found: Attention, source: Source) -> ir.Value:
    """A cache of no tokens, `[B, KV, 0, D]`, one for all attentions of its kind."""
    dtype, sizes = found.core.query.dtype or ir.DataType.FLOAT, (found.groups, 0, found.size)

    def make(inner: Builder) -> list[ir.Value]:
        none = inner.constant("no_tokens", np.zeros((1, *sizes), dtype.numpy()))
        rest = inner.constant("no_tokens_sizes", np.array(sizes, np.int64))
        batch = size(inner, source.tokens, 0)
        shape = inner.op("Concat", [batch, rest], attributes={"axis": 0},
                         dtype=ir.DataType.INT64, shape=[4])  # fmt: skip
        return [inner.op("Expand", [none, shape], dtype=dtype, shape=[None, *sizes])]

    return builder.shared(("no cache", source.tokens, dtype, sizes), make)[0]


def turned(
    builder: Builder,
    heads: ir.Value,
    count: int,
    positions: ir.Value | None,
    angles: Sequence[ir.Value | None],
    *,
    interleaved: int,
    part: int,
) -> ir.Value:
    """Heads `[B, S, H·D]`, turned by the angles of their positions `[B, S]`.

    angles: cosines and sines `[rows, D / 2]`. part: the elements turned of each head; 0 for all.
    """
    attributes: Attributes = {"num_heads": count, "interleaved": interleaved}
    if part:
        attributes["rotary_embedding_dim"] = part
    told = [heads, positions, *angles]
    return builder.op(ROTARY, told, domain=MICROSOFT, attributes=attributes, like=heads)


def _split(builder: Builder, value: ir.Value, found: Attention) -> ir.Value:
    """The heads of `[B, S, H·D]` as the graph goes on with them."""
    result = found.result.value
    shape = builder.constant("split_heads", np.array([0, 0, found.heads, found.size], np.int64))
    if found.result.layout == "tokens first":
        return builder.op("Reshape", [value, shape], like=result)
    apart = builder.op("Reshape", [value, shape], dtype=value.dtype)
    return builder.op("Transpose", [apart], attributes={"perm": [*HEADS_FIRST]}, like=result)
