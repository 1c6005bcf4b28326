"""The constants of a graph as parameters, buffers and Python literals."""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx, nn

from qgraph.constants import open_array
from qgraph.errors import InputError
from qgraph.runtimes.torch.missing import NodeError, called
from qgraph.runtimes.torch.onnx_ops.host import DTYPES

LITERAL = 1024
"""The most elements that a constant has as a Python literal."""

_PART = re.compile(r"[A-Za-z0-9_:/-]+")
"""The names of attributes that stand in generated Python as they are."""

_NUMPY_HAS_NOT = {
    torch.bfloat16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
}

_BYTES: dict[torch.dtype, Any] = {
    torch.int8: np.int8,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}


class Constants:
    """What the constants of a model become on the module `root`, each when it is first asked for.

    A constant that only shapes and axes read never becomes a tensor.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._tensors: dict[ir.Value, ir.TensorProtocol] = {}
        self._literals: dict[ir.Value, Any] = {}
        self._computed: set[ir.Value] = set()
        self._attributes: dict[ir.Value, str] = {}

    def add(self, values: Iterable[ir.Value]) -> None:
        """Take up initializers."""
        for value in values:
            if value.const_value is not None:
                self._tensors[value] = value.const_value

    def add_node(self, node: ir.Node, parameters: Mapping[str, int]) -> bool:
        """Take up a Constant node; False for other nodes.

        Raises:
            InputError: its value is neither a tensor nor numbers.
        """
        if node.op_type != "Constant" or node.domain != "":
            return False
        if len(node.attributes) != 1:
            raise NodeError(
                f"{called(node)}: a Constant has one attribute, its value; this one has "
                f"{', '.join(node.attributes) or 'none'}: export the model again"
            )
        (attribute,) = node.attributes.values()
        value = attribute.value
        if attribute.is_ref():
            value = parameters[attribute.ref_attr_name or ""]
        kind = attribute.type
        if kind == ir.AttributeType.TENSOR:
            tensor = value
        elif kind in (ir.AttributeType.INT, ir.AttributeType.INTS):
            tensor = ir.tensor(np.array(value, np.int64))
        elif kind in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
            tensor = ir.tensor(np.array(value, np.float32))
        else:
            raise NodeError(
                f"{called(node)}: a Constant of {kind.name.lower()}; the torch executor wants "
                "numbers: remove what reads it, or run the model on ONNX Runtime"
            )
        self._tensors[node.outputs[0]] = tensor
        return True

    def know(self, value: ir.Value, literal: Any) -> None:
        """Take up a host value that was computed from literals."""
        self._literals[value] = literal
        self._computed.add(value)

    def is_computed(self, value: ir.Value) -> bool:
        """Whether a value is a literal that no tensor of the model holds."""
        return value in self._computed

    def literal(self, value: ir.Value, floats: bool = False) -> Any:
        """A constant of rank 0 or 1 as number or tuple, or None where it is none (or no integer).

        floats: constants of floats count too.
        """
        if value in self._literals:
            return self._literals[value]
        tensor = self._tensors.get(value)
        if tensor is None or len(tensor.shape) > 1 or tensor.size > LITERAL:
            return None
        if tensor.dtype.is_floating_point() and not floats:
            return None
        if tensor.dtype == ir.DataType.STRING:
            return None
        items = tensor.numpy().tolist()
        literal = tuple(items) if isinstance(items, list) else items
        if not tensor.dtype.is_floating_point():
            self._literals[value] = literal
        return literal

    def attribute(self, value: ir.Value) -> str:
        """The path of a constant's tensor on the module, which is made when first asked for.

        Raises:
            InputError: no constant, or one of a type that torch has not.
        """
        if value not in self._attributes:
            tensor = self._tensors.get(value)
            if tensor is None:
                raise InputError(f"value {value.name!r} is read but nothing makes it")
            self._attributes[value] = self._register(value.name or "constant", read(tensor))
        return self._attributes[value]

    def _register(self, name: str, tensor: Tensor) -> str:
        *path, leaf = name.split(".")
        owner = self.root
        for part in path:
            child = owner._modules.get(part)
            if child is None:
                if not self._is_free(owner, part):
                    return self._register(self._other_name(name), tensor)
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        if not self._is_free(owner, leaf):
            return self._register(self._other_name(name), tensor)
        if tensor.is_floating_point() and tensor.ndim and tensor.element_size() > 1:
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)
        return name

    def _other_name(self, name: str) -> str:
        """A name that is free on the root, for one that torch cannot have."""
        stem = "constant_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        count = 0
        while not self._is_free(self.root, other := f"{stem}_{count}" if count else stem):
            count += 1
        return other

    def _is_free(self, owner: nn.Module, name: str) -> bool:
        """Whether a part of a path can be the name of a new attribute of `owner`.

        fx writes it into Python that it runs: as attribute where it is an identifier, in quotes
        and unescaped where it is none. So it must be plain letters, and no keyword.
        """
        if not _PART.fullmatch(name) or keyword.iskeyword(name):
            return False
        return not hasattr(owner, name) and not (owner is self.root and name in _taken())


@functools.cache
def _taken() -> frozenset[str]:
    """What the built module has besides its constants, and a plain module has not."""
    return frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def read(tensor: ir.TensorProtocol) -> Tensor:
    """A constant as a tensor of its own memory; types below a byte get one byte per value.

    Raises:
        InputError: a type that torch has not.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InputError(
            f"constant {tensor.name!r} is {tensor.dtype.name}, which torch has not: "
            "run the model on ONNX Runtime"
        )
    array = open_array(tensor)
    if tensor.dtype.bitwidth < 8:
        array = array.astype(_BYTES.get(dtype, np.uint8))
    result = torch.empty(array.shape, dtype=dtype)
    stored = _NUMPY_HAS_NOT.get(dtype)
    if stored is None:
        result.numpy()[...] = array
    else:
        result.view(torch.int16 if stored is np.int16 else torch.uint8).numpy()[...] = array.view(
            stored
        )
    return result
