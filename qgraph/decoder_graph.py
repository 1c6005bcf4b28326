"""What a decoder's graph says of how it may be run."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.language_model import table_rows
from qgraph.row_unfolding import ways

CACHING = GROUPED_QUERY.op_type
"""The op of ONNX Runtime that writes new keys and values behind those it is given, in place."""
CACHE_BITS = "kv_cache_bit_width"
"""Its attribute that says how many bits a code of a quantized cache has."""


def names_cache(name: str | None, rank: int) -> bool:
    """Whether an input or output of this name and rank is a cache of keys and values.

    A number of what is in one has fewer dimensions.
    """
    return rank > 2 and (name or "").lower().startswith(("past", "cache", "present"))


def has_cache(model: ir.Model) -> bool:
    """Whether a graph is given a cache."""
    return any(
        names_cache(value.name, len(value.shape))
        for value in model.graph.inputs
        if value.shape is not None
    )


def shares_cache(model: ir.Model, pasts: Iterable[str], presents: Iterable[str]) -> bool:
    """Whether past and present may be one buffer of more tokens than were read.

    Each past must be read by one GroupQueryAttention and nothing else (whose number of tokens
    then follows from the mask), and each present be written by one.
    """
    given, made = list(pasts), list(presents)
    return all(_shares(way, given, made) for way in ways(model))


def _shares(model: ir.Model, pasts: Iterable[str], presents: Iterable[str]) -> bool:
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    return all(_only_attended(inputs[name]) for name in pasts) and all(
        _is_written(outputs[name]) for name in presents
    )


def _only_attended(past: ir.Value) -> bool:
    readers = [node for node, _ in past.uses()]
    return (
        not past.is_graph_output()
        and len(readers) == 1
        and readers[0].op_type == CACHING
        and past in GROUPED_QUERY.pasts(readers[0])
    )


def _is_written(present: ir.Value) -> bool:
    node = present.producer()
    if node is None or node.op_type != CACHING:
        return False
    return present in GROUPED_QUERY.presents(node)


def head_sizes(model: ir.Model) -> dict[str, int]:
    """The last axis of a past that attention reads, by its name, where the graph says it.

    It is the size of a head, or half of it where two channels lie in a byte.
    """
    found: dict[str, int] = {}
    for value, node in cache_readers(model):
        size = head_size(node)
        if size is not None and value.name is not None:
            found[value.name] = size // 2 if cache_bits(node) == 4 else size
    return found


def cache_readers(model: ir.Model) -> list[tuple[ir.Value, ir.Node]]:
    """Every past of the graph that an attention reads, with that attention."""
    return [
        (value, node)
        for value in ways(model)[0].graph.inputs
        for node, _ in value.uses()
        if node.op_type == CACHING and value in GROUPED_QUERY.pasts(node)
    ]


def cache_bits(attention: ir.Node) -> int:
    """Bits of a code in the cache of an attention; 0 where the cache holds floats."""
    return attention.attributes.get_int(CACHE_BITS, 0)


def head_size(attention: ir.Node) -> int | None:
    """Of its query's width, which is all heads' in a packed one."""
    query, key = attention.inputs[:2]
    heads, pairs = (_integer(attention, name) for name in ("num_heads", "kv_num_heads"))
    size = None if query is None else width(query)
    if size is None or heads is None or pairs is None:
        return None
    return size // (heads if key is not None else heads + 2 * pairs)


def width(value: ir.Value) -> int | None:
    """The size of the last axis, which a linear without inferred shapes has from its weight."""
    if value.shape is not None:
        return value.shape[-1] if isinstance(value.shape[-1], int) else None
    node = value.producer()
    if node is None or node.op_type != "MatMul":
        return _integer(node, "N")
    weight = node.inputs[1]
    sizes = [] if weight is None else _sizes(weight)
    return sizes[-1] if sizes else None


def _rows(table: ir.Value) -> int | None:
    """The size of the first axis of a constant, or of what a graph computes of constants."""
    if table.const_value is not None:
        return _sizes(table)[0]
    size = table.shape[0] if table.shape is not None and len(table.shape) else None
    return size if isinstance(size, int) else None


def _sizes(constant: ir.Value) -> list[int]:
    """The shape of a constant."""
    tensor = constant.const_value
    return [] if tensor is None else [int(dim) for dim in tensor.shape.numpy()]


def _integer(node: ir.Node | None, name: str) -> int | None:
    found = None if node is None else node.attributes.get(name)
    return None if found is None else found.as_int()


def most_positions(model: ir.Model, positions: str | None) -> int | None:
    """How many positions the graph's tables have; None where it has none.

    They are the cosines that attention rotates by, and the table of learned positions.
    """
    found = []
    for node in (node for way in ways(model) for node in way.graph):
        if node.op_type == CACHING:
            table = GROUPED_QUERY.read(node, "cos_cache")
            rows = None if table is None else _rows(table)
            found += [rows] if rows is not None else []
    if positions is not None:
        rows = table_rows(model, positions)
        found += [rows] if rows is not None else []
    return min(found, default=None)
