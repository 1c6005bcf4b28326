"""A model whose products of bytes are products of floats: for proofs that rounding would blur.

A change in the last bit of an activation moves some of its codes, those move others, and after 30
layers a token may say something else: no proof of a rewrite can tell that from a fault. Weights
stay as they are stored.
"""

from __future__ import annotations

import onnx_ir as ir

from qgraph.kernel_ops import KernelOp, reading_op
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes

PER_AXIS = 13
"""The opset from which on DequantizeLinear has a scale for each column."""
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


def unround(model: ir.Model) -> None:
    """Let each integer product read what its activation is before it is rounded.

    before:  y = MatMulIntegerToFloat(QuantizeLinear(x, s, z), codes, s, scales, z, zeros, bias)
    after:   y = Add(MatMul(x, DequantizeLinear <axis = 1> (codes, scales, zeros)), bias)
    """
    if model.opset_imports.get("", 1) < PER_AXIS:
        return
    rewriter = Rewriter(model)
    for node in list(nodes(model.graph)):
        op = reading_op(node)
        if op is None or not op.is_integer:
            continue
        x = op.read(node, "x")
        rounding = x.producer() if x is not None else None
        if rounding is not None and rounding.op_type == "QuantizeLinear":
            x = rounding.inputs[0]
        if x is None or x.dtype not in _FLOATS:
            continue
        _replace(node, op, x, rewriter)
        if rounding is not None:
            rewriter.drop_unused([rounding])


def _replace(node: ir.Node, op: KernelOp, x: ir.Value, rewriter: Rewriter) -> None:
    codes, scales = op.read(node, "codes"), op.read(node, "scales")
    zeros, bias = op.read(node, "weight_zero"), op.read(node, "bias")
    output = node.outputs[0]
    assert codes is not None and scales is not None
    weight = rewriter.node(
        "DequantizeLinear", [codes, scales, zeros], name=f"{node.name}/weight",
        attributes={"axis": 1}, dtype=scales.dtype, shape=codes.shape,
    )  # fmt: skip
    product = rewriter.node(
        "MatMul", [x, weight.outputs[0]], name=f"{node.name}/float", dtype=scales.dtype,
        shape=output.shape,
    )  # fmt: skip
    made = [weight, product]
    if bias is not None:
        added = [product.outputs[0], bias]
        made.append(rewriter.node("Add", added, name=f"{node.name}/sum", dtype=scales.dtype))
    rewriter.replace(node, made)
