"""The scopes of a graph: itself and the bodies of its If, Loop and Scan nodes, at any depth."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def bodies(node: ir.Node) -> tuple[ir.Graph, ...]:
    """The graphs that a node holds in its attributes."""
    found: tuple[ir.Graph, ...] = ()
    for attr in node.attributes.data.values():
        if attr.type in _GRAPHS and not attr.is_ref():
            one = attr.type == ir.AttributeType.GRAPH
            found += (attr.as_graph(),) if one else tuple(attr.as_graphs())
    return found


def is_onnx(node: ir.Node, op_type: str) -> bool:
    """Whether it is that op of ONNX's own, which has the inputs that its schema asks for."""
    return node.op_type == op_type and not node.domain


def scopes(graph: ir.Graph) -> list[ir.Graph]:
    """`graph`, then the bodies in it in the order of their nodes, each followed by its own."""
    found = [graph]
    for node in graph:
        for body in bodies(node):
            found.extend(scopes(body))
    return found


def nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of `graph`, each followed by those of its bodies, at any depth."""
    for node in graph:
        yield node
        for body in bodies(node):
            yield from nodes(body)
