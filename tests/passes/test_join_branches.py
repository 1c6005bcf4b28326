"""Ifs behind each other become one: the same numbers, each node once a body, what keeps two."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import qgraph
from qgraph.graph import Graph
from qgraph.passes.join_branches import JoinBranches
from qgraph.purposes import FROM_ROWS
from qgraph.row_branches import MANY, branches
from qgraph.runtimes.ort import CPU

LAST = "t = Transpose(b) u = Softmax(t) c = Transpose(u)"
"""Mixes rows, which no segment of arithmetic takes in."""
CHAIN = f"""<ir_version: 10, opset_import: ["" : 17]>
g (float[M, 64] x) => (float[M, 64] y) {{
    b = MatMul(x, w)
    {LAST}
    d = MatMul(c, v)
    e = Transpose(d) f = Softmax(e) h = Transpose(f)
    y = MatMul(h, z)
}}"""
WEIGHTS = dict.fromkeys("wvz", (64, 64))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))


def constants(rng: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {n: (rng.standard_normal(s) / 8).astype(np.float32) for n, s in shapes.items()}


def optimized(graph: Any, purpose: str = "both", **options: Any) -> Any:
    asked = {"format": "int4:group=32", "min_elements": 1, "check": False, **options}
    return qgraph.optimize(graph, None, purpose=purpose, **asked)


def joined(result: Any) -> list[str]:
    return [step.detail for step in result.report.steps if step.pass_name == "join_branches"]


def agrees(graph: Any, both: Any, x: Any) -> None:
    like = "decode" if len(x) < FROM_ROWS else "prefill"
    wanted = CPU.open(optimized(graph, like).graph.model).run({"x": x})
    found = CPU.open(both.graph.model).run({"x": x})
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("rows", [1, FROM_ROWS - 1, FROM_ROWS, 40])
def test_one_if_computes_what_several_did(bench: Any, rng: Any, rows: int) -> None:
    graph = bench.build(CHAIN, **constants(rng, WEIGHTS))
    both = optimized(graph)
    assert joined(both) == ["3 of them and 6 nodes between"]
    main = both.graph.model.graph
    assert [node.op_type for node in main] == ["Size", "Less", "If"]
    agrees(graph, both, rng.standard_normal((rows, 64)).astype(np.float32))


def test_each_body_has_every_node_once_under_a_name_of_its_own(bench: Any, rng: Any) -> None:
    model = optimized(bench.build(CHAIN, **constants(rng, WEIGHTS))).graph.model
    (branch,) = branches(model.graph)
    few, many = (branch.attributes[n].as_graph() for n in ("then_branch", "else_branch"))
    ops = Counter(node.op_type for node in few)
    assert ops == {"MatMulNBits": 3, "Transpose": 4, "Softmax": 2}
    between = Counter(node.op_type for node in many)
    assert between["Transpose"] == 4 and between["Softmax"] == 2
    assert between["MatMulIntegerToFloat"] == 3
    names = [node.name for body in (few, many) for node in body]
    assert len(set(names)) == len(names)
    kept = {node.name for node in few if node.op_type in ("Transpose", "Softmax")}
    copied = {node.name for node in many if node.op_type in ("Transpose", "Softmax")}
    assert copied == {name + MANY for name in kept}


def test_what_depends_on_none_and_what_leads_to_none_stay_outside(bench: Any, rng: Any) -> None:
    """`s` is read between, `r` reads what is between, `a` is an output; none is copied."""
    text = f"""<ir_version: 10, opset_import: ["" : 17]>
    g (float[M, 64] x) => (float[M, 64] b, float[M, 64] r, float[M, 64] y) {{
        b = MatMul(x, w)
        {LAST}
        s = Softmax(x)
        a = Mul(c, s)
        r = Neg(c)
        y = MatMul(a, v)
    }}"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64), "v": (64, 64)}))
    both = optimized(graph)
    assert joined(both) == ["2 of them and 4 nodes between"]
    main = both.graph.model.graph
    assert [node.op_type for node in main] == ["Size", "Less", "Softmax", "If", "Neg"]
    assert [value.name for value in main.outputs] == ["b", "r", "y"]
    for rows in (2, 20):
        agrees(graph, both, rng.standard_normal((rows, 64)).astype(np.float32))


