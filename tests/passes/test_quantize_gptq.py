"""The GPTQ pass on whole models: the tiny language model, bodies, padding, bad data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph.calibration import joined, rows_of
from qgraph.models import tiny

FLOAT_HEAD: dict[str, Any] = {"embedding": "float", "exclude": ["role:head"]}
PLAIN = {"solve.correct": "false"}
REFINED = {"quantize_gptq.sweeps": "2", "quantize_gptq.refit": "true"}
PAPER = {**PLAIN, "quantize_gptq.act_order": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny"))


def kl(model: Path, folder: Path, **options: Any) -> tuple[float, qgraph.Result]:
    """KL on held-out text, weights alone (accuracy level 0)."""
    output = folder / "o.onnx"
    result = qgraph.optimize(
        model, output, format="uint4:group=64", accuracy_level="0", force=True, check=False,
        **FLOAT_HEAD, **options,
    )  # fmt: skip
    held_out = tiny.batches("eval", 256, 16)
    found = qgraph.compare(model, output, held_out, sites=False).divergence
    assert found is not None
    return found.mean, result


@pytest.mark.slow
def test_each_step_pays_on_the_tiny_model(model: Path, tmp_path: Path) -> None:
    ids = tiny.batches("train", 256, 32)
    rounding, _ = kl(model, tmp_path)
    paper, _ = kl(model, tmp_path, solver="gptq", calibrate=ids, options=PAPER)
    ordered, _ = kl(model, tmp_path, solver="gptq", calibrate=ids, options=PLAIN)
    best, result = kl(model, tmp_path, solver="gptq", calibrate=ids)
    refined, _ = kl(model, tmp_path, solver="gptq", calibrate=ids, options=REFINED)
    assert paper <= 0.35 * rounding
    assert ordered <= paper
    assert best <= 0.85 * ordered
    assert refined <= 1.05 * best
    steps = [step for step in result.report.steps if step.pass_name == "solve"]
    assert len(steps) == 28
    assert all("of rounding's" in step.detail for step in steps)


def test_no_data_is_an_error_not_random_data(model: Path, tmp_path: Path) -> None:
    with pytest.raises(qgraph.InputError, match="needs calibration data: --calibrate"):
        qgraph.optimize(model, tmp_path / "o.onnx", solver="gptq")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_needs_no_data(model: Path) -> None:
    result = qgraph.optimize(model, solver="gptq", dry_run=True)
    solvers = {d.role: d.solver for d in result.plan.decisions}
    assert solvers == {"linear": "gptq", "embedding": "rtn", "head": "rtn"}


def small(folder: Path, inner: bool = False, poison: bool = False) -> Path:
    """x → MatMul → Relu → MatMul; `inner`: the second in an If; `poison`: a NaN between them."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(2)]
    second = helper.make_node("MatMul", ["r", "w2"], ["s"], "second")
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Log" if poison else "Relu", ["a"], ["r"], "between"),
    ]
    if inner:
        kind = helper.make_tensor_value_info("s", TensorProto.FLOAT, None)
        other = helper.make_node("Identity", ["r"], ["t"], "other")
        kind_t = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
        nodes.append(
            helper.make_node(
                "If", ["c"], ["y"], "branch",
                then_branch=helper.make_graph([second], "then", [], [kind]),
                else_branch=helper.make_graph([other], "else", [], [kind_t]),
            )
        )  # fmt: skip
    else:
        second.output[0] = "y"
        nodes.append(second)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 64])]
    inputs += [helper.make_tensor_value_info("c", TensorProto.BOOL, [])] if inner else []
    graph = helper.make_graph(
        nodes, "small", inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 64])],
        [numpy_helper.from_array(w, f"w{i + 1}") for i, w in enumerate(weights)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def data(inner: bool = False) -> list[dict[str, np.ndarray]]:
    x = np.random.default_rng(3).standard_normal((128, 64)).astype(np.float32)
    return [{"x": x, "c": np.array(True)} if inner else {"x": x}]


def test_a_linear_in_a_body_is_rounded_and_says_so(tmp_path: Path) -> None:
    result = qgraph.optimize(
        small(tmp_path, inner=True), tmp_path / "o.onnx", solver="gptq", calibrate=data(True)
    )
    steps = {s.site: s for s in result.report.steps if s.pass_name == "solve"}
    assert steps["second"].reason == "SOLVER_FELL_BACK"
    assert "lies in a body" in steps["second"].detail
    assert steps["first"].outcome == "done"


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with pytest.raises(qgraph.InputError, match=r"the node between \(Log\) made the first NaN"):
        qgraph.optimize(
            small(tmp_path, poison=True), tmp_path / "o.onnx", solver="gptq", calibrate=data()
        )
    assert not (tmp_path / "o.onnx").exists()


def test_a_failed_check_does_not_solve_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgraph.passes import gptq
    from qgraph.runtimes.ort import OrtRuntime

    calls, real_solve, real_run = [], gptq.solve, OrtRuntime.run

    def solve(*arguments: Any) -> Any:
        calls.append(1)
        return real_solve(*arguments)

    def run(runtime: OrtRuntime, model: Any, feeds: Any) -> Any:
        found = real_run(runtime, model, feeds)
        if isinstance(model, Path):
            for node in onnx.load(str(model), load_external_data=False).graph.node:
                if {a.name: a.i for a in node.attribute}.get("accuracy_level") == 4:
                    return [{k: v + 100 for k, v in item.items()} for item in found]
        return found

    monkeypatch.setattr(gptq, "solve", solve)
    monkeypatch.setattr(OrtRuntime, "run", run)
    result = qgraph.optimize(small(tmp_path), tmp_path / "o.onnx", solver="gptq", calibrate=data())
    assert len(calls) == 2
    assert {d.reason for d in result.plan.decisions} == {"LEVEL_FAILED_CHECK"}


def test_the_better_of_solver_and_rounding_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgraph.passes import gptq

    real = gptq.refine
    monkeypatch.setattr(gptq, "refine", lambda *a: real(*a).neg().clamp(0, 15))
    result = qgraph.optimize(
        small(tmp_path),
        tmp_path / "o.onnx",
        solver="gptq",
        calibrate=data(),
        format="uint4",
        options={"quantize_gptq.sweeps": "1"},
    )
    steps = [s for s in result.report.steps if s.pass_name == "solve"]
    assert {s.reason for s in steps} == {"SOLVER_FELL_BACK"}
    plain = qgraph.optimize(tmp_path / "m.onnx", tmp_path / "p.onnx", format="uint4")
    assert result.files[1].read_bytes() == plain.files[1].read_bytes(), "not what rounding gives"


def test_padding_does_not_count() -> None:
    array = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    mask = np.array([[True, True, False, False]])
    np.testing.assert_array_equal(rows_of(array, mask), array[0, :2])
    np.testing.assert_array_equal(rows_of(array, None), array[0])


def test_rows_of_one_shape_run_together() -> None:
    samples = [{"x": np.full((1, 4), i)} for i in range(10)] + [{"x": np.zeros((1, 5))}]
    shapes = [batch["x"].shape for batch in joined(samples, rows=4)]
    assert shapes == [(4, 4), (4, 4), (2, 4), (1, 5)]
