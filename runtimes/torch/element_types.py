"""The element type of each value of a graph: what its operator says, else what the file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from qgraph.runtimes.torch.table import Entry

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
"""Types that no host value has."""
_BOOLEAN = frozenset(
    {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"}
)
_OF_CONSTANTS = {
    ir.AttributeType.INT: ir.DataType.INT64,
    ir.AttributeType.INTS: ir.DataType.INT64,
    ir.AttributeType.FLOAT: ir.DataType.FLOAT,
    ir.AttributeType.FLOATS: ir.DataType.FLOAT,
}


class ElementTypes:
    """ONNX's number of a value's type, 0 where it is not known; nodes are added in their order.

    A file need not say the types of values between nodes. Those that host values pass through
    are derived here, so that integers keep their width.
    """

    def __init__(self) -> None:
        self._known: dict[ir.Value, int] = {}

    def of(self, value: ir.Value | None) -> int:
        """The type of a value; 0 for an input that is left out."""
        if value is None:
            return 0
        if value in self._known:
            return self._known[value]
        if value.const_value is not None:
            return value.const_value.dtype.value
        node = value.producer()
        if node is not None and node.op_type == "Constant" and node.domain == "":
            return _constant(node)
        return 0 if value.dtype is None else value.dtype.value

    def add(self, node: ir.Node, entry: Entry, options: Mapping[str, Any]) -> None:
        """Take up a node whose attributes, those of a function filled in, are `options`."""
        kind = self._result(node, entry, options)
        if kind:
            self._known[node.outputs[0]] = kind

    def _result(self, node: ir.Node, entry: Entry, options: Mapping[str, Any]) -> int:
        op = node.op_type if node.domain == "" else ""
        if op in _BOOLEAN:
            return ir.DataType.BOOL
        if op in ("Shape", "Size", "SequenceLength"):
            return ir.DataType.INT64
        if op == "Cast":
            return int(options.get("to", 0))
        if op in ("CastLike", "Where") and len(node.inputs) > 1:
            return self.of(node.inputs[1])
        if op == "ConstantOfShape":
            filled = node.attributes.get("value")
            return ir.DataType.FLOAT if filled is None else filled.as_tensor().dtype.value
        if (entry.host or op == "Range") and node.inputs:
            return self.of(node.inputs[0])
        return 0


def _constant(node: ir.Node) -> int:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR:
            return 0 if attribute.is_ref() else attribute.as_tensor().dtype.value
        return _OF_CONSTANTS.get(attribute.type, ir.DataType.UNDEFINED).value
    return 0
