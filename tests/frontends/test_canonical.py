"""Canonical form: names, shapes, metadata, order, opsets, one graph to a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from canonical_graphs import (
    IF,
    LOOP,
    SQUARE,
    X,
    capture,
    codes,
    main_constants,
    ops,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser

from qgraph.errors import GraphError, InputError
from qgraph.frontends.canonical import canonicalize
from qgraph.frontends.naming import aliases
from qgraph.scopes import scopes
from qgraph.selectors import MODULE
from qgraph.verify import verify


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
