"""Canonical form: constants and weights, of the main graph and of bodies, one graph to a rule."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from canonical_graphs import (
    ENDING,
    IF,
    LOOP,
    SQUARE,
    X,
    body_constants,
    capture,
    codes,
    main_constants,
    ops,
    run,
)
from onnx import parser

from qgraph.frontends.canonical import canonicalize
from qgraph.frontends.naming import aliases
from qgraph.scopes import scopes
from qgraph.verify import verify


def test_weights_of_bodies_are_lifted_and_renamed_where_two_scopes_use_one_name() -> None:
    model, notes = capture(IF, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert ops(model) == {"MatMul": 3, "If": 1, "Reshape": 1, "Add": 1}
    assert main_constants(model) == ["V", "V_1", "W"]
    assert body_constants(model) == ["bias", "to"], "shape-like constants and vectors stay"
    assert aliases(model.graph.initializers["V_1"]) == ("V",)
    names = [node.name for node in model.graph.all_nodes()]
    assert names == ["mm", "choose", "mm_1", "reshape", "mm_2", "add"]
    assert sorted(codes(notes)) == [
        ("RENAMED", "V_1"),
        ("RENAMED", "m_1"),
        ("RENAMED", "mm_1"),
        ("RENAMED", "mm_2"),
    ]


def test_the_weight_is_the_same_tensor_object_as_before() -> None:
    model = ir.from_proto(parser.parse_model(IF))
    before = {id(v.const_value) for s in scopes(model.graph) for v in s.initializers.values()}
    canonicalize(model)
    after = {id(v.const_value) for s in scopes(model.graph) for v in s.initializers.values()}
    assert after == before


@pytest.mark.parametrize("steps", [1, 3])
def test_constants_of_a_loop_body(steps: int) -> None:
    model, _ = capture(LOOP, {"x": X, "n": np.array(steps)})
    assert ops(model) == {"Loop": 1, "Identity": 2, "MatMul": 1, "Reshape": 1}
    assert main_constants(model) == ["W", "go", "seen"]
    assert body_constants(model) == ["to"]
    assert aliases(model.graph.initializers["W"]) == ("held",)
    (body,) = scopes(model.graph)[1:]
    copy = body.outputs[2].producer()
    assert copy is not None
    assert (copy.op_type, copy.inputs[0]) == ("Identity", model.graph.initializers["seen"])


def test_constants_of_a_scan_body() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main (float[3] h0, float[4, 3] xs) => (float[3] h, float[4, 3] ys) {{
        h, ys = Scan (h0, xs) <num_scan_inputs = 1, body = step (float[3] a, float[3] b)
            => (float[3] next, float[3] out) <float[3, 3] W = {SQUARE}, int64[1] axes = {{0}}> {{
            row = Unsqueeze (b, axes)
            m = MatMul (row, W)
            flat = Squeeze (m, axes)
            next = Add (a, flat)
            out = Neg (flat)
        }}>
    }}
    """
    rng = np.random.default_rng(1)
    h0, xs = rng.standard_normal((3,)), rng.standard_normal((4, 3))
    feeds = {"h0": h0.astype(np.float32), "xs": xs.astype(np.float32)}
    model, notes = capture(text, feeds)
    assert main_constants(model) == ["W"]
    assert body_constants(model) == ["axes"]
    assert notes == []
    assert ops(model) == {"Scan": 1, "Unsqueeze": 1, "MatMul": 1, "Squeeze": 1, "Add": 1, "Neg": 1}


