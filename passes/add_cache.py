"""A cache for a decoder that was exported without one: each attention gets a past and a present."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD, Told
from qgraph.decoder_graph import CACHING, head_size
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.ort_versions import QUERY_LENGTHS
from qgraph.passes.attention_ops import turned
from qgraph.passes.attention_padding import NOT_ZERO
from qgraph.passes.attention_past import Source, bias_of, padding_of
from qgraph.passes.base import Context, Pass
from qgraph.passes.cache_proof import prove_steps
from qgraph.passes.fusion import MICROSOFT, Builder, FusionContext
from qgraph.passes.matching import readers
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.row_branches import within

MASK, POSITIONS = "attention_mask", "position_ids"
_BATCH, _NEW, _PAST, _TOTAL = "batch", "sequence", "past_sequence", "total_sequence"
_ATTENTION = (MULTI_HEAD.op_type, "Attention", "Softmax")
_COUNTING = ("Range", "CumSum", "Trilu")


@dataclasses.dataclass(frozen=True)
class AddCache(Pass):
    """Attention that read the whole text reads what is new, and a cache of what was.

    before:  input_ids → … GroupQueryAttention(qkv, , , , , seqlens, total, cos, sin) … → logits
    after:   input_ids, attention_mask, position_ids, past_key_values.N.key/value →
             … GroupQueryAttention(qkv, , , past.key, past.value, …) … → logits, present.N.key/value
    """

    name: ClassVar[str] = "add_cache"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Add it, or refuse the graph with the node that stands against it."""
        if not context.plan.recipe.add_cache:
            return []
        model, before = graph.model, graph.clone().model
        found = [node for node in model.graph if node.op_type == CACHING]
        given = _check(model, found, context.findings.unfused)
        tokens = given.tokens
        shape = [*(tokens.shape or ())]
        batch = shape[0] if len(shape) == 2 else ir.SymbolicDim(_BATCH)
        new = shape[1] if len(shape) == 2 else ir.SymbolicDim(_NEW)
        mask = given.mask or _input(model, MASK, ir.DataType.INT64, [batch, _TOTAL])
        mask.shape = ir.Shape([batch, _TOTAL])
        positions = given.positions or _input(model, POSITIONS, ir.DataType.INT64, [batch, new])
        _ask_tokens(mask, tokens)
        shared = FusionContext(Rewriter(model), context.capabilities, context.findings)
        steps = []
        for layer, node in enumerate(found):
            padding = padding_of(GROUPED_QUERY.read(node, "attention_bias"))
            kept = padding[1] if padding is not None else NOT_ZERO
            _cached(shared, node, layer, Source(tokens, mask, None, kept), positions, batch)
            steps.append(Step(self.name, "cache", str(node.name), "done", None, f"layer {layer}"))
        model.graph.sort()
        if context.evaluate is not None:
            names = str(tokens.name), MASK, POSITIONS
            told = context.capabilities.oldest >= QUERY_LENGTHS
            try:
                for rows in (2,) if told else (2, 1):
                    prove_steps(before, model, names, context.evaluate, rows, told or rows == 1)
            except InputError as error:
                _refuse(str(error))
        return steps


@dataclasses.dataclass(frozen=True)
class _Given:
    """The inputs of a model without a cache, `[B, S]`; None where it has no such one."""

    tokens: ir.Value
    mask: ir.Value | None
    positions: ir.Value | None


