"""`qgraph::Dequantize…` under onnx's checker, its reference evaluator and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from qgraph.formats.base import Array, Format, Layout, Part, parse

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
NAMES = ("int4", "uint4", "int8", "uint8", "int2", "uint2")


def model(
    format_: Format, parts: dict[Part, Array], k: int, dtype: ir.DataType, opset: int
) -> onnx.ModelProto:
    """One call of the function; its parts are inputs, so that nothing is folded."""
    node = helper.make_node(
        format_.function_name, list(parts), ["W"], domain="qgraph", k=k, dtype=dtype.value
    )
    inputs = [
        helper.make_tensor_value_info(
            part, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
        )
        for part, array in parts.items()
    ]
    output = helper.make_tensor_value_info("W", dtype.value, [None, None])
    proto = helper.make_model(
        helper.make_graph([node], "g", inputs, [output]),
        functions=[ir.to_proto(format_.function(opset))],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("qgraph", 1)],
        ir_version=8,
    )
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run_everywhere(proto: onnx.ModelProto, feeds: Any) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    runs: list[Any] = [session.run(None, feeds), ReferenceEvaluator(proto).run(None, feeds)]
    return [np.asarray(outputs[0]) for outputs in runs]


def check(text: str, n: int, k: int, block: int, dtype: ir.DataType, opset: int) -> None:
    format_ = parse(text)
    rows = np.random.default_rng(k).standard_normal((n, k)).astype(np.float32)
    layout = Layout("blocks", block)
    parts = format_.pack(format_.quantize(rows, dtype), layout)
    wanted = format_.dequantize(format_.unpack(parts, n, k, layout)).astype(dtype.numpy())
    for found in run_everywhere(model(format_, parts, k, dtype, opset), dict(parts)):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(
    "group, block, k",
    [
        ("32", 32, 96),  # odd number of groups, whole blocks
        ("64", 64, 100),  # partial last group
        ("64", 16, 100),  # each scale on several blocks, partial last block
        ("128", 128, 5),  # a group longer than the row
        ("row", 0, 30),
        ("row", 0, 7),  # a row that ends inside a byte
        ("row", 128, 300),
    ],
)
def test_equals_dequantize(name: str, dtype: ir.DataType, group: str, block: int, k: int) -> None:
    check(f"{name}:group={group}", 3, k, block, dtype, 21)


@pytest.mark.parametrize("opset", range(13, 26))
@pytest.mark.parametrize("name", ["int4", "uint2"])
def test_every_opset(name: str, opset: int) -> None:
    check(f"{name}:group=16", 2, 40, 16, F32, opset)


@pytest.mark.parametrize("name", NAMES)
def test_body(name: str) -> None:
    format_ = parse(name, group=64)
    function = format_.function(17)
    assert function.identifier() == ("qgraph", f"Dequantize{name.capitalize()}V1", "")
    assert format_.function_name == function.name
    assert function.opset_imports == {"": 17}
    assert list(function.attributes) == ["k", "dtype"]
    assert [v.name for v in function.inputs] == ["codes", "scales"] + (
        [] if format_.symmetric else ["zeros"]
    )
    kinds = [node.op_type for node in function]
    assert kinds.count("Gather") == (1 if format_.symmetric else 3)
    assert kinds.count("Mul") == 1
    assert kinds.count("Sub") == (0 if format_.symmetric else 1)
    assert not {node.domain for node in function} - {""}


@pytest.mark.parametrize("name", NAMES)
def test_body_depends_on_format_and_opset_only(name: str) -> None:
    def text(group: int, opset: int) -> bytes:
        proto = ir.to_proto(parse(name, group=group).function(opset))
        return bytes(proto.SerializeToString(deterministic=True))

    assert text(64, 21) == text(0, 21)
    assert text(64, 21) != text(64, 20)
