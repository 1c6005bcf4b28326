"""Packed bytes as ONNX Runtime's kernels and its own quantizer read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnxruntime.capi import _pybind_state

from qgraph.formats.base import Array, Format, Layout, Part, parse

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
BLOCKS = (16, 32, 64, 128, 256)


def weight_rows(n: int, k: int) -> Array:
    return np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)


def initializers(
    format_: Format, parts: Mapping[Part, Array], n: int, k: int, dtype: ir.DataType, layout: Layout
) -> list[onnx.TensorProto]:
    """The parts as they are stored: raw bytes under the declared shapes and types."""
    return [
        onnx.TensorProto(
            name=part,
            dims=spec.shape,
            data_type=spec.dtype.value,
            raw_data=parts[part].tobytes(),
        )
        for part, spec in format_.parts(n, k, dtype, layout).items()
    ]


def run(
    nodes: list[onnx.NodeProto],
    tensors: list[onnx.TensorProto],
    feeds: dict[str, Array],
    dtype: ir.DataType,
    opset: int,
) -> Array:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, dtype.value, a.shape) for name, a in feeds.items()],
        [helper.make_tensor_value_info("y", dtype.value, None)],
        tensors,
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=11)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, feeds)[0])


def matmul_nbits(text: str, block: int, n: int, k: int, dtype: ir.DataType) -> None:
    """At level 0, MatMulNBits of the identity is the dequantized weight."""
    format_ = parse(text)
    layout = Layout("blocks", block)
    weight = format_.quantize(weight_rows(n, k), dtype)
    tensors = initializers(format_, format_.pack(weight, layout), n, k, dtype, layout)
    node = helper.make_node(
        "MatMulNBits",
        ["x", *(tensor.name for tensor in tensors)],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=format_.bits,
        block_size=block,
        accuracy_level=0,
    )
    found = run([node], tensors, {"x": np.eye(k, dtype=dtype.numpy())}, dtype, 21).T
    wanted = format_.dequantize(weight)
    tolerance = 1e-6 if dtype == F32 else 2**-10
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= tolerance * np.abs(wanted)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("extra", [0, -7], ids=["whole", "partial"])
def test_matmul_nbits(bits: int, block: int, kind: str, dtype: ir.DataType, extra: int) -> None:
    # Three groups: packed zero points of 2 and 4 bits end inside a byte.
    matmul_nbits(f"{kind}{bits}:group={block}", block, 5, 3 * block + extra, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_matmul_nbits_with_signed_scales(bits: int, dtype: ir.DataType) -> None:
    matmul_nbits(f"int{bits}:group=64,scale=signed", 64, 33, 150, dtype)


@pytest.mark.parametrize("text", ["int4", "uint4", "int8", "uint8", "int2", "uint2"])
@pytest.mark.parametrize("group, block", [("row", 128), ("row", 32), ("256", 64)])
def test_matmul_nbits_with_repeated_scales(text: str, group: str, block: int) -> None:
    matmul_nbits(f"{text}:group={group}", block, 6, 300, F32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("group, n, k", [(32, 4, 96), (64, 5, 101), (0, 7, 45)])
def test_dequantize_linear(
    bits: int, kind: str, dtype: ir.DataType, group: int, n: int, k: int
) -> None:
    """DequantizeLinear gives the same bits; 2-bit types are new in opset 25."""
    format_ = parse(f"{kind}{bits}", group=group)
    weight = format_.quantize(weight_rows(n, k), dtype)
    layout = Layout("qdq")
    tensors = initializers(format_, format_.pack(weight, layout), n, k, dtype, layout)
    attributes: dict[str, Any] = {"axis": 1, "block_size": group} if group else {"axis": 0}
    node = helper.make_node(
        "DequantizeLinear", [tensor.name for tensor in tensors], ["y"], **attributes
    )
    found = run([node], tensors, {}, dtype, 25 if bits == 2 else 21)
    np.testing.assert_array_equal(found, format_.dequantize(weight).astype(dtype.numpy()))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_onnx_runtimes_quantizer_writes_the_same(bits: int, block: int, symmetric: bool) -> None:
    """Its symmetric scale is our signed one; it multiplies by 1/s, so near ties may differ."""
    n, k = 32, 300
    text = f"int{bits}:scale=signed" if symmetric else f"uint{bits}"
    format_ = parse(text, group=block)
    rows, layout = weight_rows(n, k), format_.default_layout
    weight = format_.quantize(rows, F32)
    specs = format_.parts(n, k, F32, layout)
    parts = {part: np.zeros(spec.shape, spec.dtype.numpy()) for part, spec in specs.items()}
    zeros = parts.get("zeros", np.zeros(specs["scales"].shape, np.uint8))
    quantize = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
    columns = np.ascontiguousarray(rows.T)
    quantize(parts["codes"], columns, parts["scales"], zeros, block, n, k, symmetric)
    theirs = format_.unpack(parts, n, k, layout)
    np.testing.assert_array_equal(theirs.scales, weight.scales)
    if weight.zeros is not None:
        np.testing.assert_array_equal(theirs.zeros, weight.zeros)
    different = theirs.codes != weight.codes
    assert different.mean() < 2e-3
    nearest = np.abs(format_.dequantize(theirs) - rows)[different]
    assert (np.abs(nearest - np.abs(format_.dequantize(weight) - rows)[different]) < 1e-5).all()
