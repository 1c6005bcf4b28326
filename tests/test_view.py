"""Views: ONNX's own meaning of each op, without a copy, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from qgraph.pipeline import capture
from qgraph.view import NotAView, View, trace

ARRAY = np.arange(4 * 6 * 10, dtype=np.float32).reshape(4, 6, 10)


def chain(body: str, array: Any = ARRAY, opset: int = 21) -> tuple[Any, Any, Any]:
    """(the view's array, ONNX's own result, the traced chain) of nodes from w to t."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]>\n'
        f"g (float x) => (float y) {{ {body} y = Mul(x, t) }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    graph = capture(ir.from_proto(model))
    wanted = ReferenceEvaluator(model).run(None, {"x": np.float32(1)})[0]
    found = trace(graph.model.graph[-1].inputs[1])
    return found.view.shape_of(array), wanted, found


@pytest.mark.parametrize(
    "body",
    [
        "t = Identity(w)",
        "t = Transpose(w)",
        "t = Transpose<perm = [1, 2, 0]>(w)",
        "s = Constant<value_ints = [24, 10]>() t = Reshape(w, s)",
        "s = Constant<value_ints = [0, -1]>() t = Reshape(w, s)",
        "s = Constant<value_ints = [0, 2, 3, 10]>() r = Reshape(w, s) t = Transpose(r)",
        "t = Flatten(w)",
        "t = Flatten<axis = 2>(w)",
        "t = Flatten<axis = 0>(w)",
        "t = Flatten<axis = -1>(w)",
        "a = Constant<value_ints = [0, 2]>() t = Unsqueeze(w, a)",
        "a = Constant<value_ints = [-1]>() u = Unsqueeze(w, a) t = Squeeze(u)",
        "b = Constant<value_ints = [1]>() e = Constant<value_ints = [3]>() t = Slice(w, b, e)",
        "b = Constant<value_ints = [-3]>() e = Constant<value_ints = [9999]>() "
        "a = Constant<value_ints = [-1]>() t = Slice(w, b, e, a)",
        "b = Constant<value_ints = [9, 0]>() e = Constant<value_ints = [-9999, 4]>() "
        "a = Constant<value_ints = [2, 1]>() s = Constant<value_ints = [-2, 3]>() "
        "t = Slice(w, b, e, a, s)",
        "b = Constant<value_ints = [9]>() e = Constant<value_ints = [-2]>() "
        "a = Constant<value_ints = [2]>() s = Constant<value_ints = [-1]>() "
        "t = Slice(w, b, e, a, s)",
        "i = Constant<value_int = -1>() t = Gather(w, i)",
        "i = Constant<value_ints = [1, 3, 5]>() t = Gather<axis = 1>(w, i)",
        "i = Constant<value_ints = [5, 4, 3]>() t = Gather<axis = 1>(w, i)",
        "i = Constant<value_ints = [3, 2, 1, 0]>() t = Gather(w, i)",
        "a, t = Split<axis = 2, num_outputs = 2>(w)",
        "p = Constant<value_ints = [1, 2, 3]>() a, t, b = Split<axis = 1>(w, p)",
        "a, b, t = Split<axis = -1, num_outputs = 3>(w)",
        "p = Constant<value_ints = [4, 6]>() a, t = Split<axis = 2>(w, p) ",
    ],
)
def test_each_op_is_onnx(body: str) -> None:
    shown, wanted, found = chain(body)
    np.testing.assert_array_equal(shown, wanted)
    assert np.shares_memory(shown, ARRAY)
    assert found.root.name == "w"


@pytest.mark.parametrize(
    ("body", "opset", "array"),
    [
        ("t = Squeeze<axes = [0]>(w)", 11, ARRAY[:1]),
        ("t = Unsqueeze<axes = [1]>(w)", 11, ARRAY),
        ("t = Slice<starts = [1], ends = [3], axes = [2]>(w)", 9, ARRAY),
        ("a, t = Split<axis = 1, split = [2, 4]>(w)", 11, ARRAY),
    ],
)
def test_attributes_of_old_opsets(body: str, opset: int, array: Any) -> None:
    shown, wanted, _ = chain(body, array, opset)
    np.testing.assert_array_equal(shown, wanted)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("s = Constant<value_ints = [240]>() r = Transpose(w) t = Reshape(r, s)", "needs a copy"),
        ("i = Constant<value_ints = [0, 1, 3]>() t = Gather(w, i)", "in no regular order"),
        ("i = Constant<value_ints = [1, 1]>() t = Gather(w, i)", "in no regular order"),
        ("i = Cast<to = 7>(x) t = Gather(w, i)", "indices of Gather"),
        ("s = Shape(x) t = Reshape(w, s)", "shape of Reshape"),
        ("c = Cast<to = 6>(w) t = Cast<to = 1>(c)", "to int32"),
    ],
)
def test_what_is_no_view_says_why(body: str, words: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\n'
        f"g (float x) => (float y) {{ {body} y = Mul(x, t) }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(ARRAY, "w"))
    graph = capture(ir.from_proto(model))
    with pytest.raises(NotAView, match=words):
        trace(graph.model.graph[-1].inputs[1]).view.shape_of(ARRAY)


def test_casts_round_in_their_order() -> None:
    view = View(casts=(ir.DataType.FLOAT16, ir.DataType.FLOAT))
    block = np.array([[1 + 2**-12, 3.0]], np.float32)
    assert view.to_float(block).tolist() == [[1.0, 3.0]]
    assert View(factor=0.5).to_float(block).tolist() == (block / 2).tolist()
    assert View().to_float(block) is block


def test_signature_knows_equal_elements() -> None:
    """Two ways to the same elements are equal; an offset, an order or a cast makes another."""
    one = View().then("transpose", (1, 0)).signature((4, 6))
    assert View().then("transpose", None).signature((4, 6)) == one
    back = View().then("transpose", (1, 0)).then("transpose", (1, 0)).signature((4, 6))
    assert back == View().signature((4, 6)) != one
    first = View().then("slice", 0, 0, 2, 1).signature((4, 6))
    second = View().then("slice", 0, 2, 4, 1).signature((4, 6))
    assert first != second
    assert View(factor=2.0).signature((4, 6)) != View().signature((4, 6))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_the_whole(data: Any) -> None:
    """A block of rows of a view is that block of the whole view, for any strides."""
    dims = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    array = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
    view = View().then("transpose", tuple(data.draw(st.permutations(range(len(dims))))))
    axis = data.draw(st.integers(0, len(dims) - 1))
    step = data.draw(st.sampled_from([1, 2, -1]))
    view = view.then("slice", axis, *((0, 99, step) if step > 0 else (99, -99, step)))
    shown = view.shape_of(array)
    wanted = array.transpose(view.steps[0].parameters[0])
    wanted = np.take(wanted, range(wanted.shape[axis])[::step], axis)
    np.testing.assert_array_equal(shown, wanted)
