"""`qgraph::Dequantize…` and `qgraph::Linear…` of every format, under the runtimes that run ONNX."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qgraph import registry
from qgraph.formats.base import Array, Format, variants

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
FORMATS = [f for name in registry.names("format") for f in variants(registry.load("format", name))]
every = pytest.mark.parametrize("fmt", FORMATS, ids=[f.spell() for f in FORMATS])
scale_dtypes = pytest.mark.parametrize("dtype", [F32, F16])


def gaussian(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(0.05)


def call(
    function: ir.Function, feeds: dict[str, Array], k: int, dtype: ir.DataType, rank: int
) -> onnx.ModelProto:
    """One call of a function whose parts are inputs, so that nothing is folded."""
    opset = function.opset_imports[""]
    node = helper.make_node(
        function.name, list(feeds), ["y"], domain="qgraph", k=k, dtype=dtype.value
    )
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
        )
        for name, array in feeds.items()
    ]
    output = helper.make_tensor_value_info("y", dtype.value, [None] * rank)
    proto = helper.make_model(
        helper.make_graph([node], "g", inputs, [output]),
        functions=[ir.to_proto(function)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("qgraph", 1)],
        ir_version=8,
    )
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    data = proto.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


class GatherElements(OpRun):
    """As specified; the evaluator's own takes no more than 64 numbers of a table."""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        return (np.take_along_axis(data, indices, axis),)


@every
@scale_dtypes
@pytest.mark.parametrize("n, k", [(3, 96), (130, 200), (1, 5)])
def test_function_equals_dequantize(fmt: Format, dtype: ir.DataType, n: int, k: int) -> None:
    weight = fmt.quantize(gaussian(n, k), dtype)
    feeds: dict[str, Array] = {**fmt.pack(weight, fmt.default_layout)}
    proto = call(fmt.function(13), feeds, k, dtype, 2)
    wanted = fmt.dequantize(weight).astype(dtype.numpy())
    results = [run(proto, feeds)]
    if n < 100:
        inlined = inline_local_functions(proto)
        evaluator = ReferenceEvaluator(inlined, new_ops=[GatherElements])
        results.append(np.asarray(evaluator.run(None, feeds)[0]))
    for found in results:
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@every
@pytest.mark.parametrize(
    "opset, n, k, lead", [(13, 130, 200, (2, 3)), (18, 257, 48, (4,)), (24, 7, 33, ())]
)
def test_linear_equals_product(
    fmt: Format, opset: int, n: int, k: int, lead: tuple[int, ...]
) -> None:
    weight = fmt.quantize(gaussian(n, k), F32)
    x = np.random.default_rng(1).standard_normal((*lead, k)).astype(np.float32)
    feeds: dict[str, Array] = {"x": x, **fmt.pack(weight, fmt.default_layout)}
    found = run(call(fmt.linear(opset), feeds, k, F32, x.ndim), feeds)
    wanted = x.astype(np.float64) @ fmt.dequantize(weight).T.astype(np.float64)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@every
def test_linear_in_half_precision_and_of_nothing(fmt: Format) -> None:
    weight = fmt.quantize(gaussian(9, 64), F16)
    parts = fmt.pack(weight, fmt.default_layout)
    for shape in ((2, 64), (0, 64)):
        feeds: dict[str, Array] = {"x": np.ones(shape, np.float16), **parts}
        found = run(call(fmt.linear(13), feeds, 64, F16, 2), feeds)
        wanted = feeds["x"].astype(np.float64) @ fmt.dequantize(weight).T.astype(np.float64)
        assert found.dtype == np.float16
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3)


@every
def test_functions_take_only_old_operators(fmt: Format) -> None:
    """Those whose meaning has not changed since opset 13, so that no model's opset is raised."""
    for function in (fmt.function(17), fmt.linear(17)):
        nodes = list(ir.traversal.RecursiveGraphIterator(function))
        assert {node.domain for node in nodes} == {""}
        assert {node.op_type for node in nodes} <= {
            "Add", "Cast", "Concat", "Constant", "Div", "Floor", "Gather", "GatherElements",
            "Identity", "MatMul", "Max", "Min", "Mul", "Pad", "Range", "ReduceProd", "Reshape",
            "Scan", "Shape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze",
        }  # fmt: skip
        assert list(function.attributes) == ["k", "dtype"]
        assert function.opset_imports == {"": 17}


def test_bodies_depend_on_name_and_opset_only() -> None:
    def text(function: ir.Function) -> bytes:
        return bytes(ir.to_proto(function).SerializeToString(deterministic=True))

    seen: dict[str, bytes] = {}
    for fmt, group in itertools.product(FORMATS, (32, 0)):
        if "group" in fmt.options:
            fmt = dataclasses.replace(fmt, group=group)
        for function in (fmt.function(21), fmt.linear(21)):
            assert seen.setdefault(function.name, text(function)) == text(function)
    assert len(set(seen.values())) == len(seen)
