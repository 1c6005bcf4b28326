"""Canonical form, one graph for each of its rules: same numbers before and after, ops counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser

from qgraph.errors import GraphError, InputError
from qgraph.frontends.canonical import canonicalize
from qgraph.frontends.naming import aliases
from qgraph.frontends.notes import Note
from qgraph.scopes import scopes
from qgraph.selectors import MODULE
from qgraph.verify import verify

Feeds = dict[str, np.ndarray]


def run(model: onnx.ModelProto | ir.Model, feeds: Feeds) -> list[np.ndarray]:
    """All outputs, from ONNX Runtime without graph optimizations."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def forget_node_names(graph: onnx.GraphProto) -> None:
    """ONNX Runtime refuses two nodes of one name in a graph; the names mean nothing to it."""
    for node in graph.node:
        node.name = ""
        for attribute in node.attribute:
            forget_node_names(attribute.g)


def capture(
    text: str | onnx.ModelProto, *feeds: Feeds, **options: Any
) -> tuple[ir.Model, list[Note]]:
    """The model in canonical form, after a check that it computes what it did, bit for bit."""
    proto = parser.parse_model(text) if isinstance(text, str) else text
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    forget_node_names(plain.graph)
    before = [run(plain, f) for f in feeds]
    model = ir.from_proto(proto)
    notes = canonicalize(model, **options)
    verify(model)
    for f, wanted in zip(feeds, before, strict=True):
        for found, want in zip(run(model, f), wanted, strict=True):
            np.testing.assert_array_equal(found, want)
    return model, notes


def ops(model: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.all_nodes()))


def main_constants(model: ir.Model) -> list[str]:
    return sorted(model.graph.initializers)


def body_constants(model: ir.Model) -> list[str]:
    return sorted(name for body in scopes(model.graph)[1:] for name in body.initializers)


def codes(notes: list[Note]) -> list[tuple[str, str]]:
    return [(note.code, note.name) for note in notes]


X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
SQUARE = "{1, 2, 3, 4, 5, 6, 7, 8, 9}"
ENDING = "{9, 8, 7, 6, 5, 4, 3, 2, 1}"

IF = f"""
<ir_version: 10, opset_import: ["": 18]>
main (float[2, 3] x, bool c) => (float[2, 3] y) <float[3, 3] W = {SQUARE}> {{
    [mm] h = MatMul (x, W)
    [choose] y = If (c) <
        then_branch = yes () => (float[2, 3] a) <float[3, 3] V = {SQUARE}, int64[2] to = {{2, 3}}>
        {{
            [mm] m = MatMul (h, V)
            [reshape] a = Reshape (m, to)
        }},
        else_branch = no () => (float[2, 3] b)
        <float[3, 3] V = {ENDING}, float[3] bias = {{1, 2, 3}}> {{
            [mm] m = MatMul (h, V)
            [add] b = Add (m, bias)
        }}
    >
}}
"""


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


LOOP = """
<ir_version: 10, opset_import: ["": 18]>
main (float[2, 3] x, int64 n) => (float[2, 3] y, z) {
    go = Constant <value = bool {1}> ()
    y, z = Loop (n, go, x) <body = step (int64 i, bool on, float[2, 3] h)
        => (bool on_out, float[2, 3] h_out, float[3, 3] seen) {
        on_out = Identity (on)
        [held] W = Constant <value = float[3, 3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> ()
        to = Constant <value_ints = [2, 3]> ()
        m = MatMul (h, W)
        h_out = Reshape (m, to)
        [given] seen = Constant <value = float[3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}> ()
    }>
}
"""


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


def test_names_given_to_the_nameless_and_kept_for_the_first() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x) => (float[2, 3] y) {
        a = Neg (x)
        [same] b = Abs (a)
        [same] c = Neg (b)
        [same_1] y = Relu (c)
    }
    """
    model, notes = capture(text, {"x": X})
    assert [node.name for node in model.graph] == ["Neg_a", "same", "same_2", "same_1"]
    assert codes(notes) == [("RENAMED", "same_2")]
    assert "'same'" in notes[0].message


def test_a_later_name_of_the_main_graph_goes_before_that_of_a_body() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x, bool c) => (float[2, 3] y) {
        z = If (c) <
            then_branch = yes () => (float[2, 3] y) { y = Neg (x) },
            else_branch = no () => (float[2, 3] b) { b = Abs (x) }
        >
        y = Relu (z)
    }
    """
    model = ir.from_proto(parser.parse_model(text))
    notes = canonicalize(model)
    verify(model)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert codes(notes) == [("RENAMED", "y_1")]
    found = run(model, {"x": X, "c": np.array(True)})
    np.testing.assert_array_equal(found[0], np.maximum(-X, 0))


