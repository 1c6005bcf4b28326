"""Calls of model-local functions: the same numbers, and nodes called after their callers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, parser

from qgraph.errors import InputError
from qgraph.frontends.canonical import canonicalize
from qgraph.verify import verify

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
HEAD = '<ir_version: 10, opset_import: ["": 18, "local": 1]>'


def run(proto: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def inline(proto: str | onnx.ModelProto, **feeds: np.ndarray) -> ir.Model:
    """The model in canonical form, after a check that it computes what it did, bit for bit."""
    proto = parser.parse_model(proto) if isinstance(proto, str) else proto
    model = ir.from_proto(proto)
    canonicalize(model)
    verify(model)
    for found, wanted in zip(run(ir.to_proto(model), **feeds), run(proto, **feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not model.functions
    return model


def ops(model: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.all_nodes()))


NESTED = f"""
{HEAD}
main (float[2, 3] x) => (float[2, 3] y)
<float[3, 3] W = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[3] b = {{1, 2, 3}}> {{
    [layer0] h = local.block (x, W, b)
    [layer1] y = local.block (h, W, b)
}}
<domain: "local", opset_import: ["": 18, "local": 1]>
block (x, w, b) => (out) {{
    [up] h = local.linear (x, w, b)
    [act] a = Relu (h)
    [down] out = local.linear (a, w, b)
}}
<domain: "local", opset_import: ["": 18]>
linear (x, w, b) => (out) {{
    [mm] m = MatMul (x, w)
    out = Add (m, b)
}}
<domain: "local", opset_import: ["": 18]>
never_called (x) => (out) {{ out = Neg (x) }}
"""


def test_nested_functions_are_named_after_their_call_sites() -> None:
    model = inline(NESTED, x=X)
    assert ops(model) == {"MatMul": 4, "Add": 4, "Relu": 2}
    assert [node.name for node in model.graph if node.op_type == "MatMul"] == [
        "layer0/up/mm",
        "layer0/down/mm",
        "layer1/up/mm",
        "layer1/down/mm",
    ]
    assert [node.name for node in model.graph if node.op_type == "Relu"] == [
        "layer0/act",
        "layer1/act",
    ]
    assert [v.name for v in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]
    assert "h" in {v.name for node in model.graph for v in node.outputs}


def test_attributes_are_bound_or_take_their_default_or_are_left_out() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{
        a = local.act <slope = 0.5> (x)
        b = local.act (a)
        c = local.cut <limit = 2> (b)
        y = local.cut (c)
    }}
    <domain: "local", opset_import: ["": 18]>
    act <slope: float = 0.25> (x) => (out) {{ out = LeakyRelu <alpha: float = @slope> (x) }}
    <domain: "local", opset_import: ["": 18]>
    cut <limit> (x) => (out) {{ out = Softmax <axis: int = @limit> (x) }}
    """
    proto = parser.parse_model(text.replace("limit = 2", "limit = 0"))
    model = inline(proto, x=X)
    alphas = [n.attributes["alpha"].as_float() for n in model.graph if n.op_type == "LeakyRelu"]
    assert alphas == [0.5, 0.25]
    cuts = [node.attributes for node in model.graph if node.op_type == "Softmax"]
    assert [len(attributes) for attributes in cuts] == [1, 0]
    assert cuts[0]["axis"].as_int() == 0


