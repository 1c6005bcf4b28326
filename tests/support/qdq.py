"""What the tests of Q/DQ models share: codes, scales and graphs of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx

TYPES = {
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int8": np.int8,
    "uint8": np.uint8,
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
}


def codes_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Random codes over the whole range."""
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if dtype[0] == "u" else (-(1 << bits - 1), 1 << bits - 1)
    return rng.integers(low, high, shape).astype(TYPES[dtype])


def stored(array: Any) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(array, "t")


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return rng.uniform(0.01, 0.05, shape).astype(dtype)


HEAD = "g (float[M, 48] x) => (float[M, 24] y)"
K, N = 48, 24


def dq(bench: Any, body: str, inputs: str = HEAD, opset: int = 21, **constants: Any) -> Any:
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    return bench.build(f"{header}{inputs} {{ {body} }}", **constants)
