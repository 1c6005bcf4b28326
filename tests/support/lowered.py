"""Lowered models, made site by site, of weights in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array, Format, Layout, Part, QuantizedWeight, parse
from qgraph.quant_tensor import Deviation, QuantSource, QuantTensor

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


class ArraySource(QuantSource):
    """Rows of an array in memory, rounded to nearest; counts what it is asked."""

    def __init__(
        self, rows: Array, fmt: Format, scale_dtype: ir.DataType = FLOAT, name: str = "w"
    ) -> None:
        self.rows, self.format, self.scale_dtype, self.name = rows, fmt, scale_dtype, name
        self.n, self.k = rows.shape
        self.compared: list[tuple[int, int]] = []

    def block(self, start: int, stop: int) -> QuantizedWeight:
        return self.format.quantize(self.rows[start:stop], self.scale_dtype)

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        self.compared.append((start, stop))
        rows = self.rows[start:stop]
        error = rows - self.format.dequantize(weight)
        group = self.format.group or self.k
        bound = np.repeat(self.format.error_bound(weight), group, axis=1)[:, : self.k]
        worst = float((np.abs(error) / (bound + 1e-30)).max())
        return Deviation(worst, float((error**2).sum()), float((rows**2).sum()))


def source(
    fmt: str, n: int = 24, k: int = 200, dtype: ir.DataType = FLOAT, scale: float = 0.1
) -> ArraySource:
    rows = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32) * scale
    return ArraySource(rows, parse(fmt), dtype)


class Builder:
    """A lowered model: each call adds a site on its own input."""

    def __init__(self, opset: int = 21) -> None:
        self.model = ir.Model(
            ir.Graph([], [], nodes=[], opset_imports={"": opset, "com.microsoft": 1, "qgraph": 1}),
            ir_version=11,
        )

    def parts(self, src: ArraySource, layout: Layout, name: str) -> dict[Part, ir.Value]:
        found: dict[Part, ir.Value] = {}
        for part in src.parts(layout):
            tensor = QuantTensor(src, part, layout, f"{name}.{part}")
            found[part] = self.constant(f"{name}.{part}", tensor)
        return found

    def constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.model.graph.register_initializer(value)
        return value

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.model.graph.inputs.append(value)
        return value

    def node(
        self,
        name: str,
        op: str,
        inputs: Sequence[ir.Value | None],
        domain: str = "",
        result: ir.DataType = FLOAT,
        **attributes: Any,
    ) -> ir.Value:
        made = ir.node(op, inputs, attributes, domain=domain, name=name)
        made.outputs[0].name, made.outputs[0].type = f"{name}.y", ir.TensorType(result)
        self.model.graph.append(made)
        self.model.graph.outputs.append(made.outputs[0])
        return made.outputs[0]

    def linear(
        self, name: str, src: ArraySource, block: int = 0, level: int = 4, bias: bool = False
    ) -> dict[Part, ir.Value]:
        block = block or src.format.group
        parts = self.parts(src, Layout("blocks", block), name)
        x = self.input(f"{name}.x", src.scale_dtype, ["M", src.k])
        zeros = parts.get("zeros")
        inputs: list[ir.Value | None] = [x, parts["codes"], parts["scales"], zeros]
        if bias:
            values = ir.tensor(np.ones(src.n, src.scale_dtype.numpy()), name=f"{name}.bias")
            inputs += [None, self.constant(f"{name}.bias", values)]
        self.node(
            name, "MatMulNBits", inputs, "com.microsoft", src.scale_dtype,
            K=src.k, N=src.n, bits=src.format.bits, block_size=block, accuracy_level=level,
        )  # fmt: skip
        return parts

    def embedding(self, name: str, src: ArraySource, parts: Mapping[Part, ir.Value]) -> None:
        shape = self.constant(
            f"{name}.shape", ir.tensor(np.array([src.n, -1]), name=f"{name}.shape")
        )
        table = self.node(f"{name}.table", "Reshape", [parts["codes"], shape], "")
        indices = self.input(f"{name}.ids", ir.DataType.INT64, ["B", "S"])
        self.node(
            name, "GatherBlockQuantized",
            [table, indices, parts["scales"], parts.get("zeros")], "com.microsoft",
            src.scale_dtype, bits=src.format.bits, block_size=src.format.group,
            quantize_axis=1, gather_axis=0,
        )  # fmt: skip

    def dequantize_linear(self, name: str, src: ArraySource) -> None:
        parts = self.parts(src, Layout("qdq"), name)
        at = {"axis": 1, "block_size": src.format.group} if src.format.group else {"axis": 0}
        w = self.node(f"{name}.dq", "DequantizeLinear", list(parts.values()), "", **at)
        self.product(name, src, w)

    def dequantize_function(self, name: str, src: ArraySource) -> None:
        function = src.format.function(21)
        self.model.functions[function.identifier()] = function
        parts = self.parts(src, Layout("blocks", src.format.group), name)
        w = self.node(
            f"{name}.w", function.name, list(parts.values()), "qgraph", src.scale_dtype,
            k=src.k, dtype=src.scale_dtype.value,
        )  # fmt: skip
        self.product(name, src, w)

    def product(self, name: str, src: ArraySource, w: ir.Value) -> None:
        transposed = self.node(f"{name}.t", "Transpose", [w], "", src.scale_dtype, perm=[1, 0])
        x = self.input(f"{name}.x", src.scale_dtype, ["M", src.k])
        self.node(name, "MatMul", [x, transposed], "", src.scale_dtype)
