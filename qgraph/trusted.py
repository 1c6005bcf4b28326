"""Which functions of the `qgraph` domain are ours: by their bodies, never by their names."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from qgraph import registry
from qgraph.formats.linear_function import linear_function


def trusted(function: ir.Function) -> bool:
    """Whether `function` has exactly the body that a format of ours generates."""
    opset = function.graph.opset_imports.get("", 0)
    wanted = _generated(opset).get(function.name)
    return wanted is not None and _spelled(function) == wanted


@functools.cache
def _generated(opset: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in registry.names("format"):
        fmt = registry.load("format", name)
        for function in (fmt.function(opset), linear_function(fmt, opset)):
            found[function.name] = _spelled(function)
    return found


def _spelled(function: ir.Function) -> bytes:
    """The function's meaning as bytes, without documentation and metadata."""
    proto = ir.serde.serialize_function(function)
    proto.ClearField("doc_string")
    proto.ClearField("metadata_props")
    proto.ClearField("value_info")
    _normalize(proto.node)
    return bytes(proto.SerializeToString(deterministic=True))


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
