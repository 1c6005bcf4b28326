"""Which functions of the `qgraph` domain are ours: by their bodies, never by their names."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from qgraph.formats.base import named


def trusted(function: ir.Function) -> bool:
    """Whether `function` has exactly the body that a format of ours generates."""
    wanted = _generated(function.name, function.graph.opset_imports.get("", 0))
    return wanted is not None and _spelled(function) == wanted


@functools.cache
def _generated(name: str, opset: int) -> bytes | None:
    """The meaning of our function of this name; None where no format has one."""
    linear = name.startswith("Linear")
    fmt = named(name.replace("Linear", "Dequantize", 1) if linear else name)
    if fmt is None:
        return None
    return _spelled(fmt.linear(opset) if linear else fmt.function(opset))


def _spelled(function: ir.Function) -> bytes:
    """The function's meaning as bytes, without documentation and metadata."""
    proto = ir.serde.serialize_function(_with_data(function))
    proto.ClearField("doc_string")
    proto.ClearField("metadata_props")
    proto.ClearField("value_info")
    _normalize(proto.node)
    return bytes(proto.SerializeToString(deterministic=True))


def _with_data(function: ir.Function) -> ir.Function:
    """The function, its constants in memory: those of a saved model may lie in its data file."""
    copy = function.clone()
    for node in ir.traversal.RecursiveGraphIterator(copy):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                tensor = attribute.as_tensor()
                if isinstance(tensor, ir.ExternalTensor):
                    node.attributes[name] = ir.AttrTensor(name, ir.tensor(tensor.numpy().copy()))
    return copy


def _normalize(nodes: Iterable[onnx.NodeProto]) -> None:
    """Spell constants one way (raw data), in all bodies; drop what means nothing."""
    for node in nodes:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        for attribute in node.attribute:
            if attribute.HasField("t"):
                array = onnx.numpy_helper.to_array(attribute.t)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array))
            if attribute.HasField("g"):
                _normalize(attribute.g.node)