def _check(model: ir.Model, found: Sequence[ir.Node], unfused: Mapping[str, str]) -> _Given:
    """The inputs, where every attention can have a cache.

    unfused: by node, why an attention has not become an op that has a cache.

    Raises:
        InputError: one cannot.
    """
    others = [node for node in model.graph if node.op_type in _ATTENTION]
    if others or not found:
        what = f"node {others[0].name} is {others[0].op_type}" if others else "there is none"
        why = next((f" ({node}: {words})" for node, words in unfused.items()), "")
        if hidden := within(model, (CACHING,)):
            what = hidden
        _refuse(f"every attention must have become {CACHING}, and {what}{why}")
    for node in found:
        if not _is_empty(GROUPED_QUERY.read(node, "past_key")):
            raise InputError(
                f"the attention {node.name} has a cache already: leave --add-cache out"
            )
    given = _inputs(model)
    for node in found:
        bias = GROUPED_QUERY.read(node, "attention_bias")
        padding = padding_of(bias)
        if bias is not None and (padding is None or padding[0] is not given.mask):
            _refuse(f"the attention {node.name} adds {bias} to its scores")
        if node.attributes.get_int("causal", 1) == 0:
            _refuse(f"the attention {node.name} also looks ahead")
        if node.attributes.get_int("do_rotary", 0) == 0 and given.positions is None:
            _refuse(f"the attention {node.name} has no rotary embedding to tell positions to")
        if _inputs_of(_table(node)):
            _refuse(f"the rotary table of {node.name} depends on the number of tokens")
    biases = [GROUPED_QUERY.read(node, "attention_bias") for node in found]
    _check_mask(given.mask, [bias for bias in biases if bias is not None])
    for node in model.graph:
        if node.op_type in _COUNTING and _inputs_of(node.inputs):
            _refuse(f"node {node.name} ({node.op_type}) counts the tokens it is given")
    return given


def _is_empty(past: ir.Value | None) -> bool:
    """Whether there is no past: older releases want one of no tokens where there is none."""
    shape = past.shape if past is not None else None
    return past is None or (shape is not None and len(shape) == 4 and shape[2] == 0)


def _inputs(model: ir.Model) -> _Given:
    """Which input is which.

    Raises:
        InputError: there are others than token ids, a mask and positions.
    """
    given = {str(v.name): v for v in model.graph.inputs if not v.is_initializer()}
    mask, positions = given.pop(MASK, None), given.pop(POSITIONS, None)
    tokens = list(given.values())
    integers = (ir.DataType.INT64, ir.DataType.INT32)
    if len(tokens) != 1 or any(v and v.dtype not in integers for v in (*tokens, mask, positions)):
        names = ", ".join(str(v.name) for v in model.graph.inputs if not v.is_initializer())
        _refuse(
            f"a model of token ids is wanted, with {MASK} and {POSITIONS} at most, all integers, "
            f"and this one takes {names}"
        )
    return _Given(tokens[0], mask, positions)


def _check_mask(mask: ir.Value | None, biases: Sequence[ir.Value]) -> None:
    """Refuse a mask that is read for more than padding.

    Raises:
        InputError: it is.
    """
    padding = {node for bias in biases for node in _nodes_of(bias)}
    for node in readers(mask) if mask is not None else []:
        if node.op_type != "Shape" and node not in padding:
            _refuse(f"{MASK} says more than what is padding: node {node.name} reads it")


def _nodes_of(value: ir.Value | None) -> set[ir.Node]:
    """The nodes that `value` is computed by."""
    pending = [value.producer()] if value is not None else []
    found: set[ir.Node] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [each.producer() for each in node.inputs if each is not None]
    return found


def _ask_tokens(mask: ir.Value, tokens: ir.Value) -> None:
    """Let the tokens say how many are new: the mask is longer from now on."""
    for node in readers(mask, "Shape"):
        node.replace_input_with(0, tokens)


def _refuse(why: str) -> None:
    raise InputError(
        f"--add-cache: {why}; a decoder can be exported with past_key_values instead (without "
        "--add-cache, qgraph explain says of the result what was fused and what was not)"
    )


def _table(node: ir.Node) -> list[ir.Value | None]:
    """Cosines and sines by which an attention turns heads."""
    return [GROUPED_QUERY.read(node, "cos_cache"), GROUPED_QUERY.read(node, "sin_cache")]


def _inputs_of(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    """The inputs of the model that values are computed from."""
    pending, seen = [value for value in values if value is not None], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        pending += [each for each in node.inputs if each is not None] if node is not None else []
    return {value for value in seen if value.is_graph_input() and not value.is_initializer()}


def _input(
    model: ir.Model, name: str, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim]
) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    model.graph.inputs.append(value)
    return value


