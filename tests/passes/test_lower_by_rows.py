"""Two weights behind If: numbers on both sides, which nodes share an If, and one site each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import qgraph
from qgraph.passes.lower_by_rows import TransformedWeight
from qgraph.passes.row_segments import segments
from qgraph.passes.solved import Transform
from qgraph.purposes import FROM_ROWS
from qgraph.row_branches import MANY
from qgraph.runtimes.ort import CPU
from qgraph.site import Weight

W8A8 = {"MatMulIntegerToFloat"}
BLOCK = """g (float[M, 64] x) => (float[M, 96] y) {
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    s = Mul(q, k)
    r = Relu(s)
    h = Gemm<transB = 1>(r, wh, bias)
    d = Sub(h, x)
    y = MatMul(d, wy)
}"""
SHAPES = {"wq": (64, 80), "wk": (64, 80), "wh": (64, 80), "bias": (64,), "wy": (64, 96)}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))


def constants(rng: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {n: (rng.standard_normal(s) / 8).astype(np.float32) for n, s in shapes.items()}


def optimized(graph: Any, purpose: str, **options: Any) -> Any:
    asked = {"format": "int4:group=32", "min_elements": 1, "check": False, **options}
    return qgraph.optimize(graph, None, purpose=purpose, **asked)


def outputs(result: Any, rows: int, width: int = 64) -> Any:
    x = np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)
    return CPU.open(result.graph.model).run({"x": x})


def counted(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph))


def test_few_rows_run_one_weight_and_many_the_other(bench: Any, rng: Any) -> None:
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    both, few, many = (optimized(graph, each) for each in ("both", "decode", "prefill"))
    for rows in (1, FROM_ROWS - 1, FROM_ROWS, 40):
        like, unlike = (few, many) if rows < FROM_ROWS else (many, few)
        found = outputs(both, rows)["y"]
        np.testing.assert_array_equal(found, outputs(like, rows)["y"])
        assert not np.array_equal(found, outputs(unlike, rows)["y"])


def test_linears_share_an_if_and_the_quantized_activation(bench: Any, rng: Any) -> None:
    model = optimized(bench.build(BLOCK, **constants(rng, SHAPES)), "both").graph.model
    ops = counted(model)
    assert (ops["If"], ops["Size"], ops["Less"]) == (1, 1, 1)
    assert (ops["MatMulNBits"], ops["MatMulIntegerToFloat"]) == (4, 4)
    assert ops["QuantizeLinear"] == 3  # q and k read one activation
    assert ops["Relu"] == 2
    assert ops["MatMul"] == ops["Gemm"] == 0


def test_a_file_has_one_site_for_each_linear(bench: Any, rng: Any, out: Path) -> None:
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    options = {"format": "int4:group=32", "min_elements": 1}
    made = qgraph.optimize(graph, out, purpose="both", **options)
    names = [site.name for site in graph.sites()]
    read = qgraph.capture(out).sites()
    assert [site.name for site in read] == names
    assert [site.op for site in read] == ["MatMulNBits"] * 4
    assert {site.many.op for site in read if site.many} == W8A8
    assert {site.from_rows for site in read} == {FROM_ROWS}
    assert [site.many.name for site in read if site.many] == [name + MANY for name in names]
    assert read[-1].role == "head"
    explanation = qgraph.explain(out)
    assert explanation.totals["linears"] == explanation.totals["linears_quantized"] == 4
    for row, decision in zip(explanation.sites, made.plan.decisions, strict=True):
        assert row.by_rows == f"from {FROM_ROWS} rows {decision.many.kernel}"
        more = row.packed_bytes - decision.packed_bytes
        assert 0 <= more < 16 + 256  # what scales the activation, and Gemm's bias
        assert f"from {FROM_ROWS} rows" in row.detail
    again = qgraph.optimize(out, None, min_elements=1, check=False)
    assert {item.solver for item in again.plan.decisions} == {"kept"}


def test_every_kernel_of_both_bodies_is_checked(
    bench: Any, rng: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the integer kernel is found wrong, the site keeps one weight and says why."""
    from qgraph import check

    real, seen = check.check_kernel, []

    def wrong(probe: Any, *rest: Any) -> Any:
        seen.append(probe.key.op)
        verdict = real(probe, *rest)
        if probe.key.op.endswith("MatMulIntegerToFloat"):
            return type(verdict)(9.0, "made wrong")
        return verdict

    monkeypatch.setattr(check, "check_kernel", wrong)
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    made = qgraph.optimize(graph, out, purpose="both", format="int4:group=32", min_elements=1)
    assert any(op.endswith("MatMulNBits") for op in seen)
    assert any(op.endswith("MatMulIntegerToFloat") for op in seen)
    assert all(item.many is None and item.quantized for item in made.plan.decisions)
    assert counted(made.graph.model)["If"] == 0
    assert {item.reason for item in made.plan.decisions} == {"KERNEL_FAILED_CHECK"}


