"""One linear as a model of its own: cut out of a model, or made of random floats."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.constants import constant_value
from qgraph.scopes import bodies, scopes
from qgraph.sites import Site

X, Y = "x", "y"
"""The names of the input `[M, K]` and the output `[M, N]`."""


def cut(model: ir.Model, site: Site) -> ir.Model | None:
    """The site of `model` alone, from its activation to its result, with its stored weight.

    None where the activation is a constant, or the result needs more than it and constants.
    """
    copy = model.clone()
    values = {value.name: value for value in copy.graph.inputs}
    for scope in scopes(copy.graph):
        values |= {value.name: value for node in scope for value in node.outputs}
    result, read = values.get(site.output.name), values.get(site.activation.name)
    if result is None or read is None or site.dtype is None:
        return None
    found = _between(read, result)
    if found is None:
        return None
    needed, constants = found
    for scope in scopes(copy.graph):
        scope.outputs.clear()
    for node in needed:
        assert isinstance(node.graph, ir.Graph)
        node.graph.remove(node)
        for value in node.outputs:  # shapes may have had other axes in front
            value.shape = None
    for value in constants:
        assert value.graph is not None and value.name is not None
        del value.graph.initializers[value.name]
    x = ir.Value(name=X, shape=ir.Shape(["M", site.k]), type=ir.TensorType(site.dtype))
    read.replace_all_uses_with(x)
    result.name, result.shape = Y, ir.Shape(["M", site.n])
    result.type = result.type or ir.TensorType(site.dtype)
    graph = ir.Graph(
        [x], [result], nodes=needed, initializers=constants, name="linear",
        opset_imports=dict(copy.graph.opset_imports),
    )  # fmt: skip
    functions = list(copy.functions.values())
    return ir.Model(graph, ir_version=copy.ir_version, functions=functions)


def _between(start: ir.Value, result: ir.Value) -> tuple[list[ir.Node], list[ir.Value]] | None:
    """The nodes from one value to another, in order, and the constants that they read."""
    order: dict[ir.Node, None] = {}
    constants: dict[ir.Value, None] = {}

    def visit(value: ir.Value) -> bool:
        if value is start:
            return True
        if value.is_initializer():
            constants[value] = None
            return True
        node = value.producer()
        if node is None or bodies(node):
            return False
        if node not in order:
            if not all(visit(each) for each in node.inputs if each is not None):
                return False
            order[node] = None
        return True

    return (list(order), list(constants)) if visit(result) and order else None


def float_linear(n: int, k: int, dtype: ir.DataType) -> ir.Model:
    """MatMul with a random weight `[K, N]` of a float type."""
    array = np.random.default_rng(0).standard_normal((k, n), dtype=np.float32) / np.sqrt(k)
    weight = ir.tensor(array.astype(dtype.numpy()), name="weight")
    constant = constant_value("weight", weight)
    x = ir.Value(name=X, shape=ir.Shape(["M", k]), type=ir.TensorType(dtype))
    node = ir.Node("", "MatMul", [x, constant], name="linear")
    y = node.outputs[0]
    y.name, y.shape, y.type = Y, ir.Shape(["M", n]), ir.TensorType(dtype)
    graph = ir.Graph(
        [x], [y], nodes=[node], initializers=[constant], opset_imports={"": 21}, name="linear"
    )
    return ir.Model(graph, ir_version=10)