def test_an_attribute_that_passes_through_two_functions() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{ y = local.outer <a = 0.5> (x) }}
    <domain: "local", opset_import: ["": 18, "local": 1]>
    outer <a> (x) => (out) {{ out = local.inner <slope: float = @a> (x) }}
    <domain: "local", opset_import: ["": 18]>
    inner <slope> (x) => (out) {{ out = LeakyRelu <alpha: float = @slope> (x) }}
    """
    (node,) = inline(text, x=X).graph
    assert node.attributes["alpha"].as_float() == 0.5


def test_missing_inputs_fewer_outputs_and_inputs_handed_through() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y, float[2, 3] same, float[2, 3] twice) {{
        clipped = local.limit (x)
        y, same, twice = local.more (clipped)
        only = local.more (same)
    }}
    <domain: "local", opset_import: ["": 18]>
    limit (x, low, high) => (out) {{ out = Clip (x, low, high) }}
    <domain: "local", opset_import: ["": 18]>
    more (x) => (out, x, out) {{ out = Relu (x) }}
    """
    proto = parser.parse_model(text)
    model = ir.from_proto(proto)
    canonicalize(model)
    verify(model)
    y, same, twice = run(ir.to_proto(model), x=X)
    np.testing.assert_array_equal(y, np.maximum(X, 0))
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(twice, y)
    assert ops(model) == {"Clip": 1, "Relu": 2, "Identity": 2}
    assert [v.name for v in model.graph.inputs] == ["x"]
    assert [v.name for v in model.graph.outputs] == ["y", "same", "twice"]


def test_calls_in_bodies_and_bodies_in_functions() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x, bool c) => (float[2, 3] y) <float[3, 3] W = {{1,2,3,4,5,6,7,8,9}}> {{
        [choose] y = If (c) <
            then_branch = yes () => (float[2, 3] a) {{ [one] a = local.pick (x, W, c) }},
            else_branch = no () => (float[2, 3] b) {{ [two] b = local.pick (x, W, c) }}
        >
    }}
    <domain: "local", opset_import: ["": 18, "local": 1]>
    pick (x, w, c) => (out) {{
        [inner] out = If (c) <
            then_branch = yes () => (p) {{ [mm] p = MatMul (x, w) }},
            else_branch = no () => (q) {{
                k = Constant <value = float[3, 3] {{9, 8, 7, 6, 5, 4, 3, 2, 1}}> ()
                [go] q = local.product (x, k)
            }}
        >
    }}
    <domain: "local", opset_import: ["": 18]>
    product (x, w) => (out) {{ [mm] out = MatMul (x, w) }}
    """
    for c in (True, False):
        model = inline(text, x=X, c=np.array(c))
    assert ops(model) == {"If": 3, "MatMul": 4}
    assert sorted(node.name or "" for node in model.graph.all_nodes()) == [
        "choose",
        "one/go/mm",
        "one/inner",
        "one/mm",
        "two/go/mm",
        "two/inner",
        "two/mm",
    ]
    assert len(model.graph.initializers) == 3, "W and k twice, one for each call"


OURS = f"""
{HEAD.replace("local", "qgraph")}
main (float[2, 3] x) => (float[2, 3] y) {{ [call] y = qgraph.DequantizeInt4G64V1 (x) }}
<domain: "qgraph", opset_import: ["": 18]>
DequantizeInt4G64V1 (x) => (out) {{ [inner] out = Neg (x) }}
"""


def test_a_function_of_our_domain_is_kept_only_where_its_body_is_ours() -> None:
    model = inline(OURS, x=X)
    assert ops(model) == {"Neg": 1}

    asked = []

    def trusted(function: ir.Function) -> bool:
        asked.append(function.name)
        return True

    model = ir.from_proto(parser.parse_model(OURS))
    canonicalize(model, trusted)
    verify(model)
    assert asked == ["DequantizeInt4G64V1"]
    assert ops(model) == {"DequantizeInt4G64V1": 1}
    assert list(model.functions) == [("qgraph", "DequantizeInt4G64V1", "")]

    foreign = ir.from_proto(parser.parse_model(NESTED))
    canonicalize(foreign, lambda function: True)
    assert not foreign.functions, "trust is for the domain qgraph alone"


def test_calls_in_a_kept_function_are_inlined_with_its_attributes() -> None:
    text = f"""
    {HEAD.replace('"local": 1', '"local": 1, "qgraph": 1')}
    main (float[2, 3] x) => (float[2, 3] y) {{ y = qgraph.ours <a = 0.5> (x) }}
    <domain: "qgraph", opset_import: ["": 18, "local": 1]>
    ours <a> (x) => (out) {{ [act] out = local.inner <slope: float = @a> (x) }}
    <domain: "local", opset_import: ["": 18]>
    inner <slope> (x) => (out) {{ out = LeakyRelu <alpha: float = @slope> (x) }}
    """
    proto = parser.parse_model(text)
    model = ir.from_proto(proto)
    canonicalize(model, lambda function: True)
    verify(model)
    ((node,),) = model.functions.values()
    assert (node.op_type, node.attributes["alpha"].ref_attr_name) == ("LeakyRelu", "a")
    np.testing.assert_array_equal(run(ir.to_proto(model), x=X)[0], run(proto, x=X)[0])


def test_functions_that_call_each_other_in_a_circle() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{ y = local.f (x) }}
    <domain: "local", opset_import: ["": 18, "local": 1]>
    f (x) => (out) {{ out = local.g (x) }}
    <domain: "local", opset_import: ["": 18, "local": 1]>
    g (x) => (out) {{ out = local.f (x) }}
    """
    with pytest.raises(InputError, match="local::f calls local::g calls local::f"):
        canonicalize(ir.from_proto(parser.parse_model(text)))