def _cached(
    shared: FusionContext,
    node: ir.Node,
    layer: int,
    source: Source,
    positions: ir.Value,
    batch: int | ir.SymbolicDim,
) -> None:
    """The attention of one layer with its cache, in place of the one without."""
    model, builder = shared.model, Builder(shared, node)
    size, pairs = head_size(node), node.attributes.get_int("kv_num_heads", 0)
    query = node.inputs[0]
    if size is None or query is None or query.dtype is None:
        _refuse(f"the size of a head of {node.name} is not known")
        return
    names = [f"{layer}.{part}" for part in ("key", "value")]
    dims = [batch, pairs, _PAST, size]
    pasts = [_input(model, f"past_key_values.{name}", query.dtype, dims) for name in names]
    lengths = source.lengths(builder)
    own = GROUPED_QUERY.inputs
    told: dict[Told, ir.Value | None] = {what: GROUPED_QUERY.read(node, what) for what in own}
    told["past_key"], told["past_value"] = pasts
    told["seqlens_k"], told["total_sequence_length"] = lengths.last, lengths.total
    plain = {key: each.value for key, each in node.attributes.items()}
    if shared.capabilities.oldest >= QUERY_LENGTHS:
        turns = node.attributes.get_int("do_rotary", 0)
        told["position_ids"] = positions if turns else None
        told["query_seqlens"] = lengths.new
    elif plain.pop("do_rotary", 0):  # it would take a first prompt's positions to be 0, 1, …
        turning = int(plain.pop("rotary_interleaved", 0))
        parts = _turned(builder, node, positions, size, turning)
        told["query"], told["key"], told["value"] = parts
        told["cos_cache"] = told["sin_cache"] = None
    told["attention_bias"] = bias_of(builder, source, None, query.dtype)
    given = GROUPED_QUERY.arranged(told)
    while given[-1] is None:
        given.pop()
    presents = [
        ir.Value(type=ir.TensorType(query.dtype), shape=ir.Shape([batch, pairs, _TOTAL, size]))
        for _ in names
    ]
    made, *present = builder.ops(
        CACHING, given, [node.outputs[0], *presents], domain=MICROSOFT, attributes=plain
    )
    for value, name in zip(present, names, strict=True):
        value.name = f"present.{name}"
        model.graph.outputs.append(value)
    new = made.producer()
    assert new is not None
    old, new.name = node.name, f"{node.name}/old"
    result, kind = node.outputs[0], node.outputs[0].name
    result.replace_all_uses_with(made, replace_graph_outputs=True)
    result.name, made.name = f"{kind}/old", kind
    model.graph.remove(node, safe=True)
    new.name = old


def _turned(
    builder: Builder, node: ir.Node, positions: ir.Value, size: int, interleaved: int
) -> list[ir.Value | None]:
    """Queries, keys and values of an attention, the first two turned in front of it."""
    counts = [node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads")]
    query, key, value = node.inputs[:3]
    cos, sin = _table(node)
    assert query is not None and cos is not None
    if key is None:
        dims = [each * size for each in (*counts, counts[1])]
        shapes = [ir.Shape([*(query.shape or (None, None))[:2], dim]) for dim in dims]
        like = [ir.Value(type=query.type, shape=shape) for shape in shapes]
        lengths = builder.constant("heads", np.array(dims, np.int64))
        query, key, value = builder.ops("Split", [query, lengths], like, attributes={"axis": -1})
    half = cos.shape[1] if cos.shape is not None else 0
    part = 0 if not isinstance(half, int) or 2 * half == size else 2 * half
    pair = [
        turned(builder, heads, count, positions, (cos, sin), interleaved=interleaved,
               part=part)
        for heads, count in zip((query, key), counts, strict=True)
    ]  # fmt: skip
    return [*pair, value]
