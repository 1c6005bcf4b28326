"""Models of one product with a constant: what tests of whole runs start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from qgraph.formats.base import parse

MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"], "mm")


def weight(n: int, k: int, fmt: str = "int4:group=32") -> np.ndarray:
    """`[n, k]` that lies on the grid of a format, so that rounding changes nothing."""
    spec = parse(fmt)
    rows = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    return spec.dequantize(spec.quantize(rows, ir.DataType.FLOAT))


def save(path: Path, node: onnx.NodeProto, array: np.ndarray, extra: Any = None) -> Path:
    """x `[B, 64]` → `node` with weight `w` → y."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    nodes = [node, *(extra or [])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, ["B", 64])],
        [helper.make_tensor_value_info(nodes[-1].output[0], kind, None)],
        [numpy_helper.from_array(array, "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path