def test_outputs_that_a_node_leaves_out() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x) => (float[2, 3] y, float[2, 1] z) <float[3] s = {1, 2, 3}> {
        y, unread, z = LayerNormalization (x, s)
    }
    """
    proto = parser.parse_model(text)
    proto.graph.node[0].output[1] = ""
    model, _ = capture(proto, {"x": X})
    assert [value.name for value in model.graph.node(0).outputs] == ["y", "", "z"]


def test_shapes_are_inferred_and_those_given_stay() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[batch, 6] x) => (y) <int64[3] to = {0, 2, 3}, float[3, 5] W> {
        r = Reshape (x, to)
        m = MatMul (r, W)
        y = Relu (m)
    }
    """
    proto = parser.parse_model(text.replace(", float[3, 5] W>", ">"))
    weight = np.ones((3, 5), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    given_shape = helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, ["rows", None, 5])
    proto.graph.value_info.append(given_shape)
    model, notes = capture(proto, {"x": np.ones((4, 6), np.float32)})
    shapes = {v.name: v.shape for node in model.graph for v in node.outputs}
    assert shapes["r"] == ir.Shape(["batch", 2, 3])
    assert shapes["m"] == ir.Shape(["rows", 2, 5]), "a name stays, a blank is filled"
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    assert notes == []


def test_inference_makes_up_no_names_of_dimensions() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[batch, 6] x) => (int64[2, n] y) { h = NonZero (x) y = Abs (h) }
    """
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.shape.dim[1].ClearField("value")
    model, _ = capture(proto, {"x": np.eye(6, dtype=np.float32)})
    for value in (model.graph[0].outputs[0], model.graph.outputs[0]):
        assert value.shape == ir.Shape([2, None])


def test_shapes_from_constants_of_bodies() -> None:
    text = IF.replace("=> (float[2, 3] a)", "=> (a)")
    model, _ = capture(text, {"x": X, "c": np.array(True)})
    (reshape,) = [node for node in model.graph.all_nodes() if node.op_type == "Reshape"]
    assert reshape.outputs[0].shape == ir.Shape([2, 3])


def test_shapes_from_a_small_constant_in_a_file(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[batch, 6] x) => (y) { y = Reshape (x, to) }
    """
    (tmp_path / "to.data").write_bytes(np.array([0, 2, 3], np.int64).tobytes())
    tensor = ir.ExternalTensor(
        "to.data", 0, 24, ir.DataType.INT64, shape=ir.Shape([3]), name="to", base_dir=tmp_path
    )
    model = ir.from_proto(parser.parse_model(text))
    value = model.graph[0].inputs[1]
    assert value is not None
    value.const_value = tensor
    model.graph.register_initializer(value)
    assert canonicalize(model) == []
    assert model.graph.outputs[0].shape == ir.Shape(["batch", 2, 3])
    assert value.const_value is tensor
    assert tensor.raw is None, "mapped for the time of one read only"


def test_failed_inference_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> onnx.ModelProto:
        raise RuntimeError("no shapes today")

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    model, notes = capture(IF, {"x": X, "c": np.array(True)})
    assert [(n.code, n.message) for n in notes if n.code != "RENAMED"] == [
        ("SHAPES_NOT_INFERRED", "shape inference failed: no shapes today")
    ]
    assert main_constants(model) == ["V", "V_1", "W"], "capture went on"


