"""Where the operand of a product comes from: a constant, weight-like ops, or an activation."""

from __future__ import annotations

import dataclasses
from typing import Literal

import onnx_ir as ir

from qgraph.constants import FLOATS
from qgraph.scopes import bodies
from qgraph.site import QGRAPH_DOMAIN, State
from qgraph.view import is_view_op

_WEIGHT_LIKE = frozenset(
    "Add Sub Mul Div Neg Pow Sqrt Abs Clip Concat Where Expand Tile Pad Constant ConstantOfShape "
    "CastLike DequantizeLinear QuantizeLinear Tanh Exp Sign Softmax ReduceL2 ReduceSum".split()
)
"""Ops that a weight may pass before it is used (weight norm, scaling, fake quantization)."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a MatMul's operand comes from.

    constant: from constants alone, by whatever ops. computed: a float constant of rank 2 or more
    that weight-like ops change with something known only at run time. activation: anything else.
    largest: the largest float constant found on the way.
    """

    kind: Literal["constant", "computed", "activation"]
    largest: ir.Value | None = None


def origin_of(value: ir.Value | None, limit: int = 256) -> Origin:
    """What a value is computed from; an activation where that takes more than `limit` values."""
    pending, seen = [value], set[int]()
    dynamic, strange, largest, size = False, False, None, 0
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if len(seen) > limit:
            return Origin("activation")
        if item.const_value is not None:
            tensor = item.const_value
            if tensor.dtype in FLOATS and len(tensor.shape) >= 2 and tensor.size > size:
                largest, size = item, tensor.size
            continue
        node = item.producer()
        if node is None:
            dynamic = True
        else:
            known = is_view_op(node) or (node.domain == "" and node.op_type in _WEIGHT_LIKE)
            if not known and state_of(node) != "dequantize":
                strange = True  # a weight passes it if all of its inputs are constants: W + A B
                dynamic |= not node.inputs or bool(bodies(node))
            pending.extend(node.inputs)
        if dynamic and strange:
            return Origin("activation")
    if not dynamic:
        return Origin("constant", largest)
    return Origin("computed" if size > 1 else "activation", largest)


def state_of(producer: ir.Node | None) -> State:
    """The state of a site whose weight is what `producer` gives, or a constant."""
    if producer is None:
        return "float"
    if producer.domain == QGRAPH_DOMAIN and producer.op_type.startswith("Dequantize"):
        return "dequantize"
    if producer.domain == "" and producer.op_type == "DequantizeLinear":
        return "qdq"
    return "float"


def static_dims(shape: ir.ShapeProtocol | None) -> tuple[int, ...] | None:
    """The dimensions, or None if not all are known."""
    dims = tuple(d for d in shape if isinstance(d, int)) if shape is not None else None
    return dims if dims is not None and shape is not None and len(dims) == len(shape) else None