BETWEEN: dict[str, tuple[str, int]] = {
    "arithmetic": ("m = Sigmoid(a)", 1),
    "a norm": ("p = Pow(a, two) e = ReduceMean<axes = [-1]>(p) r = Sqrt(e) m = Div(a, r)", 1),
    "a reshape of the activation": ("m = Reshape(a, shape)", 2),
    "a reshape of constants": ("t = Reshape(two, one) m = Pow(a, t)", 1),
    "a softmax over rows and a transpose": ("t = Transpose(a) u = Softmax(t) m = Transpose(u)", 2),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_what_may_stand_between_two_linears_of_one_segment(bench: Any, rng: Any, case: str) -> None:
    between, wanted = BETWEEN[case]
    text = f"""<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[M, 64] x) => (float[M, 64] y) {{
        a = MatMul(x, w)
        {between}
        y = MatMul(m, v)
    }}"""
    given = constants(rng, {"w": (64, 64), "v": (64, 64)})
    graph = bench.build(
        text, **given, two=np.float32(2), one=np.array([1]), shape=np.array([-1, 64])
    )
    assert len(segments(graph.model.graph, graph.sites())) == wanted
    both = optimized(graph, "both")
    assert counted(both.graph.model)["If"] == 1  # they are joined in the end
    for rows, like in ((2, "decode"), (20, "prefill")):
        found, expected = outputs(both, rows)["y"], outputs(optimized(graph, like), rows)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_segments_hold_every_linear_once_in_order(bench: Any, rng: Any) -> None:
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    sites = graph.sites()
    (segment,) = segments(graph.model.graph, sites)
    order = list(graph.model.graph)
    assert [order.index(node) for node in segment.nodes] == sorted(map(order.index, segment.nodes))
    assert {site.node for site in sites} <= set(segment.nodes)
    assert segment.early == []


def test_a_bias_goes_into_the_bodies_with_its_linear(bench: Any, rng: Any) -> None:
    """Each kernel adds it itself, where it can."""
    text = """g (float[M, 64] x) => (float[M, 96] y) { a = MatMul(x, w) y = Add(b, a) }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 96), "b": (96,)}))
    both = optimized(graph, "both")
    (branch,) = [node for node in both.graph.model.graph if node.op_type == "If"]
    assert branch.outputs[0] is both.graph.model.graph.outputs[0]
    assert len(list(branch.attributes["then_branch"].as_graph())) == 1
    for rows, like in ((2, "decode"), (20, "prefill")):
        found, wanted = outputs(both, rows)["y"], outputs(optimized(graph, like), rows)["y"]
        np.testing.assert_array_equal(found, wanted)


def test_values_that_others_read_leave_the_bodies(bench: Any, rng: Any) -> None:
    """`a` is an output of the graph and read by a body elsewhere; names and types stay."""
    text = """g (bool c, float[M, 64] x) => (float[M, 64] a, float[M, 64] y, float[M, 64] z) {
        a = MatMul(x, w)
        m = Relu(a)
        y = MatMul(m, v)
        z = If (c) <then_branch = t () => (float[M, 64] p) { p = Neg(a) },
                    else_branch = e () => (float[M, 64] q) { q = Exp(m) }>
    }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64), "v": (64, 64)}))
    both = optimized(graph, "both")
    assert [value.name for value in both.graph.model.graph.outputs] == ["a", "y", "z"]
    assert counted(both.graph.model)["If"] == 2
    x = rng.standard_normal((3, 64)).astype(np.float32)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        found = CPU.open(both.graph.model).run(feeds)
        wanted = CPU.open(optimized(graph, "decode").graph.model).run(feeds)
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_linears_in_bodies_keep_one_weight(bench: Any, rng: Any) -> None:
    text = """g (bool c, float[M, 64] x) => (float[M, 64] y) {
        a = MatMul(x, w)
        y = If (c) <then_branch = t () => (float[M, 64] p) { p = MatMul(a, v) },
                    else_branch = e () => (float[M, 64] q) { q = Exp(a) }>
    }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64), "v": (64, 64)}))
    outer, inner = optimized(graph, "both").plan.decisions
    assert outer.many is not None
    assert inner.many is None
    assert inner.quantized


def test_sites_of_one_weight_share_both_of_its_copies(bench: Any, rng: Any) -> None:
    text = """g (float[M, 64] x) => (float[M, 64] y) { a = MatMul(x, w) y = MatMul(a, w) }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64)}))
    model = optimized(graph, "both").graph.model
    codes = [name for name in model.graph.initializers if name.startswith("w.codes")]
    assert len(codes) == 2
    assert counted(model)["MatMulIntegerToFloat"] == 2


