"""Whether products of unsigned and signed bytes are exact, measured on this machine.

Without VNNI instructions, processors of the x86 family multiply uint8 by int8 and add two
neighbours in 16 bits, where 255 · 127 · 2 saturates. ONNX Runtime uses that without a word.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import helper

from qgraph.formats.base import Array
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.ort_session import open_session

ROWS, N, K = (1, 17), 32, 64


@functools.cache
def mixed_signs_are_exact() -> bool:
    """Whether MatMulIntegerToFloat of the largest uint8 and int8 gives the product."""
    session = open_session(_model(), threads=1)
    for rows in ROWS:
        found = session.run({"x": np.full((rows, K), 255, np.uint8)})["y"]
        if not np.array_equal(found, np.full((rows, N), K * 255 * 127, np.float32)):
            return False
    return True


def _model() -> bytes:
    """One product, of all scales 1 and all zero points 0."""
    constants: dict[str, Array] = {
        "codes": np.full((K, N), 127, np.int8),
        "one": np.ones((), np.float32),
        "scales": np.ones(N, np.float32),
    }
    node = helper.make_node(
        "MatMulIntegerToFloat", ["x", "codes", "one", "scales"], ["y"], "probe",
        domain=CONTRIB,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "bytes",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["M", K])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["M", N])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
