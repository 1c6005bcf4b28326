"""How much of what a cache costs is noise: what the least change of a model costs anyway.

Where activations are rounded to 8 bits on the way, a change of a millionth moves some of them to
the next code, those move others, and by the last layer all rounding is another one.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.decoder_graph import CACHING
from qgraph.kernel_ops import INTEGER_MATMULS
from qgraph.op_inputs import bare_name
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes

MOVED = 1 + 1e-6
"""What queries, keys and values are multiplied by."""
ROUNDING = {
    "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear", *map(bare_name, INTEGER_MATMULS),
}  # fmt: skip
"""Ops that round activations, or multiply what was rounded."""
_LEVEL, _INT8 = "accuracy_level", 4


def rounds_activations(model: ir.Model) -> bool:
    """Whether any node, in bodies too, rounds what it multiplies."""
    return any(
        node.op_type in ROUNDING or node.attributes.get_int(_LEVEL, 0) == _INT8
        for node in nodes(model.graph)
    )


def move(model: ir.Model) -> None:
    """Multiply all that attention with a cache reads by `MOVED`."""
    rewriter, factors = Rewriter(model), dict[ir.DataType, ir.Value]()
    for node in [each for each in model.graph if each.op_type == CACHING]:
        for at, value in enumerate(node.inputs[:3]):
            past = GROUPED_QUERY.read(node, "past_key")
            dtype = past.dtype if past is not None else None
            if value is None or dtype is None:
                continue
            if dtype not in factors:
                factors[dtype] = rewriter.constant("moved", np.array(MOVED, dtype.numpy()))
            times = rewriter.node("Mul", [value, factors[dtype]], name="moved", dtype=dtype)
            times.outputs[0].shape = value.shape
            rewriter.insert_before(node, [times])
            node.replace_input_with(at, times.outputs[0])
