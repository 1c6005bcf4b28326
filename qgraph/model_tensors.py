"""Every tensor of a model: initializers of all graphs, tensors in node attributes.

Attributes of the bodies of functions are included; ONNX functions have no initializers, but
the graphs in their attributes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import onnx_ir as ir

from qgraph.scopes import nodes, scopes

_TENSORS = frozenset({ir.AttributeType.TENSOR, ir.AttributeType.TENSORS})


def all_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """The tensors of `model`, in the order in which it declares them."""
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for node in all_nodes(model):
        for attribute in node.attributes.data.values():
            if attribute.type in _TENSORS:
                yield from _attribute_tensors(attribute)


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every graph in an attribute, those of function bodies too."""
    yield from scopes(model.graph)
    for function in model.functions.values():
        yield from scopes(function.graph)[1:]


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of every graph and function."""
    yield from nodes(model.graph)
    for function in model.functions.values():
        yield from nodes(function.graph)


def has_unread(model: ir.Model) -> bool:
    """Whether the model has initializers that nothing in it reads."""
    return any(True for _ in _unread(model))


def remove_unread(model: ir.Model) -> None:
    """Remove the initializers that nothing in the model reads, in place."""
    for graph, name in list(_unread(model)):
        del graph.initializers[name]


def _unread(model: ir.Model) -> Iterator[tuple[ir.Graph, str]]:
    read = {id(value) for node in all_nodes(model) for value in node.inputs}
    for graph in all_graphs(model):
        ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
        for name, value in graph.initializers.items():
            if id(value) not in read and id(value) not in ends:
                yield graph, name


@contextlib.contextmanager
def replaced_tensors(
    model: ir.Model, replace: Callable[[ir.TensorProtocol, str, bool], ir.TensorProtocol]
) -> Iterator[None]:
    """Every tensor is `replace(tensor, name, is_main_initializer)` meanwhile, then as before."""
    values: list[tuple[ir.Value, ir.TensorProtocol]] = []
    attributes: list[tuple[ir.Node, ir.Attr]] = []
    try:
        for graph in all_graphs(model):
            for name, value in graph.initializers.items():
                tensor = value.const_value
                if tensor is not None:
                    values.append((value, tensor))
                    value.const_value = replace(tensor, name, graph is model.graph)
        for node in all_nodes(model):
            for name, attribute in list(node.attributes.data.items()):
                if attribute.type not in _TENSORS:
                    continue
                if tensors := list(_attribute_tensors(attribute)):
                    attributes.append((node, attribute))
                    new = [replace(tensor, tensor.name or "", False) for tensor in tensors]
                    one = attribute.type == ir.AttributeType.TENSOR
                    node.attributes[name] = ir.Attr(
                        name,
                        attribute.type,
                        new[0] if one else new,
                        doc_string=attribute.doc_string,
                    )
        yield
    finally:
        for value, tensor in values:
            value.const_value = tensor
        for node, attribute in attributes:
            node.attributes[attribute.name] = attribute


def _attribute_tensors(attribute: ir.Attr) -> Iterator[ir.TensorProtocol]:
    if attribute.is_ref():
        return
    if attribute.type == ir.AttributeType.TENSOR:
        yield attribute.as_tensor()
    elif attribute.type == ir.AttributeType.TENSORS:
        yield from attribute.as_tensors()
