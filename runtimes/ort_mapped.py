"""Graphs whose weights lie in files, handed to ONNX Runtime without a copy of the weights."""

from __future__ import annotations

from typing import Any, TypeAlias

import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.model_tensors import replaced_tensors

Mapped: TypeAlias = "dict[str, NDArray[Any]]"

_NATIVE = frozenset(
    getattr(ir.DataType, name)
    for name in "FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64".split()
)
"""The types that numpy has itself, of which ONNX Runtime takes arrays."""


def mapped_weights(model: ir.Model) -> Mapped:
    """The constants of the main graph that lie in data files, by name: views of the mapped files.

    Those of bodies are not among them (ONNX Runtime replaces constants of the main graph alone),
    nor those that a caller may override.
    """
    given = {value.name for value in model.graph.inputs}
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        native = isinstance(tensor, ir.ExternalTensor) and tensor.dtype in _NATIVE
        if native and tensor is not None and tensor.size and name not in given:
            found[name] = tensor.numpy()
    return found


def around(model: ir.Model, mapped: Mapped) -> bytes:
    """The model as bytes, which hold every constant but those that are mapped."""

    def held(tensor: ir.TensorProtocol, name: str, main: bool) -> ir.TensorProtocol:
        if (main and name in mapped) or not isinstance(tensor, ir.ExternalTensor):
            return tensor
        return ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=tensor.name)

    with replaced_tensors(model, held):
        content: bytes = ir.serde.serialize_model(model).SerializeToString()
    return content
