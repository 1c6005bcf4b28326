"""Canonical form, stated: what every pass may rely on and must leave behind.

Each rule is one check below; an error names the node or value that breaks it.
"""

from __future__ import annotations

import onnx_ir as ir

from qgraph.constants import FLOATS
from qgraph.errors import GraphError
from qgraph.formats.onnx_function import DOMAIN
from qgraph.scopes import bodies


def verify(model: ir.Model) -> None:
    """Check that `model` is in canonical form; for each 1000 nodes this takes a few ms.

    Raises:
        GraphError: it is not; the message names the first node or value that breaks a rule.
    """
    for function in model.functions.values():
        if function.domain != DOMAIN:
            raise GraphError(
                f"function {function.domain}::{function.name} is left: functions other than "
                f"those of domain {DOMAIN!r} are inlined at capture"
            )
    _Walk(model).graph(model.graph)


class _Walk:
    """One walk over all scopes: what is defined so far, which names are in use."""

    def __init__(self, model: ir.Model) -> None:
        self.main = model.graph
        self.imports = model.graph.opset_imports
        self.functions = model.functions
        self.defined: set[ir.Value] = set()
        self.value_names: dict[str, ir.Value] = {}
        self.node_names: dict[str, ir.Node] = {}

    def graph(self, graph: ir.Graph) -> None:
        """Check one scope and the bodies in it; what it defines ends with it."""
        own: list[ir.Value] = []
        for value in graph.inputs:
            if value.is_initializer():
                raise GraphError(f"value {value.name!r} is both a graph input and an initializer")
            self.define(value, own)
        for key, value in graph.initializers.items():
            self.initializer(key, value, graph)
            self.define(value, own)
        for node in graph:
            self.node(node, graph)
            for value in node.outputs:
                self.output_of(node, value, own)
        known = set(own)
        for value in graph.outputs:
            if value not in known:
                raise GraphError(
                    f"output {value.name!r} of {_called(graph, self.main)} is not produced there"
                )
        self.defined.difference_update(own)

    def define(self, value: ir.Value, own: list[ir.Value]) -> None:
        """Put a value in scope under its name, which no other value of any scope has."""
        name = value.name
        if not name:
            producer = value.producer()
            raise GraphError(
                f"a value without a name: output of node {producer.name!r}"
                if producer is not None
                else "a graph input without a name"
            )
        if self.value_names.setdefault(name, value) is not value or value in self.defined:
            raise GraphError(f"value name {name!r} is defined twice; names are unique in a model")
        self.defined.add(value)
        own.append(value)

    def initializer(self, key: str, value: ir.Value, graph: ir.Graph) -> None:
        """Check that a constant has its data, under its own name, in the scope where it belongs."""
        if key != value.name:
            raise GraphError(f"initializer {key!r} holds the value {value.name!r}")
        tensor = value.const_value
        if tensor is None:
            raise GraphError(f"initializer {key!r} has no data")
        if value.producer() is not None:
            raise GraphError(f"initializer {key!r} is also the output of a node")
        if graph is not self.main and tensor.dtype in FLOATS and len(tensor.shape) >= 2:
            raise GraphError(
                f"weight {key!r} {list(tensor.shape)} lies in {_called(graph, self.main)}; "
                "float constants of rank 2 and more belong into the main graph"
            )

    def node(self, node: ir.Node, graph: ir.Graph) -> None:
        """Check a node's name, op and inputs, then its bodies."""
        if not node.name:
            raise GraphError(f"a {node.op_type} node without a name")
        if self.node_names.setdefault(node.name, node) is not node:
            raise GraphError(f"two nodes are named {node.name!r}; names are unique in a model")
        if node.graph is not graph:
            raise GraphError(f"node {node.name!r} says that it belongs to another graph")
        if node.domain not in self.imports:
            raise GraphError(
                f"node {node.name!r} is a {node.op_type} of domain {node.domain!r}, which the "
                f"model does not import (it imports {sorted(self.imports)})"
            )
        if node.domain == DOMAIN and node.op_identifier() not in self.functions:
            raise GraphError(
                f"node {node.name!r} calls {DOMAIN}::{node.op_type}, a function that is not there"
            )
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self.defined:
                raise GraphError(_undefined(node, index, value))
        if node.op_type == "Constant" and node.domain == "" and not _holds_strings(node):
            raise GraphError(f"node {node.name!r} is a Constant; constants are initializers")
        for body in bodies(node):
            self.graph(body)

    def output_of(self, node: ir.Node, value: ir.Value, own: list[ir.Value]) -> None:
        """Define an output; one without a name is left out and must have no reader."""
        if value.name or value.uses() or value.is_graph_output():
            self.define(value, own)
        if value.producer() is not node:
            raise GraphError(f"output {value.name!r} of node {node.name!r} says otherwise")


def _holds_strings(node: ir.Node) -> bool:
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.TENSOR:
            return attr.as_tensor().dtype == ir.DataType.STRING
        return attr.type in (ir.AttributeType.STRING, ir.AttributeType.STRINGS)
    return False


def _undefined(node: ir.Node, index: int, value: ir.Value) -> str:
    reads = f"input {index} of node {node.name!r} ({node.op_type}) is {value.name!r}"
    producer = value.producer()
    if producer is None:
        return f"{reads}, which nothing defines: no node, input or initializer in scope"
    if producer.graph is None:
        return f"{reads}, made by node {producer.name!r}, which is no longer in the graph"
    return f"{reads}, made by node {producer.name!r} in another scope or later in the graph"


def _called(graph: ir.Graph, main: ir.Graph) -> str:
    return "the main graph" if graph is main else f"body {graph.name!r}"
