"""Reading a graph by meaning: what a value is made of, and who reads it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qgraph.constants import scalar, small_ints
from qgraph.passes.dims import sizes_of

_SAME = ("Identity", "Cast")


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node of ONNX's own that makes `value`, if it is one of `op_types`."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types and not node.domain else None


def readers(value: ir.Value, *op_types: str) -> list[ir.Node]:
    """The nodes that read `value`, each once; only those of `op_types` where some are given."""
    found = dict.fromkeys(use.node for use in value.uses())
    return [node for node in found if not op_types or node.op_type in op_types]


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`; None where there are more, or it leaves the graph."""
    found = readers(value)
    return found[0] if len(found) == 1 and not value.is_graph_output() else None


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a node of two; `value` itself where it is both."""
    first, second = node.inputs[0], node.inputs[1]
    return second if first is value else first


def is_constant(value: ir.Value | None, depth: int = 6) -> bool:
    """Whether a value depends on constants alone, through at most `depth` nodes."""
    if value is None:
        return False
    if value.is_initializer():
        return not value.is_graph_input()
    node = value.producer()
    if node is None or not node.inputs or not depth:
        return False
    return all(given is None or is_constant(given, depth - 1) for given in node.inputs)


def number(value: ir.Value | None) -> float | None:
    """The one element of a constant, looking through casts of it."""
    node = made_by(value, *_SAME)
    while node is not None:
        value = node.inputs[0]
        node = made_by(value, *_SAME)
    return scalar(value) if value is not None and value.is_initializer() else None


def reduced_axes(node: ir.Node) -> list[int] | None:
    """The axes of a Reduce… node, from its attribute or its input; None where unknown or all."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return small_ints(node.inputs[1])
    attribute = node.attributes.get("axes")
    return [int(axis) for axis in attribute.as_ints()] if attribute is not None else None


def is_last_axis(node: ir.Node) -> bool:
    """Whether a Reduce… node reduces its last axis, and that one alone, and keeps it."""
    axes = reduced_axes(node)
    value = node.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else None
    return (
        axes is not None
        and len(axes) == 1
        and (axes[0] == -1 or (rank is not None and axes[0] == rank - 1))
        and node.attributes.get_int("keepdims", 1) == 1
    )


def last_dim(value: ir.Value | None) -> int | None:
    """The size of a value's last axis, where it is fixed."""
    shape = value.shape if value is not None else None
    size = shape[-1] if shape is not None and len(shape) else None
    return size if isinstance(size, int) else None


def same_shape(first: ir.Value, second: ir.Value) -> bool:
    """Whether two values have one shape whatever the inputs are, as far as the graph says."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return False
    pairs = zip(sizes_of(first.shape) or [], sizes_of(second.shape) or [], strict=True)
    return all(a is not None and a == b for a, b in pairs)


def without_casts(value: ir.Value) -> Iterator[ir.Value]:
    """`value`, then what it was before each cast that made it."""
    yield value
    node = made_by(value, *_SAME)
    while node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
        yield value
        node = made_by(value, *_SAME)
