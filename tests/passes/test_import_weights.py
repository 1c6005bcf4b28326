"""Sites that read a checkpoint's integers: act order, and what stays in float."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed import (
    K,
    OneOff,
    checkpoint,
    entry,
    floats,
    imported,
    ops,
    save,
)

import qgraph
from qgraph.checkpoints.base import Checkpoint
from qgraph.errors import NumericError
from qgraph.formats.base import Array

pytest.importorskip("onnxruntime")

RNG = np.random.default_rng(0)


def test_act_order_becomes_one_gather_for_all_readers(tmp_path: Path, out: Path) -> None:
    text = f"""(float[M, {K}] x) => (float[M, 48] p, float[M, 32] q) {{
        [one] p = Gemm <transB = 1> (x, one__weight)
        [two] q = Gemm <transB = 1> (x, two__weight)
    }}"""
    weights = floats(one__weight=(48, K), two__weight=(32, K))
    order = np.random.default_rng(3).permutation(K)
    given = checkpoint(*(entry(name, w, order=order) for name, w in weights.items()))
    model = save(tmp_path, text, weights)
    imported(given, model, out)
    assert ops(out) == {"Gather": 1, "MatMulNBits": 2}
    x = RNG.standard_normal((3, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})
    for output, name in (("p", "one.weight"), ("q", "two.weight")):
        each = given.entries[name]
        np.testing.assert_allclose(
            found[output], x @ each.dequantized(0, each.n).T, atol=1e-5, rtol=1e-5
        )


GATED = f"""(float[M, {K}] x) => (float[M, {K}] y) {{
    [gate] g = MatMul (x, l__gate__weight)
    [up] u0 = MatMul (x, l__up__weight)
    u = Add (u0, l__up__bias)
    s = Sigmoid (g)
    a = Mul (g, s)
    h = Mul (a, u)
    [down] y = Gemm <transB = 1> (h, l__down__weight)
}}"""


def gated(orders: Mapping[str, Array], **more: Any) -> tuple[dict[str, Array], Checkpoint]:
    weights = floats(
        l__gate__weight=(K, 96), l__up__weight=(K, 96), l__up__bias=(96,), l__down__weight=(K, 96)
    )
    rows = {"gate": weights["l.gate.weight"].T, "up": weights["l.up.weight"].T}
    rows["down"] = weights["l.down.weight"]
    entries = [
        entry(f"l.{name}.weight", np.ascontiguousarray(w), order=orders.get(name), **more)
        for name, w in rows.items()
    ]
    return weights, checkpoint(*entries, floats={"l.up.bias": weights["l.up.bias"]})


def gated_result(given: Checkpoint, x: Array) -> Array:
    gate, up, down = (e.dequantized(0, e.n) for e in given.entries.values())
    g = x @ gate.T
    h = g / (1 + np.exp(-g)) * (x @ up.T + given.floats["l.up.bias"].rows(0, 96))
    found: Array = h @ down.T
    return found


def test_act_order_is_folded_into_the_rows_in_front(tmp_path: Path, out: Path) -> None:
    """The gated unit gives its channels in the order that `down` wants; its own input is gathered.

    All ops between treat channel by channel, the bias among them is put in order too.
    """
    rng = np.random.default_rng(8)
    into, between = rng.permutation(K), rng.permutation(96)
    weights, given = gated({"gate": into, "up": into, "down": between})
    result = imported(given, save(tmp_path, GATED, weights), out)
    assert ops(out) == {"Gather": 1, "MatMulNBits": 3, "QuickGelu": 1, "Mul": 1}
    x = RNG.standard_normal((4, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})["y"]
    np.testing.assert_allclose(found, gated_result(given, x), atol=1e-5, rtol=1e-5)
    steps = {s.site: s.detail for s in result.report.steps if s.rule == "act order"}
    assert steps["down"] == "rows of gate, up lie in this order" or (
        steps["down"] == "rows of up, gate lie in this order"
    )
    assert steps["gate"].startswith("the activation's channels are gathered: x is not made")
    compared = qgraph.compare(tmp_path / "m.onnx", out, data=[{"x": x}])
    assert [row.name for row in compared.sites] == ["down"]
    assert any("2 sites give their channels in the act order" in note for note in compared.notes)


def test_rows_in_another_order_are_checked_all_the_same(tmp_path: Path, out: Path) -> None:
    weights, given = gated({"down": np.random.default_rng(8).permutation(96)})
    gate, *others = given.entries.values()
    wrong = OneOff(**{f.name: getattr(gate, f.name) for f in dataclasses.fields(gate)})
    bad = dataclasses.replace(given, entries={e.name: e for e in (wrong, *others)})
    with pytest.raises(NumericError, match="gate: BYTES"):
        imported(bad, save(tmp_path, GATED, weights), out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(
    "change,why",
    [
        (("(float[M, 64] y)", "(float[M, 64] y, float[M, 96] s)"), "is an output of the graph"),
        (("h = Mul (a, u)", "h0 = Mul (a, u)\n h = Softmax (h0)"), "Softmax .* mixes channels"),
        (("[down]", "z = Relu (u)\n [down]"), "Relu .* reads u too"),
    ],
)
def test_act_order_stays_a_gather_where_channels_cannot_move(
    tmp_path: Path, out: Path, change: tuple[str, str], why: str
) -> None:
    weights, given = gated({"down": np.random.default_rng(8).permutation(96)})
    model = save(tmp_path, GATED.replace(*change), weights)
    result = imported(given, model, out)
    assert ops(out)["Gather"] == 1
    (detail,) = (s.detail for s in result.report.steps if s.rule == "act order")
    assert re.search(why, detail)
    if "Softmax" not in change[1]:
        x = RNG.standard_normal((4, K)).astype(np.float32)
        found = qgraph.open(out).run({"x": x})["y"]
        np.testing.assert_allclose(found, gated_result(given, x), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_packed_stays_float_with_the_checkpoint_s_numbers(
    tmp_path: Path, out: Path
) -> None:
    """The weight is an output of the graph, whose own floats are other ones."""
    text = f"""(float[M, {K}] x) => (float[M, 32] y, float[{K}, 32] w, float[M, 32] z) {{
        [one] y = MatMul (x, w)
        [two] z = Gemm <transB = 1> (x, v)
    }}"""
    weights = floats(w=(K, 32), v=(32, K))
    packed = entry("w", np.ascontiguousarray(weights["w"].T), order=RNG.permutation(K))
    given = checkpoint(packed, entry("v", weights["v"]))
    other = {"w": np.zeros_like(weights["w"]), "v": weights["v"]}
    result = imported(given, save(tmp_path, text, other), out)
    assert result.plan["one"].reason == "GRAPH_OUTPUT"
    assert result.plan["two"].quantized
    x = RNG.standard_normal((3, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})
    want = packed.dequantized(0, 32)
    np.testing.assert_array_equal(found["w"], want.T)
    np.testing.assert_allclose(found["y"], x @ want.T, atol=1e-5, rtol=1e-5)
    steps = [s.detail for s in result.report.steps if s.rule == "dequantize"]
    assert steps == ["the checkpoint's numbers as floats: w is an output of the graph"]


def test_another_reader_of_a_packed_weight_gets_the_checkpoint_s_floats(
    tmp_path: Path, out: Path
) -> None:
    text = f"""(float[M, {K}] x) => (float[M, 32] y, float[32] z) {{
        [one] y = MatMul (x, w)
        z = ReduceSum <keepdims = 0> (w, axis)
    }}"""
    weights = {**floats(w=(K, 32)), "axis": np.array([0])}
    packed = entry("w", np.ascontiguousarray(weights["w"].T))
    model = save(tmp_path, text, {**weights, "w": np.zeros((K, 32), np.float32)})
    result = imported(checkpoint(packed), model, out)
    assert result.plan["one"].reason == "HALF_CONVERTED"
    found = qgraph.open(out).run({"x": np.ones((1, K), np.float32)})
    want = packed.dequantized(0, 32).sum(axis=1)
    np.testing.assert_allclose(found["z"], want, atol=1e-5)
    np.testing.assert_allclose(found["y"][0], want, atol=1e-5)