BETWEEN = {
    "a linear of one weight": ("l = MatMul(c, one)", 2),
    "a float linear": ("l = MatMul(c, kept)", 2),
    "an If of another condition": (
        "l = If (flag) <then_branch = t1 () => (float[M, 64] p) { p = Neg(c) }, "
        "else_branch = e1 () => (float[M, 64] q) { q = Exp(c) }>",
        2,
    ),
    "arithmetic": ("l = Neg(c)", 1),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_what_keeps_two_of_them_apart(bench: Any, rng: Any, case: str) -> None:
    """Both bodies would have a packed copy of a weight that stands between."""
    between, wanted = BETWEEN[case]
    text = f"""<ir_version: 10, opset_import: ["" : 17]>
    g (bool flag, float[M, 64] x) => (float[M, 64] y) {{
        b = MatMul(x, w)
        {LAST}
        {between}
        y = MatMul(l, v)
    }}"""
    shapes = {name: (64, 64) for name in ("w", "v", "one", "kept") if name in text}
    graph = bench.build(text, **constants(rng, shapes))
    chosen: dict[str, Any] = {}
    if "one" in shapes:
        chosen = {"overrides": ["one=int8:group=32"]}
    elif "kept" in shapes:
        chosen = {"exclude": ["kept"]}
    both = optimized(graph, **chosen)
    assert len(branches(both.graph.model.graph)) == wanted
    for rows in (2, 20):
        x = rng.standard_normal((rows, 64)).astype(np.float32)
        feeds = {"x": x, "flag": np.array(rows == 2)}
        like = optimized(graph, "decode" if rows == 2 else "prefill", **chosen)
        wanted_value = CPU.open(like.graph.model).run(feeds)["y"]
        np.testing.assert_array_equal(CPU.open(both.graph.model).run(feeds)["y"], wanted_value)


KINDS = ("linear", "mix", "add", "output", "if", "unread if")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=2, max_size=12))
def test_any_order_of_nodes(steps: list[tuple[str, int]]) -> None:
    """Graphs at random: linears, nodes that mix rows, sums of any two values, outputs anywhere."""
    names, lines, outputs, weights = ["x"], [], [], {}
    rng = np.random.default_rng(len(steps))
    for at, (kind, which) in enumerate(steps):
        source, made = names[which % len(names)], f"v{at}"
        if kind == "linear":
            weights[f"w{at}"] = (rng.standard_normal((32, 32)) / 6).astype(np.float32)
            lines.append(f"{made} = MatMul({source}, w{at})")
        elif kind == "mix":
            lines.append(f"t{at} = Transpose({source}) u{at} = Softmax(t{at})")
            lines.append(f"{made} = Transpose(u{at})")
        elif kind == "add":
            lines.append(f"{made} = Add({source}, {names[-1]})")
        elif kind.endswith("if"):
            read = made if kind == "if" else f"unread{at}"
            lines.append(
                f"{read} = If (flag) <then_branch = t{at} () => (float[M, 32] p{at}) "
                f"{{ p{at} = Neg({source}) }}, else_branch = e{at} () => (float[M, 32] q{at}) "
                f"{{ q{at} = Exp({source}) }}>"
            )
            lines += [] if kind == "if" else [f"{made} = Relu({source})"]
        else:
            lines.append(f"{made} = Identity({source})")
            outputs.append(made)
        names.append(made)
    outputs.append(names[-1]) if names[-1] not in outputs else None
    given_outputs = ", ".join(f"float[M, 32] {name}" for name in outputs)
    text = (
        '<ir_version: 10, opset_import: ["" : 17]> g (bool flag, float[M, 32] x) => '
        f"({given_outputs}) {{ {' '.join(lines)} }}"
    )
    assume(weights)
    proto = onnx.parser.parse_model(text)
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph = qgraph.capture(ir.serde.deserialize_model(proto))
    model = optimized(graph).graph.model
    again = JoinBranches()
    assert again.run(Graph(model), None) == []  # type: ignore[arg-type]  # it asks for nothing
    for rows in (3, 20):
        x = rng.standard_normal((rows, 32)).astype(np.float32)
        like = optimized(graph, "decode" if rows == 3 else "prefill").graph.model
        feeds = {"x": x, "flag": np.array(rows == 3)}
        wanted, found = (CPU.open(each).run(feeds) for each in (like, model))
        assert list(found) == outputs
        for name in outputs:
            np.testing.assert_array_equal(found[name], wanted[name])


def test_a_name_that_a_copy_would_have_is_refused_before_any_work(bench: Any, rng: Any) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    g (float[M, 64] x) => (float[M, 64] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64), "v": (64, 64)}))
    first, last = (node for node in graph.model.graph if node.op_type == "MatMul")
    first.name, last.name = "fc", f"fc{MANY}"
    with pytest.raises(qgraph.InputError, match="node fc/many has the name that the copy of fc"):
        optimized(graph)
    assert optimized(graph, "decode").plan.decisions


def test_nodes_called_as_what_they_give_keep_one_name_in_the_copy(bench: Any, rng: Any) -> None:
    graph = bench.build(CHAIN, **constants(rng, WEIGHTS))
    for node in graph.model.graph:
        node.name = node.outputs[0].name
    model = optimized(graph).graph.model
    many = branches(model.graph)[0].attributes["else_branch"].as_graph()
    copied = [node for node in many if node.op_type in ("Transpose", "Softmax")]
    assert all(node.name == node.outputs[0].name for node in copied)
    assert all(str(node.name).endswith(MANY) for node in copied)


def test_a_node_called_as_a_value_in_front_keeps_its_copy(bench: Any, rng: Any) -> None:
    """The name that its copy is found by is taken, by a value of another copy."""
    graph = bench.build(CHAIN, **constants(rng, WEIGHTS))
    products = [node for node in graph.model.graph if node.op_type == "MatMul"]
    products[1].name = products[0].outputs[0].name
    both = optimized(graph)
    assert len(both.graph.sites()) == 3
    assert all(site.many is not None for site in both.graph.sites())
    agrees(graph, both, rng.standard_normal((40, 64)).astype(np.float32))
