"""`int8-auto`: one scale where rows are alike, a scale for each row where they are not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import qgraph
from qgraph.formats.base import Array
from qgraph.passes import input_scales
from qgraph.passes.quantized_inputs import static_grid

K, N = 192, 96
FAR = 300.0
"""How many times as large as the others some rows of `h` are."""


def model(folder: Path) -> Path:
    """Linears a and c of x, whose rows are alike, and b of h = x · t, whose rows are not."""
    rng = np.random.default_rng(0)
    found = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        rows (float[B, {K}] x, float[B, 1] t) => (float[B, {N}] y, float[B, {N}] z) {{
            a = MatMul(x, u)
            c = MatMul(x, w)
            s = Add(a, c)
            y = Neg(s)
            h = Mul(x, t)
            b = MatMul(h, v)
            z = Neg(b)
        }}"""
    )
    for node in found.graph.node:
        node.name = node.output[0]
    for name in "uvw":
        array = rng.standard_normal((K, N)).astype(np.float32) / K**0.5
        found.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(found, folder / "m.onnx")
    return folder / "m.onnx"


def data(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    t = np.where(rng.random((256, 1)) < 0.02, FAR, 1).astype(np.float32)
    return {"x": rng.standard_normal((256, K)).astype(np.float32), "t": t}


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """What `optimize` makes of the model, and its ops."""
    source = model(tmp_path)

    def run(**options: Any) -> tuple[qgraph.Result, Counter[str]]:
        options = {"activations": "int8-auto", **options}
        result = qgraph.optimize(source, tmp_path / "o.onnx", force=True, **options)
        return result, Counter(n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node)

    return run


def kinds(result: qgraph.Result) -> dict[str, str | None]:
    return {item.site: item.activations for item in result.plan.decisions}


def test_rows_get_scales_where_they_differ(made: Any, tmp_path: Path) -> None:
    result, ops = made(calibrate=[data(1)])
    assert kinds(result) == {"a": "int8-static", "c": "int8-static", "b": "int8-row"}
    assert (ops["QuantizeLinear"], ops["ReduceMax"], ops["MatMulIntegerToFloat"]) == (2, 1, 3)
    details = {item.site: item.detail for item in result.plan.decisions}
    assert "a scale for each row costs 0.0" in details["a"]
    assert "at the worst row" not in details["a"]
    assert "at the worst row" in details["b"]
    feeds = data(2)
    wanted = qgraph.open(tmp_path / "m.onnx").run(feeds)
    found = qgraph.open(tmp_path / "o.onnx").run(feeds)
    for name in "yz":  # row by row: a scale for all would lose the small rows of z
        rows = np.linalg.norm(found[name] - wanted[name], axis=1)
        assert (rows / np.linalg.norm(wanted[name], axis=1)).max() < 0.06
    told = {site.name: site.detail for site in qgraph.explain(tmp_path / "o.onnx").sites}
    assert told["b"] == details["b"]


def test_the_loss_decides(made: Any) -> None:
    one, _ = made(calibrate=[data(1)], options={"lower_w8a8.loss": "0"})
    assert set(kinds(one).values()) == {"int8-row"}
    # No mean makes up for rows that are lost as a whole.
    other, _ = made(calibrate=[data(1)], options={"lower_w8a8.loss": "100"})
    assert kinds(other)["b"] == "int8-row"
    with pytest.raises(qgraph.InputError, match=r"lower_w8a8\.loss -1: wanted 0 or more"):
        made(options={"lower_w8a8.loss": "-1"})


def test_without_data_each_row_has_a_scale(made: Any) -> None:
    result, ops = made()
    assert set(kinds(result).values()) == {"int8-row"}
    assert ops["ReduceMax"] == 2
    steps = [step.detail for step in result.report.steps if step.pass_name == "lower_w8a8"]
    assert all("no calibration data saw this activation" in detail for detail in steps)


def test_a_dry_run_leaves_it_open(tmp_path: Path) -> None:
    source = model(tmp_path)
    found = qgraph.optimize(source, dry_run=True, activations="int8-auto", calibrate=[data(1)])
    assert set(kinds(found).values()) == {"int8-auto"}
    assert {i.kernel for i in found.plan.decisions} == {
        "MatMulIntegerToFloat uint8 × int8 scales=auto"
    }


def test_prompts_take_it_by_themselves(made: Any) -> None:
    result, _ = made(activations=None, purpose="prefill", calibrate=[data(1)])
    assert kinds(result) == {"a": "int8-static", "c": "int8-static", "b": "int8-row"}
    assert "for prefill: by rule" in result.plan["b"].detail


def test_a_second_weight_takes_it_too(made: Any) -> None:
    result, ops = made(activations=None, purpose="both", calibrate=[data(1)])
    assert ops["If"] >= 1
    many = {item.site: item.many for item in result.plan.decisions}
    assert many["a"].activations == "int8-static"
    assert many["b"].activations == "int8-row"
    assert many["a"].kernel == "MatMulIntegerToFloat uint8 × int8 static"
    assert f"rows {many['a'].kernel}, " in result.plan["a"].detail


def built(folder: Path, body: str, inputs: str, output: str = "y", **weights: Array) -> Path:
    found = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        rows ({inputs}) => (float[B, {N}] {output}) {{ {body} }}"""
    )
    for node in found.graph.node:
        node.name = node.output[0]
    for name, array in weights.items():
        found.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(found, folder / "b.onnx")
    return folder / "b.onnx"


@pytest.mark.parametrize(("end", "kind"), [("", "int8-row"), ("z = Neg(y)", "int8-static")])
def test_of_a_head_differences_count(tmp_path: Path, end: str, kind: str) -> None:
    """What is added to all logits alike is lost in the softmax, however large it is."""
    rng = np.random.default_rng(0)
    v = rng.standard_normal((K, N)).astype(np.float32) / K**0.5
    v[0] = 0.5
    body = f"y = MatMul(x, v) {end}"
    source = built(tmp_path, body, f"float[B, {K}] x", "z" if end else "y", v=v)
    x = rng.standard_normal((256, K)).astype(np.float32)
    x *= np.where(rng.random((256, 1)) < 0.02, 30, 1).astype(np.float32)
    x[:, 0] = 100.0
    rounding = qgraph.Override("y", activations="int8-auto")
    result = qgraph.optimize(
        source, tmp_path / "o.onnx", overrides=(rounding,), calibrate=[{"x": x}]
    )
    assert result.plan["y"].role == ("linear" if end else "head")
    assert result.plan["y"].activations == kind


@given(st.lists(st.integers(0, 700), max_size=8))
def test_samples_are_spread(cuts: list[int]) -> None:
    """However rows come: every 2ⁿ-th of them."""
    total = sum(cuts)
    rows = np.arange(2 * total, dtype=np.float32).reshape(total, 2) - 3
    blocks = np.split(rows, np.cumsum(cuts)[:-1]) if cuts else [rows]
    ends = input_scales._Ends()
    found = input_scales._sampled(map(ends.seen, blocks))
    step = 1
    while -(-total // step) > input_scales._TOKENS:
        step *= 2
    np.testing.assert_array_equal(found, rows[::step])
    assert (ends.low, ends.high) == (min(0, rows.min(initial=0)), max(0, rows.max(initial=0)))


def test_the_static_grid_is_that_of_the_operators() -> None:
    x = np.random.default_rng(4).standard_normal((9, 7)).astype(np.float32)
    step, zero = static_grid(-1.5, 2.0)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", floats, [9, 7])],
        [helper.make_tensor_value_info("y", floats, [9, 7])],
        [
            numpy_helper.from_array(np.array(step, np.float32), "s"),
            numpy_helper.from_array(np.array(zero, np.uint8), "z"),
        ],
    )  # fmt: skip
    oracle = ReferenceEvaluator(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    )
    np.testing.assert_allclose(
        input_scales.in_range(x, -1.5, 2.0), oracle.run(None, {"x": x})[0], atol=1e-6
    )