def test_weights_are_not_serialized_for_shape_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    infer = onnx.shape_inference.infer_shapes

    def measure(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        sizes.append(proto.ByteSize())
        return infer(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", measure)
    graph = ir.from_proto(parser.parse_model(LOOP)).graph
    big = ir.tensor(np.ones((3, 100_000), np.float32), name="W")
    (body,) = scopes(graph)[1:]
    held = next(node for node in body if node.name == "held")
    held.attributes.add(ir.AttrTensor("value", big))
    model = ir.Model(graph, ir_version=10)
    canonicalize(model)
    assert model.graph.initializers["W"].const_value is big
    assert len(sizes) == 1
    assert sizes[0] < 5000


def test_metadata_loses_stack_traces_and_local_paths_only() -> None:
    proto = parser.parse_model(IF)
    helper.set_model_props(proto, {"license": "mit", "made by": "me at /home/me/models"})
    proto.doc_string = "A model."
    trace = '  File "/home/me/project/model.py", line 12, in forward\n    return self.proj(x)'
    for node in (proto.graph.node[0], proto.graph.node[1].attribute[0].g.node[0]):
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
        node.metadata_props.add(key="mine", value="keep this")
        node.metadata_props.add(key="my source", value="/home/me/project/model.py:12")
        node.doc_string = "/home/me/project/model.py(12): forward"
    scope_names = "['', 'layers.0', 'layers.0.proj', 'linear']"
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scope_names)
    proto.graph.initializer[0].metadata_props.add(key="pkg.torch.onnx.x", value="y")
    proto.graph.initializer[0].doc_string = "C:\\Users\\me\\weights"
    proto.graph.input[0].doc_string = "two tokens / three channels"
    model, _ = capture(proto, {"x": X, "c": np.array(True)})
    text = str(ir.to_proto(model))
    assert "/home/me/project" not in text
    assert "Users" not in text
    assert "pkg.torch" not in text
    assert model.metadata_props == {"license": "mit", "made by": "me at /home/me/models"}
    assert model.doc_string == "A model."
    assert model.graph.inputs[0].doc_string == "two tokens / three channels"
    assert model.graph[0].metadata_props == {"mine": "keep this"}
    assert model.graph[0].meta[MODULE] == "layers.0.proj"


def test_nodes_in_any_order_are_sorted_and_circles_refused() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x) => (float[2, 3] y) { y = Relu (z)  z = Neg (x) }
    """
    model, notes = capture(text, {"x": X})
    assert [node.op_type for node in model.graph] == ["Neg", "Relu"]
    assert codes(notes) == [("SORTED", "main")]
    with pytest.raises(GraphError, match="circle"):
        canonicalize(ir.from_proto(parser.parse_model(text.replace("Neg (x)", "Neg (y)"))))


def test_opset_imports() -> None:
    text = """
    <ir_version: 10, opset_import: ["ai.onnx": 18]>
    main (float[2, 3] x) => (float[2, 3] y) { h = Neg (x) y = com.microsoft.Gelu (h) }
    """
    model, notes = capture(text, {"x": X})
    assert model.opset_imports == {"": 18, "com.microsoft": 1}
    assert codes(notes) == [("OPSET_IMPORT_ADDED", "com.microsoft")]
    proto = parser.parse_model(text.replace('"ai.onnx": 18', '"com.microsoft": 1'))
    with pytest.raises(InputError, match="imports no opset"):
        canonicalize(ir.from_proto(proto))


@pytest.mark.parametrize("opset,found", [(9, ["OPSET_BELOW_13"]), (13, [])])
def test_old_opsets_are_taken_and_noted(opset: int, found: list[str]) -> None:
    text = f"""
    <ir_version: 4, opset_import: ["": {opset}]>
    main (float[2, 3] x) => (float[2, 3] y) <float[3, 3] W = {SQUARE}> {{ y = MatMul (x, W) }}
    """
    _, notes = capture(text, {"x": X})
    assert [note.code for note in notes] == found


def test_a_copy_of_a_weight_is_another_name_of_it() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 18]>
    main (float[2, 3] x) => (float[2, 3] y) <float[3, 3] W = {SQUARE}> {{
        "head.weight" = Identity (W)
        again = Identity ("head.weight")
        y = MatMul (x, again)
    }}
    """
    proto = parser.parse_model(text.replace('"head.weight"', "head_weight"))
    model, _ = capture(proto, {"x": X})
    assert aliases(model.graph.initializers["W"]) == ("head_weight", "again")
    assert aliases(model.clone().graph.initializers["W"]) == ("head_weight", "again")


def test_canonical_form_is_a_fixed_point() -> None:
    model, _ = capture(IF, {"x": X, "c": np.array(True)})
    before = ir.to_proto(model)
    assert canonicalize(model) == []
    assert ir.to_proto(model) == before


NAMES = st.sampled_from(["a", "b", "W", "a_1", "", "W_1"])


@st.composite
def branches(draw: st.DrawFn) -> onnx.ModelProto:
    """An If whose two bodies and main graph use names from one small pool."""
    bodies = []
    for side in range(2):
        weight, value = draw(NAMES.filter(bool)), draw(NAMES.filter(bool))
        out = f"out{side}"
        value = f"{value}v" if value == weight else value
        array = np.full((3, 3), side + 2, np.float32)
        as_node = draw(st.booleans())
        tensor = onnx.numpy_helper.from_array(array, weight)
        nodes = [helper.make_node("Constant", [], [weight], draw(NAMES), value=tensor)] * as_node
        nodes += [
            helper.make_node("MatMul", ["h", weight], [value], draw(NAMES)),
            helper.make_node("Neg", [value], [out], draw(NAMES)),
        ]
        result = helper.make_tensor_value_info(out, onnx.TensorProto.FLOAT, [2, 3])
        bodies.append(helper.make_graph(nodes, f"b{side}", [], [result], [tensor][as_node:]))
    nodes = [
        helper.make_node("Neg", ["x"], ["h"], draw(NAMES)),
        helper.make_node(
            "If", ["c"], ["y"], draw(NAMES), then_branch=bodies[0], else_branch=bodies[1]
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3]),
            helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


@given(proto=branches())
@settings(max_examples=60, deadline=None)
def test_any_clash_of_names_is_resolved_and_nothing_else_changes(proto: onnx.ModelProto) -> None:
    model, notes = capture(proto, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert ops(model) == {"Neg": 3, "If": 1, "MatMul": 2}
    assert len(model.graph.initializers) == 2
    had = [n.name for n in proto.graph.node]
    for attribute in sorted(proto.graph.node[1].attribute, key=lambda a: a.name, reverse=True):
        had += [n.name for n in attribute.g.node if n.op_type != "Constant"]
    have = {node.name for node in model.graph.all_nodes()}
    assert {name for name in had if name} <= have, "the first node of a name keeps it"
    assert all(note.code == "RENAMED" for note in notes)
