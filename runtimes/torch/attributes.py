"""A node's attributes as keywords of the function that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.runtimes.torch.missing import NodeError, called
from qgraph.runtimes.torch.onnx_ops.host import DTYPES
from qgraph.runtimes.torch.table import RESERVED, Entry
from qgraph.wording import counted

_GRAPH = ir.AttributeType.GRAPH


def attributes_of(node: ir.Node, entry: Entry, parameters: Mapping[str, int]) -> dict[str, Any]:
    """Name → number, text, tuple, or (number, dtype) for a tensor of one element.

    parameters: the attributes of the function that the node lies in.

    Raises:
        InputError: an attribute that the function does not know, or of a kind that it cannot take.
    """
    found = {}
    for name, attribute in node.attributes.items():
        if attribute.type == _GRAPH:
            continue
        if name not in entry.parameters - RESERVED:
            raise _refusal(node, name, "an attribute that the torch executor does not know")
        if attribute.is_ref():
            if (attribute.ref_attr_name or "") in parameters:
                found[name] = parameters[attribute.ref_attr_name or ""]
        else:
            found[name] = _python(node, attribute)
    return found


def check_arguments(node: ir.Node, entry: Entry, options: Mapping[str, Any]) -> None:
    """Check that a node has the inputs and attributes that its operator needs, and no others.

    Raises:
        InputError: it has not; the message has the node, and the input or attribute.
    """
    if body_attributes(node):
        return  # Its function takes bodies, inputs and captured values as three tuples.
    try:
        entry.signature.bind(*node.inputs, **options)
    except TypeError as error:
        raise NodeError(
            f"{called(node)}: {node.op_type} with {counted(len(node.inputs), 'input')} and the "
            f"attributes {', '.join(node.attributes) or '(none)'}: {error}. Export the model again"
        ) from None


def body_attributes(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """The bodies of a control-flow node, in alphabetical order: else_branch, then_branch."""
    return sorted((a.name, a.as_graph()) for a in node.attributes.values() if a.type == _GRAPH)


def _python(node: ir.Node, attribute: ir.Attr) -> Any:
    kind = attribute.type
    if kind == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        if tensor.size != 1 or tensor.dtype not in DTYPES:
            raise _refusal(node, attribute.name, "a tensor of more than one number")
        return tensor.numpy().reshape(-1)[0].item(), DTYPES[tensor.dtype]
    if kind == ir.AttributeType.STRING:
        return attribute.as_string()
    if kind in (ir.AttributeType.INT, ir.AttributeType.FLOAT):
        return attribute.value
    if kind in (ir.AttributeType.INTS, ir.AttributeType.FLOATS):
        return tuple(attribute.value)
    raise _refusal(node, attribute.name, f"of kind {kind.name}")


def _refusal(node: ir.Node, name: str, what: str) -> InputError:
    return NodeError(
        f"{called(node)}: {node.op_type} has {name!r}, {what}: run the model on ONNX Runtime, "
        "or export it without"
    )
