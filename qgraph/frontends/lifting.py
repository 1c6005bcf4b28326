"""Constants as initializers, and the weights of bodies in the main graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.constants import FLOATS, constant_value
from qgraph.frontends.naming import Names, add_alias
from qgraph.scopes import scopes


def is_body_weight(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant of a body belongs into the main graph: floats of rank 2 and more.

    Shape-like constants stay in their scope: shape inference does not look outside.
    """
    return tensor.dtype in FLOATS and len(tensor.shape) >= 2


def lift_constants(model: ir.Model, names: Names) -> None:
    """Make Constant nodes initializers of their scope, then weights of bodies those of the graph.

    Constants of strings stay nodes. Names of values must be unique across scopes.
    """
    walk = scopes(model.graph)
    for scope in walk:
        for node in list(scope):
            tensor = constant_of(node)
            if tensor is None:
                continue
            if node.outputs[0].is_graph_output():
                _copy_output(model, node.outputs[0], names)
            _to_initializer(scope, node, tensor)
    for body in walk[1:]:
        for value in list(body.initializers.values()):
            if value.const_value is not None and is_body_weight(value.const_value):
                if value.is_graph_output():
                    _copy_output(model, value, names)
                del body.initializers[value.name or ""]
                model.graph.register_initializer(value)


def constant_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The numbers that a Constant node holds, or None for other nodes and for strings."""
    if node.op_type != "Constant" or node.domain != "":
        return None
    if len(node.attributes) != 1 or len(node.outputs) != 1:
        return None
    (attr,) = node.attributes.values()
    if attr.is_ref():
        return None
    if attr.type == ir.AttributeType.TENSOR:
        tensor = attr.as_tensor()
        return None if tensor.dtype == ir.DataType.STRING else tensor
    if attr.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
        return ir.Tensor(np.array(attr.value, dtype=np.int64))
    if attr.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        return ir.Tensor(np.array(attr.value, dtype=np.float32))
    return None


def _to_initializer(scope: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    """Replace a Constant node by an initializer under the name of its output."""
    output = node.outputs[0]
    tensor.name = output.name
    value = constant_value(output.name or "", tensor)
    value.metadata_props.update(output.metadata_props)
    value.meta.update(output.meta)
    add_alias(value, node.name or "")
    output.replace_all_uses_with(value)
    scope.remove(node, safe=True)
    scope.register_initializer(value)


def _copy_output(model: ir.Model, value: ir.Value, names: Names) -> None:
    """Let a copy of `value`, which is an output of its scope, be that output.

    Bodies hand over outputs by position, so there the constant keeps its name; the outputs of
    the main graph keep theirs.
    """
    scope = value.graph
    assert scope is not None
    name = value.name or ""
    node = ir.Node("", "Identity", [value], name="")
    copy = node.outputs[0]
    copy.type, copy.shape = value.type, value.shape
    if scope is model.graph:
        copy.name, value.name = name, names.fresh(f"{name}/value")
        add_alias(value, name)
    else:
        copy.name = names.fresh(f"{name}/copy")
    for place, output in enumerate(scope.outputs):
        if output is value:
            scope.outputs[place] = copy
    scope.append(node)
