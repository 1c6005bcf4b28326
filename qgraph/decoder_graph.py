"""What a decoder's graph says of how it may be run, and the logits of the last token alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from qgraph.language_model import table_rows

CACHING = "GroupQueryAttention"
"""The op of ONNX Runtime that writes new keys and values behind those it is given, in place."""
CACHE_BITS = "kv_cache_bit_width"
"""Its attribute that says how many bits a code of a quantized cache has."""
_PAST, _PRESENT = slice(3, 5), slice(1, 3)
_COSINES = 7
_LINEARS = {"MatMul": 2, "Gemm": 2, "MatMulNBits": 3, "MatMulBnb4": 3, "MatMulBlockQuantizedFp": 3}
_ELEMENTWISE = ("Cast", "Identity", "Mul", "Div", "Add", "Tanh")


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
        and past in readers[0].inputs[_PAST]
    )


def _is_written(present: ir.Value) -> bool:
    node = present.producer()
    return node is not None and node.op_type == CACHING and present in node.outputs[_PRESENT]


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
        for value in model.graph.inputs
        for node, _ in value.uses()
        if node.op_type == CACHING and value in node.inputs[_PAST]
    ]


def cache_bits(attention: ir.Node) -> int:
    """Bits of a code in the cache of an attention; 0 where the cache holds floats."""
    return attention.attributes.get_int(CACHE_BITS, 0)


def head_size(attention: ir.Node) -> int | None:
    """Of its query's width, which is all heads' in a packed one."""
    query, key = attention.inputs[:2]
    heads, pairs = (_integer(attention, name) for name in ("num_heads", "kv_num_heads"))
    width = None if query is None else _width(query)
    if width is None or heads is None or pairs is None:
        return None
    return width // (heads if key is not None else heads + 2 * pairs)


def _width(value: ir.Value) -> int | None:
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
    for node in model.graph:
        if node.op_type == CACHING and len(node.inputs) > _COSINES:
            table = node.inputs[_COSINES]
            rows = None if table is None else _rows(table)
            found += [rows] if rows is not None else []
    if positions is not None:
        rows = table_rows(model, positions)
        found += [rows] if rows is not None else []
    return min(found, default=None)


def last_logits(model: ir.Model, logits: str) -> bool:
    """Change a decoder's graph so that its head is given the last token of each row alone.

    A prompt's other logits are a large matrix that nothing reads. Whether the graph has a head
    that this can be done to: a linear on an activation `[B, T, K]`, behind it element-wise ops
    with constants.
    """
    output = next(value for value in model.graph.outputs if value.name == logits)
    node = output.producer()
    chain = [output]
    while node is not None and node.op_type in _ELEMENTWISE:
        varying = [v for v in node.inputs if v is not None and v.const_value is None]
        if len(varying) != 1 or _is_read_elsewhere(varying[0], node):
            return False
        chain.append(varying[0])
        node = varying[0].producer()
    if node is None or node.op_type not in _LINEARS or node.graph is not model.graph:
        return False
    x = node.inputs[0]
    others = node.inputs[1 : _LINEARS[node.op_type]]
    # A linear's output has the rank of its input, which need not have a shape of its own.
    shape = None if x is None else (x.shape or chain[-1].shape)
    if x is None or shape is None or len(shape) != 3 or not all(map(_constant, others)):
        return False
    last = ir.Value(name=f"{node.name}/last", const_value=ir.tensor(np.array([-1])))
    last.type, last.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    model.graph.register_initializer(last)
    gather = ir.Node("", "Gather", [x, last], {"axis": ir.AttrInt64("axis", 1)})
    gather.name = f"{node.name}/last_token"
    taken = gather.outputs[0]
    taken.name, taken.type = f"{node.name}/last_token_output", x.type
    if x.shape is not None:
        taken.shape = ir.Shape([x.shape[0], 1, x.shape[2]])
    model.graph.insert_before(node, gather)
    node.replace_input_with(0, taken)
    for value in chain:
        if value.shape is not None and len(value.shape) == 3:
            value.shape = ir.Shape([value.shape[0], 1, value.shape[2]])
    return True


def _is_read_elsewhere(value: ir.Value, reader: ir.Node) -> bool:
    return value.is_graph_output() or any(node is not reader for node, _ in value.uses())


def _constant(value: ir.Value | None) -> bool:
    """Whether a weight is one; a head that is the table turned around has one, too."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in ("Transpose", "Identity", "Cast"):
            return False
        value = node.inputs[0]
    return value is not None
