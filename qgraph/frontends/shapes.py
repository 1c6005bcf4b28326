"""Shape inference on a skeleton of the model: no weight is read, copied or serialized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from qgraph.errors import one_line
from qgraph.frontends.notes import Note
from qgraph.scopes import scopes

_SMALL = 1024
"""Constants of up to this many bytes go along with their values: shapes are computed from them."""


def infer_shapes(model: ir.Model) -> list[Note]:
    """Fill in the types and shapes that are missing; what the model says itself stays.

    Names must be unique across scopes. A failure is a note: passes then know less.
    """
    try:
        with _skeleton(model):
            proto = ir.serde.serialize_model(model)
        inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True)
    except Exception as error:  # whatever the C++ side or the serializer finds wrong
        reason = f"shape inference failed: {one_line(error)}"
        return [Note("SHAPES_NOT_INFERRED", model.graph.name or "", reason)]
    found = {info.name: info.type for info in _infos(inferred.graph)}
    for scope in scopes(model.graph):
        for value in (*scope.inputs, *(out for node in scope for out in node.outputs)):
            if value.name in found and not _is_known(value):
                _merge(value, found[value.name])
    return []


@contextlib.contextmanager
def _skeleton(model: ir.Model) -> Iterator[None]:
    """For a while: large constants stand for nothing, small ones have their values inline."""
    values: list[tuple[ir.Value, ir.TensorProtocol]] = []
    attributes: list[tuple[ir.Node, ir.Attr]] = []
    try:
        for scope in scopes(model.graph):
            for value in scope.initializers.values():
                if value.const_value is not None:
                    values.append((value, value.const_value))
                    value.const_value = _stand_in(value.const_value)
            for node in scope:
                for attr in tuple(node.attributes.values()):
                    if attr.type == ir.AttributeType.TENSOR and not attr.is_ref():
                        attributes.append((node, attr))
                        node.attributes.add(ir.AttrTensor(attr.name, _stand_in(attr.as_tensor())))
        yield
    finally:
        for value, tensor in values:
            value.const_value = tensor
        for node, attr in attributes:
            node.attributes.add(attr)


def _stand_in(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor as the skeleton has it; a large one becomes a reference that no one follows."""
    if tensor.dtype == ir.DataType.STRING:
        return tensor
    if tensor.nbytes > _SMALL:
        name = tensor.name or ""
        return ir.ExternalTensor(
            "-", 0, 0, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
        )
    if isinstance(tensor, ir.ExternalTensor):
        array = tensor.numpy().copy()
        tensor.release()
        return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
    return tensor


def _infos(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.value_info
    yield from graph.output
    for node in graph.node:
        for attr in node.attribute:
            for body in (attr.g, *attr.graphs) if attr.HasField("g") else attr.graphs:
                yield from _infos(body)


def _is_known(value: ir.Value) -> bool:
    return (
        value.type is not None and value.shape is not None and not any(map(_is_blank, value.shape))
    )


def _merge(value: ir.Value, found: onnx.TypeProto) -> None:
    if value.type is None:
        value.type = ir.serde.deserialize_type_proto_for_type(found)
    shape = ir.serde.deserialize_type_proto_for_shape(found)
    if shape is None or value.shape is None:
        value.shape = value.shape if shape is None else ir.Shape(map(_dim, shape))
    elif len(shape) == len(value.shape):
        both = zip(value.shape, shape, strict=True)
        value.shape = ir.Shape(_dim(new) if _is_blank(old) else old for old, new in both)


def _is_blank(dim: object) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def _dim(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """The dimension as found, unless its name is one that inference made up."""
    made_up = isinstance(dim, ir.SymbolicDim) and str(dim.value).startswith("unk__")
    return ir.SymbolicDim(None) if made_up else dim