def test_bodies_in_bodies() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x, bool c, int64 n) => (float[2, 3] y) {{
        go = Constant <value = bool {{1}}> ()
        y = Loop (n, go, x) <body = step (int64 i, bool on, float[2, 3] h)
            => (bool on_out, float[2, 3] h_out) <float[3, 3] W = {SQUARE}> {{
            on_out = Identity (on)
            m = MatMul (h, W)
            h_out = If (c) <
                then_branch = yes () => (float[2, 3] a) {{
                    W2 = Constant <value = float[3, 3] {SQUARE}> ()
                    a = MatMul (m, W2)
                }},
                else_branch = no () => (float[2, 3] b) <float[3, 3] W2 = {ENDING}> {{
                    b = MatMul (m, W2)
                }}
            >
        }}>
    }}
    """
    two = np.array(2)
    model, notes = capture(
        text,
        {"x": X, "c": np.array(True), "n": two},
        {"x": X, "c": np.array(False), "n": two},
    )
    assert main_constants(model) == ["W", "W2", "W2_1", "go"]
    assert body_constants(model) == []
    assert codes(notes) == [("RENAMED", "W2_1")]


@pytest.mark.parametrize(
    "spelling,dtype,shape",
    [
        ("value = float[2, 2] {1, 2, 3, 4}", ir.DataType.FLOAT, [2, 2]),
        ("value = int64 {7}", ir.DataType.INT64, []),
        ("value_float = 1.5", ir.DataType.FLOAT, []),
        ("value_floats = [1.5, 2.5]", ir.DataType.FLOAT, [2]),
        ("value_int = 3", ir.DataType.INT64, []),
        ("value_ints = [3, 4]", ir.DataType.INT64, [2]),
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_every_form_of_constant(
    spelling: str, dtype: ir.DataType, shape: list[int], is_output: bool
) -> None:
    outputs, rest = ("k", "") if is_output else ("y", "y = Identity (k)")
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main () => ({outputs}) {{ [named] k = Constant <{spelling}> () {rest} }}
    """
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.elem_type = dtype.value
    model, _ = capture(proto, {})
    assert ops(model) == {"Identity": 1}
    assert [value.name for value in model.graph.outputs] == [outputs]
    (value,) = model.graph.initializers.values()
    assert value.name == ("k/value" if is_output else "k")
    assert (value.dtype, list(value.shape or ())) == (dtype, shape)
    assert set(aliases(value)) == {"named", "k" if is_output else "y"}


@pytest.mark.parametrize("spelling", ['value_string = "a"', 'value_strings = ["a", "b"]'])
def test_constants_of_strings_stay_nodes(spelling: str) -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main () => (string y) {{ k = Constant <{spelling}> () y = Identity (k) }}
    """
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model, _ = capture(proto, {})
    assert ops(model) == {"Constant": 1, "Identity": 1}


def test_a_constant_that_is_an_output_and_has_readers() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 2] x) => (float[2, 2] y, float[2, 2] k) {
        k = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
        y = MatMul (x, k)
    }
    """
    model, _ = capture(text, {"x": X[:, :2]})
    assert [value.name for value in model.graph.outputs] == ["y", "k"]
    assert ops(model) == {"MatMul": 1, "Identity": 1}


def test_an_initializer_that_is_a_body_output_is_lifted_behind_a_copy() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (bool c) => (float[2, 2] y) {
        y = If (c) <
            then_branch = yes () => (float[2, 2] W) <float[2, 2] W = {1, 2, 3, 4}> {},
            else_branch = no () => (float[2, 2] V) <float[2, 2] V = {5, 6, 7, 8}> {}
        >
    }
    """
    model, _ = capture(text, {"c": np.array(True)}, {"c": np.array(False)})
    assert main_constants(model) == ["V", "W"]
    assert ops(model) == {"If": 1, "Identity": 2}


def test_initializers_are_no_inputs() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x, float[3, 3] W) => (float[2, 3] y) <W = {SQUARE}> {{ y = MatMul (x, W) }}
    """
    proto = parser.parse_model(text.replace(f"<W = {SQUARE}>", ""))
    weight = np.arange(9, dtype=np.float32).reshape(3, 3)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    model, notes = capture(proto, {"x": X})
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert main_constants(model) == ["W"]
    assert codes(notes) == [("OVERRIDABLE_INPUT", "W")]

    proto.ir_version = 3  # before version 4 no initializer could be overridden
    model, notes = capture(proto, {"x": X})
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert model.ir_version == 4
    assert notes == []


def test_a_body_input_is_never_a_constant() -> None:
    model = ir.from_proto(parser.parse_model(LOOP))
    (body,) = scopes(model.graph)[1:]
    body.inputs[2].const_value = ir.tensor(X, name="h")
    body.register_initializer(body.inputs[2])
    notes = canonicalize(model)
    verify(model)
    assert [value.name for value in body.inputs] == ["i", "on", "h"]
    assert notes == []
    wanted = run(parser.parse_model(LOOP), {"x": X, "n": np.array(2)})
    np.testing.assert_array_equal(run(model, {"x": X, "n": np.array(2)})[0], wanted[0])