def test_a_function_that_reads_what_nothing_defines() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{ y = local.f (x) }}
    <domain: "local", opset_import: ["": 18]>
    f (x) => (out) {{ out = Add (x, gone) }}
    """
    with pytest.raises(InputError, match="local::f reads a value that nothing in it defines"):
        canonicalize(ir.from_proto(parser.parse_model(text)))


@pytest.mark.parametrize("calls", ["local.f (x, x)", "local.f (x)"])
def test_calls_that_do_not_fit(calls: str) -> None:
    outputs = "y" if "x, x" in calls else "y, z"
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{ [wrong] {outputs} = {calls} }}
    <domain: "local", opset_import: ["": 18]>
    f (x) => (out) {{ out = Neg (x) }}
    """
    with pytest.raises(InputError, match=r"node 'wrong' calls local::f with"):
        canonicalize(ir.from_proto(parser.parse_model(text)))


def test_opsets_of_functions_join_the_model_where_ops_mean_the_same() -> None:
    text = f"""
    {HEAD}
    main (float[2, 3] x) => (float[2, 3] y) {{ y = local.f (x) }}
    <domain: "local", opset_import: ["": 17, "com.microsoft": 1]>
    f (x) => (out) {{ h = Neg (x) out = com.microsoft.Gelu (h) }}
    """
    model = ir.from_proto(parser.parse_model(text))
    canonicalize(model)
    verify(model)
    assert model.opset_imports == {"": 18, "local": 1, "com.microsoft": 1}

    text = text.replace("h = Neg (x)", "h = ReduceMean <axes = [1]> (x)")
    with pytest.raises(InputError, match=r"function local::f uses ReduceMean of opset 17.* 18"):
        canonicalize(ir.from_proto(parser.parse_model(text)))


def test_an_overload_is_another_function() -> None:
    body = {name: [helper.make_node(name, ["x"], ["out"])] for name in ("Neg", "Abs")}
    imports = [helper.make_opsetid("", 18)]
    proto = parser.parse_model(
        f"{HEAD} main (float[2, 3] x) => (float[2, 3] y) {{ h = local.f (x) y = local.f (h) }}"
    )
    for overload, nodes in (("", body["Neg"]), ("other", body["Abs"])):
        function = helper.make_function("local", "f", ["x"], ["out"], nodes, imports)
        function.overload = overload
        proto.functions.append(function)
    proto.graph.node[1].overload = "other"
    model = ir.from_proto(proto)
    canonicalize(model)
    assert [node.op_type for node in model.graph] == ["Neg", "Abs"]
