"""The bias behind a linear of packed weights, in one op with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from qgraph.kernel_ops import MATMUL_NBITS, NBITS
from qgraph.passes.fusion import Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import is_constant, only_reader, other_operand


def linear_bias(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """The sum x W + b, b a constant `[N]`: exporters add it behind the product."""
    for node in context.nodes(NBITS.op_type):
        add = only_reader(node.outputs[0]) if node.graph is not None else None
        if add is None or add.op_type != "Add" or add.domain:
            continue
        if NBITS.read(node, "bias") is not None:
            continue
        bias = other_operand(add, node.outputs[0])
        if bias is not None and bias.is_initializer() and is_constant(bias) and _fits(bias, node):
            yield _candidate(node, add, bias)


def _fits(bias: ir.Value, node: ir.Node) -> bool:
    shape = bias.shape
    rows = node.attributes.get_int("N", 0)
    return shape is not None and list(shape) == [rows] and bias.dtype == node.outputs[0].dtype


def _candidate(node: ir.Node, add: ir.Node, bias: ir.Value) -> Candidate:
    activation, end = node.inputs[0], add.outputs[0]
    assert activation is not None

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        given = (bias if what == "bias" else NBITS.read(node, what) for what in NBITS.inputs)
        return builder.again(node, [*given])

    attributes = sorted((name, str(attr.value)) for name, attr in node.attributes.items())
    zeros = NBITS.read(node, "zeros") is not None
    return Candidate(
        "linear_bias", node, (activation,), (end,), MATMUL_NBITS, build,
        proof=(*attributes, zeros, end.dtype), reason=f"with {bias.name}",
    )  # fmt: skip
