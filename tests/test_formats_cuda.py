"""FP8, NVFP4 and bitsandbytes' levels for CUDA: predicted kernels, by the ops' own schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as pybind_state

import qgraph
from qgraph.formats.base import Array, parse

N, K, ROWS = 136, 256, 3


def model(folder: Path) -> tuple[Path, Array]:
    """y = x·Wᵀ in float16, and W."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float16[{ROWS}, {K}] x) => (float16[{ROWS}, {N}] y) {{ y = Gemm<transB = 1>(x, w) }}"""
    weight = (np.random.default_rng(0).standard_normal((N, K)) * 0.1).astype(np.float16)
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx", weight.astype(np.float32)


def predicted(folder: Path, text: str) -> tuple[Any, onnx.ModelProto, Array]:
    """The decision and the model for CUDA, and the weight."""
    source, weight = model(folder)
    out = folder / "cuda.onnx"
    result = qgraph.optimize(
        source, out, format=text, target="ort-cuda", check=False, single_file=True
    )
    return result.plan.decisions[0], onnx.load(out), weight


def schema(op: str) -> Any:
    """What the installed runtime says of an operator."""
    found = [s for s in pybind_state.get_all_operator_schema() if s.name == op]
    assert len(found) == 1
    return found[0]


def fed(node: onnx.NodeProto, known: Any) -> list[str]:
    """The schema's names of the inputs that a node has."""
    return [i.name for i, given in zip(known.inputs, node.input, strict=False) if given]


def test_fp8_on_cuda(tmp_path: Path) -> None:
    for text in ("fp8-e4m3", "fp8-e4m3:scale=tensor", "fp8-e4m3:scale=block"):
        folder = tmp_path / text.replace(":", "-")
        folder.mkdir()
        decision, proto, weight = predicted(folder, text)
        assert decision.kernel.startswith("MatMulBlockQuantizedFp8Weight codes=e4m3")
        assert decision.origin == "predicted"
        (node,) = proto.graph.node
        attributes = {a.name: a.i for a in node.attribute}
        known = schema(node.op_type)
        assert attributes == {"block_size": 128}
        assert attributes.keys() <= known.attributes.keys()
        assert fed(node, known) == ["A", "B", "b_scale"]
        parts = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
        codes, scales = (parts[name] for name in node.input[1:3])
        assert (codes.shape, scales.shape) == ((N, K), (N, K // 128))
        assert scales.dtype == np.float32
        found = codes.astype(np.float32) * np.repeat(scales, 128, axis=1)
        fmt = parse(text)
        wanted = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, ir.DataType.FLOAT16))
        np.testing.assert_array_equal(found, wanted)


def test_nvfp4_on_cuda(tmp_path: Path) -> None:
    decision, proto, weight = predicted(tmp_path, "nvfp4")
    assert decision.kernel == "MatMulBlockQuantizedFp4Weight codes=nvfp4 block=16"
    assert decision.origin == "predicted"
    (node,) = proto.graph.node
    known = schema(node.op_type)
    assert {a.name: a.i for a in node.attribute} == {"block_size": 16}
    assert fed(node, known) == ["A", "B", "weight_scale", "weight_scale_2"]
    parts = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    codes, scales, tensor = (parts[name] for name in node.input[1:4])
    assert (codes.shape, scales.shape, tensor.shape) == ((N, K // 2), (N, K // 16), ())
    assert (codes.dtype, scales.dtype, tensor.dtype) == (np.uint8, np.uint8, np.float32)
    elements = np.stack([codes & 15, codes >> 4], -1).reshape(N, K)  # low nibble first
    steps = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor
    found = elements.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(steps, 16, 1)
    fmt = parse("nvfp4")
    wanted = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, ir.DataType.FLOAT16))
    np.testing.assert_array_equal(found, wanted)


def test_bias_goes_along_on_cuda(tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float16[{ROWS}, {K}] x) => (float16[{ROWS}, {N}] y) {{
            y = Gemm<transB = 1>(x, w, b)
        }}"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (N, K)), ("b", (N,))):
        array = rng.standard_normal(shape).astype(np.float16)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, tmp_path / "m.onnx")
    for text, at in (("fp8-e4m3", 4), ("nvfp4", 5)):
        out = tmp_path / f"{text}.onnx"
        qgraph.optimize(tmp_path / "m.onnx", out, format=text, target="ort-cuda", check=False)
        (node,) = onnx.load(out).graph.node
        assert node.input[at] == "b"
        assert node.input[at - 1] == ""


@pytest.mark.parametrize(
    "text, kernel",
    [
        ("nf4", "MatMulBnb4 codes=nf4 block=64"),
        ("fp4", "MatMulBnb4 codes=fp4 block=64"),
        ("fp8-e5m2", "DequantizeLinear codes=e5m2"),
        ("int8-row", "MatMulNBits bits=8 block=128 level=0"),
        ("mxfp4", "MatMulNBits bits=8 block=32 level=0"),
        ("mxfp8", "portable"),
    ],
)
def test_other_formats_on_cuda(text: str, kernel: str, tmp_path: Path) -> None:
    decision, _, _ = predicted(tmp_path, text)
    assert decision.kernel == kernel


@pytest.mark.parametrize("text", ["fp8-e4m3", "nvfp4"])
def test_what_was_fused_is_known_again(text: str, tmp_path: Path) -> None:
    predicted(tmp_path, text)
    (site,) = qgraph.explain(tmp_path / "cuda.onnx", target="ort-cuda").sites
    assert (site.state, site.n, site.k, site.format) == ("fused", N, K, text)
