"""A model whose products of bytes are products of floats: for proofs that rounding would blur.

A change in the last bit of an activation moves some of its codes, those move others, and after 30
layers a token may say something else: no proof of a rewrite can tell that from a fault. Weights
stay as they are stored.
"""

from __future__ import annotations

import onnx_ir as ir

from qgraph.capabilities import DYNAMIC_QUANTIZE_MATMUL, MATMUL_INTEGER_TO_FLOAT
from qgraph.passes.packed_linear import input_of
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes

PER_AXIS = 13
"""The opset from which on DequantizeLinear has a scale for each column."""
_CODES = 1
_PLACES = {DYNAMIC_QUANTIZE_MATMUL: (2, 3, 4), MATMUL_INTEGER_TO_FLOAT: (3, 5, 6)}
"""Where a product reads the scales and zeros of its weight, and its bias."""


def unround(model: ir.Model) -> None:
    """Let each integer product read what its activation is before it is rounded.

    before:  y = MatMulIntegerToFloat(QuantizeLinear(x, s, z), codes, s, scales, z, zeros, bias)
    after:   y = Add(MatMul(x, DequantizeLinear <axis = 1> (codes, scales, zeros)), bias)
    """
    if model.opset_imports.get("", 1) < PER_AXIS:
        return
    rewriter = Rewriter(model)
    for node in list(nodes(model.graph)):
        places = _PLACES.get(f"{node.domain}::{node.op_type}")
        x = node.inputs[0] if places is not None else None
        rounding = x.producer() if x is not None else None
        if rounding is not None and rounding.op_type == "QuantizeLinear":
            x = rounding.inputs[0]
        if places is None or x is None or x.dtype not in _FLOATS:
            continue
        _replace(node, x, places, rewriter)
        if rounding is not None:
            rewriter.drop_unused([rounding])


_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


def _replace(node: ir.Node, x: ir.Value, places: tuple[int, int, int], rewriter: Rewriter) -> None:
    scales, zeros, bias = (input_of(node, place) for place in places)
    codes, output = node.inputs[_CODES], node.outputs[0]
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
