"""Products of packed weights in float32, where ONNX Runtime is wrong about those in float16.

Between two ops that it has in float32 alone, ONNX Runtime (1.22 to 1.32, on CPUs) computes a
float16 MatMulNBits in float32 too, and casts its scales at each run. Where that cast stays a node
(in bodies; in the main graph unless constants are folded late, as by default), the kernel of int8
activations (level 4) takes its scales for none: the result is 0, or NaN. With constants in float32
the same kernel is right, and as fast.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.block_sums import block_sums
from qgraph.constants import release
from qgraph.formats.base import QuantizedWeight
from qgraph.graph import Graph
from qgraph.kernel_ops import NBITS, Read, reading_op
from qgraph.passes.base import Context, Pass
from qgraph.passes.fusion import Attributes
from qgraph.passes.matching import readers
from qgraph.passes.merged_source import MergedSource
from qgraph.quant_tensor import Deviation, QuantSource, QuantTensor
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes

_INT8 = 4
"""The accuracy level whose activations are bytes."""
_IN_HALF = frozenset(
    {
        "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "GatherBlockQuantized",
        "GroupQueryAttention", "Identity", "If", "LayerNormalization", "Loop", "MatMulNBits",
        "Max", "Min", "RMSNormalization", "Reshape", "RotaryEmbedding", "Scan",
        "SimplifiedLayerNormalization", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "Slice", "Split", "Squeeze", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip
"""Ops that it has in float16, as the list of its kernels says; all others draw products along."""
_OWN: tuple[Read, ...] = (*NBITS.parts, "bias")
"""The inputs that belong to the weight."""


@dataclasses.dataclass(frozen=True)
class WidenProducts(Pass):
    """A product of float16 between ops without it becomes one of float32, between casts.

    before:  x = Mul(…); y = MatMulNBits <accuracy_level = 4> (x, codes, scales); z = Sigmoid(y)
    after:   x = Mul(…); y = Cast(MatMulNBits <accuracy_level = 4> (Cast(x), codes, scales in
             float32)); z = Sigmoid(y)
    """

    name: ClassVar[str] = "widen_products"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Widen every product that is wrong there; the values of its scales stay the same."""
        wide = _Wide(Rewriter(graph.model))
        found = [node for node in nodes(graph.model.graph) if _is_wrong(node)]
        for node in found:
            wide.widen(node)
        context.findings.widened = frozenset(str(node.name) for node in found)
        rule = f"float16 → float32 {NBITS.op_type}"
        why = "between ops in float32 the kernel of int8 activations is wrong in float16"
        return [Step(self.name, rule, str(node.name), "done", None, why) for node in found]


def _is_wrong(node: ir.Node) -> bool:
    """Whether a node is such a product, and its weight is there to be widened."""
    if reading_op(node) is not NBITS or NBITS.number(node, "accuracy_level") != _INT8:
        return False
    own = [value for what in _OWN if (value := NBITS.read(node, what)) is not None]
    constant = all(value.is_initializer() and value.const_value is not None for value in own)
    scales = NBITS.read(node, "scales")
    half = scales is not None and scales.dtype == ir.DataType.FLOAT16
    return constant and half and _between_floats(node)


def _between_floats(node: ir.Node) -> bool:
    x = node.inputs[0]
    before = x.producer() if x is not None else None
    if before is None or before.op_type in _IN_HALF:
        return False
    return any(reader.op_type not in _IN_HALF for reader in readers(node.outputs[0]))


class _Wide:
    """Makes the wide constants, each once, however many products read it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._values: dict[ir.Value, ir.Value] = {}
        self._sources: dict[QuantSource, WideSource] = {}

    def widen(self, node: ir.Node) -> None:
        """Put casts around a node, and float32 where its weight has float16."""
        x, body = node.inputs[0], node.graph
        assert x is not None and isinstance(body, ir.Graph)
        end = self._widen_sums(node)
        y = end.outputs[0]
        own = [(NBITS.at(what), NBITS.read(node, what)) for what in _OWN]
        old = {at: value for at, value in own if at is not None and value is not None}
        for place, value in old.items():
            node.replace_input_with(place, self._constant(value))
        name, dtype = str(node.name), y.dtype or ir.DataType.FLOAT16
        first = self._cast(f"{name}/wide", x, ir.DataType.FLOAT, x.shape)
        self.rewriter.insert_before(node, [first])
        node.replace_input_with(0, first.outputs[0])
        last = self._cast(f"{name}/narrow", y, dtype, y.shape)
        body.insert_after(end, last)
        result, spelled = last.outputs[0], y.name
        y.replace_all_uses_with(result, replace_graph_outputs=True)
        last.replace_input_with(0, y)
        y.name, y.type = self.rewriter.unique(f"{name}/float32"), ir.TensorType(ir.DataType.FLOAT)
        result.name = spelled
        self.rewriter.drop_constants(old.values())

    def _widen_sums(self, node: ir.Node) -> ir.Node:
        """The node that gives the result of a product: of minimums their Add, then in float32."""
        sums = block_sums(node)
        if sums is None:
            return node
        add = sums.added[-1]
        for place, value in enumerate(add.inputs):
            cast = value.producer() if value is not None else None
            if cast is not None and cast is not node and cast.op_type == "Cast":
                add.replace_input_with(place, cast.inputs[0])
                self.rewriter.drop_unused([cast])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        return add

    def _cast(
        self, name: str, value: ir.Value, dtype: ir.DataType, shape: ir.Shape | None
    ) -> ir.Node:
        to: Attributes = {"to": dtype.value}
        return self.rewriter.node(
            "Cast", [value], name=name, attributes=to, dtype=dtype, shape=shape
        )

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant as it is wanted: with scales that are not written yet, all parts of one."""
        if value not in self._values:
            self._values[value] = self._made(value)
        return self._values[value]

    def _made(self, value: ir.Value) -> ir.Value:
        tensor, name = value.const_value, str(value.name)
        assert tensor is not None
        if isinstance(tensor, QuantTensor):
            source = self._sources.setdefault(tensor.source, WideSource(tensor.source))
            made = QuantTensor(source, tensor.part, tensor.layout, "")
            return self.rewriter.initializer(f"{name}.wide", made)
        if tensor.dtype != ir.DataType.FLOAT16:
            return value
        return self.rewriter.initializer(f"{name}.wide", _float32(tensor, f"{name}.wide"))


def _float32(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    """A float16 constant in float32, which holds it exactly."""

    def made() -> ir.TensorProtocol:
        array = tensor.numpy().astype(np.float32)
        release(tensor)
        return ir.Tensor(array, name=name)

    return ir.LazyTensor(made, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=name)


class WideSource(MergedSource):
    """The rows of another source, their scales in float32."""

    def __init__(self, source: QuantSource) -> None:
        super().__init__([source], source.name)
        self._stored, self.scale_dtype = self.scale_dtype, ir.DataType.FLOAT
        self.output_error = source.output_error

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """See `QuantSource.block`."""
        found = super().block(start, stop)
        return dataclasses.replace(found, scales=found.scales.astype(np.float32))

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """See `QuantSource.deviation`; bounds are those of the scales that were rounded."""
        scales = weight.scales.astype(self._stored.numpy())
        return super().deviation(start, stop, dataclasses.replace(weight, scales=scales))
