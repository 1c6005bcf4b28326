"""The body of `qgraph::Dequantize…`: codes in bytes, looked up in a table, minus zero, times scale.

Only operators whose meaning has not changed since opset 13, so that a model keeps its opset.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "qgraph"
"""Of the functions that formats make, and of no others."""
Zeros: TypeAlias = Literal["none", "codes", "float"]
"""The third part of integer groups: nothing, zero points packed like the codes, or floats."""


def dequantize_function(
    name: str, opset: int, levels: NDArray[Any], *, zeros: Zeros = "none"
) -> ir.Function:
    """`qgraph::name(codes, scales[, zeros]) -> W`, computed in float32, cast to `dtype`.

    codes: u8 `[N, nb, bytes of a block]`; scales `[N, nb]`; zeros u8 `[N, bytes]`, packed like
    the codes, or floats `[N, nb]`. W is `[N, k]`. Attributes `k` and `dtype` as `Format.function`
    says.
    `levels` `[2^bits]` are the values of the codes, and of the zero points where there are any,
    before they are subtracted and scaled.
    """
    body = _Body()
    codes, scales = ir.Value(name="codes"), ir.Value(name="scales")
    inputs = [codes, scales]
    table = body.constant("table", _byte_table(levels))
    block_axis = body.constant("block_axis", [2])
    # [N, nb, bytes, codes in a byte] -> [N, nb, block]
    values = body.look_up(table, codes)
    values = body.op("Reshape", values, body.constant("blocks_shape", [0, 0, -1]), out="blocks")
    row_shape = body.constant("row_shape", [0, -1])
    row_axis, row_start = body.constant("row_axis", [1]), body.constant("row_start", [0])
    if zeros == "float":
        inputs.append(ir.Value(name="zeros"))
        offsets = body.op("Cast", inputs[2], out="offsets", to=ir.DataType.FLOAT)
        offsets = body.op("Unsqueeze", offsets, block_axis, out="zeros_column")
        values = body.op("Sub", values, offsets, out="centered")
    if zeros == "codes":
        inputs.append(ir.Value(name="zeros"))
        offsets = body.op("Reshape", body.look_up(table, inputs[2]), row_shape, out="offsets")
        shape = body.op("Shape", scales, out="scales_shape")
        count = body.op("Gather", shape, row_axis, out="block_count")
        offsets = body.op("Slice", offsets, row_start, count, row_axis, out="block_offsets")
        offsets = body.op("Unsqueeze", offsets, block_axis, out="zeros_column")
        values = body.op("Sub", values, offsets, out="centered")
    steps = body.op("Cast", scales, out="steps", to=ir.DataType.FLOAT)
    steps = body.op("Unsqueeze", steps, block_axis, out="steps_column")
    rows = body.op("Reshape", body.op("Mul", values, steps, out="scaled"), row_shape, out="rows")
    k = body.op("Constant", out="k", value_int=_reference("value_int", "k"))
    k = body.op("Reshape", k, body.constant("vector", [1]), out="row_stop")
    rows = body.op("Slice", rows, row_start, k, row_axis, out="unpadded")
    output = body.op("Cast", rows, out="W", to=_reference("to", "dtype"))
    graph = ir.Graph(inputs, [output], nodes=body.nodes, opset_imports={"": opset}, name=name)
    attributes = [ir.Attr(a, ir.AttributeType.INT, None) for a in ("k", "dtype")]
    return ir.Function(DOMAIN, name, graph=graph, attributes=attributes)


class _Body:
    """Nodes and values under fixed names, so that one format and opset give one text."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def op(self, kind: str, *inputs: ir.Value, out: str, **attributes: Any) -> ir.Value:
        """A node called like its output."""
        node = ir.node(kind, inputs, attributes, name=out, outputs=[ir.Value(name=out)])
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, out: str, value: NDArray[Any] | list[int]) -> ir.Value:
        """A float32 table or int64 numbers."""
        array = np.asarray(value, np.int64) if isinstance(value, list) else value
        return self.op("Constant", out=out, value=ir.tensor(array, name=out))

    def look_up(self, table: ir.Value, packed: ir.Value) -> ir.Value:
        """float32 `[…, codes in a byte]` for bytes `[…]`."""
        index = self.op("Cast", packed, out=f"{packed.name}_index", to=ir.DataType.INT32)
        return self.op("Gather", table, index, out=f"{packed.name}_levels", axis=0)


def _reference(attribute: str, parameter: str) -> ir.Attr:
    """An INT attribute that takes the value of the function's `parameter`."""
    return ir.RefAttr(attribute, parameter, ir.AttributeType.INT)


def _byte_table(levels: NDArray[Any]) -> NDArray[Any]:
    """float32 `[256, codes in a byte]`: what the codes in each byte stand for, low bits first."""
    bits = len(levels).bit_length() - 1
    shifts = np.arange(0, 8, bits)
    codes = np.arange(256)[:, None] >> shifts & (1 << bits) - 1
    table: NDArray[Any] = levels.astype(np.float32)[codes]
    return table
