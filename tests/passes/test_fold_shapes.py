"""What a graph asks of shapes, answered by numbers and by graph inputs; names not to believe."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fusing import run

from qgraph.passes.fold_shapes import fold_shapes
from qgraph.passes.infer_dims import infer_dims
from qgraph.passes.matching import number
from qgraph.passes.undeclared import undeclared
from qgraph.rewrite import Rewriter

ASKED = {
    "number": ("n = Gather(s, last)  z = Expand(one, n)", 1),
    "axis": ("n = Gather(s, middle)  z = Expand(one, n)", 1),
    "scalar": ("m = Gather(s, step)  z = Range(zero, m, step)", 1),
    "sum": (
        "a = Gather(s, first)  b = Gather(s, middle)  c = Add(a, b)  n = Add(c, three) "
        "z = Expand(one, n)",
        1,
    ),
    "joined": (
        "a = Gather(s, first)  b = Gather(s, last)  n = Concat<axis = 0>(b, a)  z = Expand(one, n)",
        1,
    ),
    "sliced": ("n = Slice(s, first, last)  z = Expand(one, n)", 1),
}


def model(body: str, shape: str = "batch, sequence, 4") -> ir.Model:
    return ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[{shape}] x) => (float[batch, sequence, 4] y, z)
    <int64[1] first = {{0}}, int64[1] middle = {{1}}, int64[1] last = {{2}}, int64[1] one = {{1}},
     int64[1] three = {{3}}, int64 zero = {{0}}, int64 step = {{1}}>
    {{ y = Sin(x)  s = Shape(y)  {body} }}""")


def folded(asked: ir.Model) -> int:
    for node in asked.graph:
        for value in node.outputs:  # as capture infers them
            value.type = value.type or ir.TensorType(
                ir.DataType.FLOAT if value.name in ("y", "f") else ir.DataType.INT64
            )
            if value.shape is None and value.name != "z":
                scalar = value.name == "m"
                value.shape = ir.Shape([] if scalar else [None])
    count = fold_shapes(Rewriter(asked), infer_dims(asked.graph))
    asked.graph.sort()
    return count


@pytest.mark.parametrize("name", ASKED)
def test_sizes_are_asked_of_the_input(name: str) -> None:
    body, count = ASKED[name]
    before, after = model(body), model(body)
    after.graph.outputs[1].type = before.graph.outputs[1].type = ir.TensorType(ir.DataType.INT64)
    assert folded(after) == count
    asked = [node.inputs[0].name for node in after.graph if node.op_type == "Shape"]
    assert set(asked) <= {"x"}
    if name == "number":
        assert not asked
    for shape in ((2, 3, 4), (1, 5, 4)):
        feeds = {"x": np.ones(shape, np.float32)}
        assert np.array_equal(run(before, feeds)["z"], run(after, feeds)["z"])


def test_what_no_input_says_stays() -> None:
    asked = model("n = Gather(s, middle)  z = Expand(one, n)", "batch, 2, 4")
    asked.graph.inputs[0].shape = ir.Shape([None, None, 4])
    asked.graph.outputs[0].shape = ir.Shape([None, None, 4])
    assert folded(asked) == 0


def test_a_size_that_becomes_a_float_is_a_number() -> None:
    """A factor like √D, as attention is scaled by: constants can be folded from there on."""
    asked = model("n = Slice(s, last, three)  f = Cast<to = 1>(n)  z = Sqrt(f)")
    asked.graph.outputs[1].type = ir.TensorType(ir.DataType.FLOAT)
    assert folded(asked) == 1
    cast = next(node for node in asked.graph if node.op_type == "Cast")
    assert number(cast.inputs[0]) == 4


def test_names_of_outputs_are_forgotten_for_a_while() -> None:
    asked = model("n = Gather(s, middle)  z = Expand(one, n)")
    x, y = asked.graph.inputs[0], asked.graph.outputs[0]
    x.shape = ir.Shape(["batch", "past + 1", 4])
    y.shape = ir.Shape(["batch", "past", 4])
    with undeclared(asked.graph):
        assert [str(dim) for dim in x.shape] == ["batch", "x_1", "4"]
        assert y.shape is not None
        assert y.shape.has_unknown_dim()
    assert str(x.shape) == "[batch,past + 1,4]"
    assert str(y.shape) == "[batch,past,4]"


def test_names_in_bodies_are_forgotten_too() -> None:
    asked = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[batch, 4] x, bool c) => (float[batch, 4] y)
    { y = If(c) <then_branch = a () => (float[past, 4] t) { t = Cos(x) },
                 else_branch = b () => (float[past, 4] e) { e = Sin(x) }> }""")
    with undeclared(asked.graph) as complete:
        infer_dims(asked.graph)
        assert str(asked.graph.outputs[0].shape) == "[batch,4]"
        complete()
        bodies = [attr.as_graph() for attr in asked.graph.node(0).attributes.values()]
        assert {str(body.outputs[0].shape) for body in bodies} == {"[batch,4]"}


def test_names_come_back_after_a_failure() -> None:
    asked = model("n = Gather(s, middle)  z = Expand(one, n)")
    with pytest.raises(ValueError, match="stop"), undeclared(asked.graph):
        raise ValueError("stop")
    assert str(asked.graph.outputs[0].shape) == "[batch,sequence,4]"


def test_values_in_between_get_names_where_nothing_else_is_known() -> None:
    asked = model("h = Cos(y)  n = Gather(s, middle)  z = Expand(one, n)")
    middle = asked.graph.node(2).outputs[0]
    middle.shape = ir.Shape(["batch", "sequence", 4])
    with undeclared(asked.graph) as complete:
        assert str(middle.shape) == "[None,None,4]"
        middle.shape = ir.Shape([2, None, 4])
        complete()
        assert str(middle.shape) == "[2,sequence,4]"
