"""The bias behind a linear of packed weights, in one op with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from qgraph.passes.fusion import MICROSOFT, Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import is_constant, only_reader, other_operand

LINEAR = "MatMulNBits"
_BIAS = 5
"""The input of MatMulNBits that holds it."""


def linear_bias(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """The sum x W + b, b a constant `[N]`: exporters add it behind the product."""
    for node in context.nodes(LINEAR):
        add = only_reader(node.outputs[0]) if node.graph is not None else None
        if add is None or add.op_type != "Add" or add.domain or bias_of(node) is not None:
            continue
        bias = other_operand(add, node.outputs[0])
        if bias is not None and bias.is_initializer() and is_constant(bias) and _fits(bias, node):
            yield _candidate(node, add, bias)


def bias_of(node: ir.Node) -> ir.Value | None:
    """What MatMulNBits adds."""
    return node.inputs[_BIAS] if len(node.inputs) > _BIAS else None


def _fits(bias: ir.Value, node: ir.Node) -> bool:
    shape = bias.shape
    rows = node.attributes.get_int("N", 0)
    return shape is not None and list(shape) == [rows] and bias.dtype == node.outputs[0].dtype


def _candidate(node: ir.Node, add: ir.Node, bias: ir.Value) -> Candidate:
    activation, end = node.inputs[0], add.outputs[0]
    assert activation is not None

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        given = [*node.inputs, None, None][:_BIAS]
        return builder.again(node, [*given, bias])

    attributes = sorted((name, str(attr.value)) for name, attr in node.attributes.items())
    zeros = len(node.inputs) > 3 and node.inputs[3] is not None
    return Candidate(
        "linear_bias", node, (activation,), (end,), f"{MICROSOFT}::{LINEAR}", build,
        proof=(*attributes, zeros, end.dtype), reason=f"with {bias.name}",
    )  # fmt: skip