def test_an_old_opset_keeps_one_weight_and_says_so(bench: Any, rng: Any) -> None:
    text = """<ir_version: 4, opset_import: ["" : 8]>
    g (float[M, 64] x) => (float[M, 64] y) { y = MatMul(x, w) }"""
    graph = bench.build(text, **constants(rng, {"w": (64, 64)}))
    (decision,) = optimized(graph, "both").plan.decisions
    assert decision.quantized
    assert decision.many is None
    assert decision.reason == "OPSET_TOO_OLD"


def test_the_second_weight_is_made_of_what_the_solver_scaled(rng: Any) -> None:
    array = rng.standard_normal((6, 8)).astype(np.float32)
    value = ir.Value(name="w", const_value=ir.tensor(array))
    columns, order = rng.uniform(1, 2, 8).astype(np.float32), rng.permutation(8)
    from qgraph.view import View

    fields = (value, View(), 6, 8, ir.DataType.FLOAT, "w", (6, 8))
    assert np.array_equal(Weight(*fields).rows(2, 5), array[2:5])
    found = TransformedWeight(*fields, Transform(columns, order))
    wanted = (array * columns)[:, order]
    np.testing.assert_array_equal(found.rows(2, 5), wanted[2:5])
    np.testing.assert_array_equal(found.as_stored(0, 6), wanted)


def test_a_solved_model_has_its_second_weights_too(bench: Any, rng: Any, tmp_path: Path) -> None:
    """awq scales channels: the products with both weights stand for the same function."""
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    data = [{"x": rng.standard_normal((32, 64)).astype(np.float32)} for _ in range(4)]
    options: dict[str, Any] = {"solver": "awq+rtn", "calibrate": data}
    both = optimized(graph, "both", **options)
    x = data[0]["x"]
    found = CPU.open(both.graph.model).run({"x": x})["y"]
    wanted = CPU.open(graph.model).run({"x": x})["y"]
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.03
    few = CPU.open(both.graph.model).run({"x": x[:2]})["y"]
    assert np.linalg.norm(few - wanted[:2]) / np.linalg.norm(wanted[:2]) > 0.03


def test_calibration_serves_the_second_weights(bench: Any, rng: Any) -> None:
    """Outlier columns and static ranges are found for what many rows run through."""
    graph = bench.build(BLOCK, **constants(rng, SHAPES))
    x = rng.standard_normal((64, 64)).astype(np.float32)
    x[:, 7] *= 50
    wanted = CPU.open(graph.model).run({"x": x})["y"]

    def error(**options: Any) -> float:
        made = optimized(graph, "both", calibrate=[{"x": x}], **options)
        assert counted(made.graph.model)["If"] == 1
        found = CPU.open(made.graph.model).run({"x": x})["y"]
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    plain, columns = error(), error(outliers=2)
    assert columns < plain / 2
    assert error(solver="smoothquant") < plain / 2
    static = optimized(graph, "both", calibrate=[{"x": x}], activations="int8-static")
    assert {item.many.activations for item in static.plan.decisions} == {"int8-static"}
    with pytest.raises(qgraph.InputError, match="give --calibrate FILE"):
        optimized(graph, "both", outliers=2)
