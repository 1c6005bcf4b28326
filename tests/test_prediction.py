"""What a calibrated run will take: flops and bytes counted by hand on a model of two linears."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qgraph
from qgraph import pipeline, prediction
from qgraph.activations import LIMIT
from qgraph.graph import Graph
from qgraph.prediction import (
    BASE_BYTES,
    EFFICIENCY,
    Prediction,
    is_calibrated,
    matmul_rate,
    predict,
    spell_size,
    spell_time,
)

TEXT = """<ir_version: 9, opset_import: ["" : 17]>
g (float[B, S, 64] x) => (float[B, S, 64] y) {
    a = MatMul(x, up)
    r = Relu(a)
    s = MatMul(r, down)
    y = Add(s, x)
}"""
K, WIDE = 64, 128
PACKED = 2 * K * WIDE // 2 + 2 * (K * WIDE // 32) * 4 + 2 * (K * WIDE // 32) // 2
"""4 bits a weight; per group of 32 a float32 scale and a zero point of 4 bits."""


def proto() -> onnx.ModelProto:
    """x → up → Relu → down → + x."""
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for name, shape in (("up", (K, WIDE)), ("down", (WIDE, K))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@functools.cache
def graph() -> Graph:
    return pipeline.capture(ir.serde.deserialize_model(proto()))


@functools.cache
def plan(solver: str = "gptq", calibration: str = "sequential") -> qgraph.QuantPlan:
    return qgraph.optimize(
        graph(), dry_run=True, format="uint4:group=32", solver=solver, calibration=calibration
    ).plan


def predicted(
    samples: int = 5, sequence: int = 2, solver: str = "gptq", calibration: str = "sequential"
) -> Prediction:
    """At one flop per second, so that seconds times the efficiency are flops."""
    return predict(
        graph(), graph().sites(), plan(solver, calibration),
        samples=samples, sequence=sequence, rate=1.0,
    )  # fmt: skip


def test_flops_are_those_counted_by_hand() -> None:
    tokens = 10
    forward = 2 * tokens * K * WIDE  # the last linear feeds no stage
    factors = 8 * (K**3 + WIDE**3)
    per_weight = WIDE * K**2 + K * WIDE**2
    sums = 2 * tokens * (K**2 + WIDE**2)
    residual = 2 * tokens * K * WIDE  # down is added to x
    found = predicted(calibration="parallel").seconds * EFFICIENCY
    assert found == pytest.approx(forward + sums + factors + 5 * per_weight)
    found = predicted().seconds * EFFICIENCY
    both = 2 * forward + 2 * sums + residual + factors + 11 * per_weight
    assert found == pytest.approx(both)


def test_bytes_are_those_counted_by_hand() -> None:
    live = 4 * (K + WIDE)  # x, and the Relu's output
    inside = 4 * 2 * WIDE  # what up and the Relu make, for a batch of four samples
    fixed = BASE_BYTES + 6 * 4 * K * WIDE + 5 * 8 * WIDE**2 + PACKED
    assert predicted(calibration="parallel").bytes == fixed + 5 * 2 * live + 4 * 2 * inside
    assert predicted().bytes == fixed + 2 * (5 * 2 * live + 4 * 2 * inside)
    assert predicted(samples=3).bytes == fixed + 2 * 3 * 2 * (live + inside)
    assert predicted(samples=10_000_000).bytes == fixed + 2 * (LIMIT + 4 * 2 * inside)


def test_what_tries_two_solvers_takes_longer() -> None:
    more = predicted(solver="auto").seconds - predicted().seconds
    searched = 200 * 17 * 3 * 2 * K * WIDE  # 17 widths, 3 zero points for each
    assert more * EFFICIENCY == pytest.approx(11 * (WIDE * K**2 + K * WIDE**2) + searched)


def test_what_composes_takes_longer_than_each_of_its_parts() -> None:
    def flops(solver: str) -> float:
        return predicted(solver=solver).seconds * EFFICIENCY

    per_weight = WIDE * K**2 + K * WIDE**2
    searched = 200 * 21 * 3
    assert flops("clip") - flops("gptq") == pytest.approx(2 * K * WIDE * searched - per_weight)
    assert flops("clip+gptq") - flops("gptq") == pytest.approx(2 * K * WIDE * searched)
    # 20 evaluations of all rows of each weight, which are fewer than AWQ's sample
    rounds = sum(20 * n * k * (2 * k + searched) for n, k in ((WIDE, K), (K, WIDE)))
    assert flops("awq+clip+gptq") - flops("clip+gptq") == pytest.approx(rounds)


@given(st.integers(1, 1000), st.integers(2, 4096), st.integers(1, 1000))
def test_more_tokens_never_take_less(samples: int, sequence: int, more: int) -> None:
    one, other = predicted(samples, sequence), predicted(samples + more, sequence)
    assert (one.tokens, other.tokens) == (samples * sequence, (samples + more) * sequence)
    assert one.seconds < other.seconds
    assert one.bytes <= other.bytes


def test_a_mask_has_the_sequence_in_each_token() -> None:
    text = TEXT.replace("x) =>", "x, float[B, S, S] m) =>")
    text = text.replace("r = Relu(a)", "l = ReduceMax<axes=[-1]>(m)\n    r = Add(a, l)")
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(proto().graph.initializer)
    captured = pipeline.capture(ir.serde.deserialize_model(model))
    made = qgraph.optimize(captured, dry_run=True, format="uint4:group=32", solver="gptq").plan

    def added(sequence: int) -> int:
        found = predict(captured, captured.sites(), made, samples=1, sequence=sequence, rate=1.0)
        return found.bytes - predicted(1, sequence).bytes

    # the mask; its largest elements `[B, S, 1]`
    assert added(100) == 2 * 100 * 4 * (100 + 1)
    assert added(200) == 2 * 200 * 4 * (200 + 1)


def test_attention_is_the_largest_part_of_a_stage() -> None:
    text = TEXT.replace("x) =>", "x, float[B, 4, S, 16] q) =>").replace(
        "r = Relu(a)",
        "t = Transpose<perm=[0, 1, 3, 2]>(q)\n    p = MatMul(q, t)\n"
        "    l = ReduceMax<axes=[1, 3]>(p)\n    m = Squeeze(l, axis)\n    r = Add(a, m)",
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(proto().graph.initializer)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    captured = pipeline.capture(ir.serde.deserialize_model(model))
    made = qgraph.optimize(captured, dry_run=True, format="uint4:group=32", solver="gptq").plan
    found = predict(captured, captured.sites(), made, samples=1, sequence=100, rate=1.0)
    more = found.bytes - predicted(1, 100).bytes
    # kept: q; inside: its transpose, `[B, 4, S, S]`, and two values of one number a token
    assert more == 2 * 100 * 4 * (64 + 64 + 4 * 100 + 2)


@pytest.mark.parametrize(
    "solver,with_data,expected",
    [("rtn", True, False), ("gptq", False, True), ("auto", False, False), ("auto", True, True)],
)
def test_which_plans_are_calibrated(solver: str, with_data: bool, expected: bool) -> None:
    assert is_calibrated(plan(solver), with_data) is expected


@pytest.mark.parametrize(
    "seconds,words",
    [(0.01, "1 s"), (89, "89 s"), (91, "2 min"), (300, "5 min"), (5390, "90 min"), (9000, "2.5 h")],
)
def test_times_are_short(seconds: float, words: str) -> None:
    assert spell_time(seconds) == words


@pytest.mark.parametrize(
    "count,words", [(334_400_000, "334 MB"), (999_499_999, "999 MB"), (2_147_000_000, "2.1 GB")]
)
def test_sizes_are_short(count: int, words: str) -> None:
    assert spell_size(count) == words


def test_the_rate_is_that_of_this_machine() -> None:
    assert 1e7 < matmul_rate() < 1e16


def test_a_dry_run_reports_it_and_rounding_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "matmul_rate", lambda: 1e9)
    path = tmp_path / "plan.json"
    model = ir.serde.deserialize_model(proto())
    options: dict[str, Any] = {"dry_run": True, "report": path, "format": "uint4:group=32"}
    result = qgraph.optimize(model, solver="gptq", samples=3, sequence=7, **options)
    assert result.prediction is not None
    assert result.prediction.tokens == 21
    assert json.loads(path.read_text())["predicted"] == result.prediction.to_json()
    assert set(result.prediction.to_json()) == {"seconds", "bytes", "tokens"}
    assert qgraph.optimize(model, **options).prediction is None
    assert json.loads(path.read_text())["predicted"] is None


def test_rows_count_as_they_are_whatever_the_length_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "matmul_rate", lambda: 1e9)
    x = np.zeros((1, 9, K), np.float32)
    result = qgraph.optimize(
        ir.serde.deserialize_model(proto()), dry_run=True, format="uint4:group=32",
        solver="gptq", calibrate=[{"x": x}], samples=3, sequence=7,
    )  # fmt: skip
    assert result.prediction is not None
    assert result.prediction.tokens == 27


def test_a_real_run_says_it_once_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(prediction, "matmul_rate", lambda: 1e9)
    said: list[str] = []

    class Heard:
        def stage(self, title: str, total: int = 0) -> None:
            said.append(title)

        def advance(self, done: int) -> None:
            pass

        def finish(self, summary: str = "") -> None:
            said.append(summary)

    x = np.random.default_rng(1).standard_normal((1, 8, K)).astype(np.float32)
    result = qgraph.optimize(
        ir.serde.deserialize_model(proto()), tmp_path / "o.onnx", format="uint4:group=32",
        solver="gptq", calibrate=[{"x": x}], progress=Heard(),
    )  # fmt: skip
    assert result.prediction is not None
    assert said.count(result.prediction.line) == 1
    assert said.index(result.prediction.line) < said.index("calibration data")
    assert result.report.totals["predicted"] == result.prediction.to_json()
