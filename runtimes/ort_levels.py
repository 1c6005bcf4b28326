"""Whether accuracy level 4 of MatMulNBits really computes in int8, measured on this machine.

ONNX Runtime's profile does not say which compute type ran, and its lists do not say which
(bits, block, type) have an int8 kernel on this processor; the results do.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import helper

from qgraph.formats.base import Array
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.ort_session import open_session

ROWS, N, K = 5, 32, 512
REAL = 1e-4
"""A relative difference above this is int8 compute: it leaves about 5e-3, float at most 1e-6."""


@functools.cache
def level_difference(bits: int, block: int, dtype: str, symmetric: bool) -> float:
    """‖y₄ − y₀‖ / ‖y₀‖ of a MatMulNBits `[32, 512]` at accuracy levels 4 and 0.

    Args:
        bits: 2, 4 or 8.
        block: the block size along K, at most 512.
        dtype: "float32" or "float16", of activations and scales.
        symmetric: without zero points.

    Raises:
        InputError: the installed ONNX Runtime has no such kernel.
    """
    x = np.random.default_rng(0).standard_normal((ROWS, K)).astype(dtype)
    exact, rounded = (
        open_session(_model(bits, block, dtype, symmetric, level), threads=1)
        .run({"x": x})["y"]
        .astype(np.float64)
        for level in (0, 4)
    )
    return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def level_is_real(bits: int, block: int, dtype: str) -> bool:
    """Whether level 4 computes in int8, with and without zero points."""
    return (
        min(level_difference(bits, block, dtype, symmetric) for symmetric in (True, False)) > REAL
    )


def _model(bits: int, block: int, dtype: str, symmetric: bool, level: int) -> bytes:
    """One MatMulNBits with random codes, scales and zero points."""
    rng = np.random.default_rng(bits)
    count = K // block
    constants: dict[str, Array] = {
        "codes": rng.integers(0, 256, (N, count, block * bits // 8), np.uint8),
        "scales": rng.uniform(0.01, 0.02, (N, count)).astype(dtype),
    }
    if not symmetric:
        constants["zeros"] = rng.integers(0, 256, (N, -(-count * bits // 8)), np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", *constants], ["y"], "probe", domain=CONTRIB,
        K=K, N=N, bits=bits, block_size=block, accuracy_level=level,
    )  # fmt: skip
    float_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node],
        "level",
        [helper.make_tensor_value_info("x", float_type, ["M", K])],
        [helper.make_tensor_value_info("y", float_type, ["M", N])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
