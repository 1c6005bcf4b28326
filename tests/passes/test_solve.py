"""The pass that runs solvers: composing, order, modes, residual sums, level checks, resuming."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import qgraph
from qgraph.formats.base import Array
from qgraph.passes import solve_weights
from qgraph.passes.solve_weights import StageSolver
from qgraph.solver_names import needs_data, parts_of

K = 64


def chain(folder: Path, depth: int = 3, outlier: float = 1.0) -> Path:
    """x, then `depth` times x + Relu(x W) V: a residual stream; channel 3 of x times `outlier`."""
    rng = np.random.default_rng(0)
    lines, tensors, x = [], [], "x"
    scale = np.ones(K, np.float32)
    scale[3] = outlier
    tensors.append(numpy_helper.from_array(scale, "scale"))
    lines.append("s = Mul(x, scale)")
    x = "s"
    for at in range(depth):
        for name in (f"w{at}", f"v{at}"):
            weight = rng.standard_normal((K, K)).astype(np.float32) / 8
            tensors.append(numpy_helper.from_array(weight, name))
        lines += [
            f"a{at} = MatMul({x}, w{at})",
            f"r{at} = Relu(a{at})",
            f"m{at} = MatMul(r{at}, v{at})",
            f"x{at} = Add({x}, m{at})",
        ]
        x = f"x{at}"
    text = (
        f'<ir_version: 9, opset_import: ["" : 18]> chain (float[B, {K}] x) => (float[B, {K}] y) '
        f"{{ {' '.join(lines)} y = Identity({x}) }}"
    )
    model = parser.parse_model(text)
    for at, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{at}"
    model.graph.initializer.extend(tensors)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def data(rows: int = 256, seed: int = 3) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((K, K)) / 8 + np.eye(K)
    return [{"x": (rng.standard_normal((rows, K)) @ mixing).astype(np.float32)} for _ in range(2)]


def error(model: Path, output: Path) -> float:
    """Relative output error on inputs that were not calibrated on."""
    feeds = data(64, seed=3)[1] | {}
    want, have = (qgraph.open(path).run(feeds)["y"] for path in (model, output))
    return float(np.linalg.norm(have - want) / np.linalg.norm(want))


def solve(model: Path, name: str = "o.onnx", **options: Any) -> tuple[Path, qgraph.Result]:
    output = model.with_name(name)
    options = {"format": "uint4:group=32", "accuracy_level": "0", "calibrate": data(), **options}
    return output, qgraph.optimize(model, output, **options)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gptq+clip", r"in this order: clip\+gptq"),
        ("clip+hqq", "both choose the ranges"),
        ("auto+gptq", "auto chooses the others by itself"),
        ("gptc", "did you mean 'gptq'"),
        ("gptq+", "no solver named ''"),
    ],
)
def test_what_does_not_compose_says_so(spec: str, words: str) -> None:
    with pytest.raises(qgraph.InputError, match=words):
        parts_of(spec)


def test_a_composed_solver_needs_data_if_one_part_does() -> None:
    assert parts_of("awq+clip+gptq") == ("awq", "clip", "gptq")
    assert needs_data("hqq+gptq")
    assert not needs_data("hqq")
    assert not needs_data("hqq+rtn")


def test_permuted_columns_are_gathered(tmp_path: Path) -> None:
    model = chain(tmp_path, outlier=8)
    options = {"quantize_gptq.act_order": "permuted"}
    output, _ = solve(model, solver="gptq", options=options)
    ops = [node.op_type for node in onnx.load(output).graph.node]
    assert ops.count("Gather") == ops.count("MatMulNBits") == 6
    plain, _ = solve(model, "p.onnx", solver="rtn")
    assert error(model, output) < 0.7 * error(model, plain)


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_both_modes_beat_rounding(tmp_path: Path, mode: str) -> None:
    model = chain(tmp_path)
    plain, _ = solve(model, "p.onnx", solver="rtn")
    output, result = solve(model, solver="gptq", calibration=mode)
    assert error(model, output) < 0.7 * error(model, plain)
    sites = result.report.totals["calibration"]["sites"]
    assert {site["tokens"] for site in sites.values()} == {512}


def test_linears_make_up_for_what_is_wrong_in_the_stream(tmp_path: Path) -> None:
    model = chain(tmp_path, depth=6)
    found = {}
    for residual in ("false", "true"):
        output, _ = solve(
            model, f"{residual}.onnx", solver="gptq", options={"solve.residual": residual}
        )
        found[residual] = error(model, output)
    assert found["true"] < 0.9 * found["false"], found


def test_dead_channels_are_counted(tmp_path: Path) -> None:
    model = chain(tmp_path, outlier=0)
    _, result = solve(model, solver="gptq")
    first = result.report.totals["calibration"]["sites"]["MatMul_1"]
    assert first == {"tokens": 512, "dead_channels": 1}
    assert any("zero on all tokens" in note for note in result.report.notes)


def test_a_huge_channel_takes_level_4_away(tmp_path: Path) -> None:
    model, feeds = chain(tmp_path, outlier=1000), data()
    for batch in feeds:
        batch["x"][:, 3] = 1  # the same for all tokens: what the others say is lost in int8
    _, result = solve(
        model, solver="rtn", accuracy_level="auto", format="uint4:group=64", calibrate=feeds
    )
    first = next(item for item in result.plan.decisions if item.site == "MatMul_1")
    assert first.reason == "LEVEL_FAILED_CHECK"
    assert "of the output on calibration data" in first.detail
    assert "level=4" not in (first.kernel or "") or "block=64" not in (first.kernel or "")
    steps = [step for step in result.report.steps if step.reason == "LEVEL_FAILED_CHECK"]
    assert steps
    assert steps[0].outcome == "changed"


@pytest.mark.parametrize(
    "asked",
    [
        {"accuracy_level": "4"},
        {"accuracy_level": "auto", "options": {"lower_matmul_nbits.accuracy_level": "4"}},
    ],
)
def test_level_4_stays_where_it_was_asked_for(tmp_path: Path, asked: dict[str, Any]) -> None:
    model, feeds = chain(tmp_path, depth=1, outlier=1e6), data()
    for batch in feeds:
        batch["x"][:, 3] = 1
    _, result = solve(model, solver="rtn", format="uint4:group=16", calibrate=feeds, **asked)
    steps = [step for step in result.report.steps if step.reason == "LEVEL_FAILED_CHECK"]
    assert {step.outcome for step in steps} == {"kept"}
    assert all("level=4" in (item.kernel or "") for item in result.plan.decisions)


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_smaller_groups_are_no_worse(tmp_path: Path, solver: str) -> None:
    model = chain(tmp_path)
    errors = [
        error(model, solve(model, f"{group}.onnx", format=f"uint4:group={group}", solver=solver)[0])
        for group in (64, 32, 16)
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_site_without_another_kernel_becomes_float(tmp_path: Path) -> None:
    """At 8 bits no kernel but those of level 4 is fast."""
    model, feeds = chain(tmp_path, depth=1, outlier=1000), data()
    for batch in feeds:
        batch["x"][:, 3] = 1
    options = {
        "solver": "rtn", "format": "int8:group=32", "calibrate": feeds,
        "overrides": ["MatMul_3=uint4"],
    }  # fmt: skip
    output, result = solve(model, accuracy_level="auto", **options)
    first = result.plan["MatMul_1"]
    assert (first.format, first.reason) == (None, "LEVEL_FAILED_CHECK")
    assert "of the output on calibration data (bound 2%): no other kernel has its codes" in str(
        first.detail
    )
    kept, result = solve(model, "kept.onnx", accuracy_level="4", **options)
    second = result.plan["MatMul_1"]
    assert (second.format, second.reason) == ("int8:group=32", "LEVEL_FAILED_CHECK")
    assert "level 4 was asked for" in str(second.detail)
    runs = [qgraph.open(path).run(feeds[0])["y"] for path in (model, output, kept)]
    want, have, lost = (each - each.mean(0) for each in runs)
    assert np.linalg.norm(have - want) < 0.3 * np.linalg.norm(lost - want)


def stopped(monkeypatch: pytest.MonkeyPatch, model: Path, stages: int) -> Path:
    """A run that dies after some stages; returns the folder it left."""
    real, count = StageSolver.solve, [0]

    def once(self: StageSolver, sites: Any) -> Any:
        count[0] += 1
        if count[0] > stages:
            raise KeyboardInterrupt
        return real(self, sites)

    with monkeypatch.context() as patch:
        patch.setattr(StageSolver, "solve", once)
        with pytest.raises(KeyboardInterrupt):
            solve(model, solver="gptq")
    assert not model.with_name("o.onnx").exists()
    return model.with_name("o.onnx.unfinished")


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(tmp_path)
    whole, _ = solve(model, "whole.onnx", solver="gptq")
    folder = stopped(monkeypatch, model, 3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    with pytest.raises(qgraph.InputError, match="go on with it with --resume"):
        solve(model, solver="gptq")
    solved = []
    real = StageSolver.solve

    def counted(self: StageSolver, sites: Any) -> Any:
        solved.extend(site.name for site in sites)
        return real(self, sites)

    monkeypatch.setattr(StageSolver, "solve", counted)
    output, _ = solve(model, solver="gptq", resume=True)
    assert len(solved) == 3
    assert not folder.exists()
    one, other = (onnx.load(path) for path in (whole, output))
    assert one.graph.initializer == other.graph.initializer
    assert one.graph.node == other.graph.node


def test_results_of_another_run_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chain(tmp_path)
    stopped(monkeypatch, model, 3)
    with pytest.raises(qgraph.InputError, match="6 weights, as weight MatMul_1: uint4:group=32"):
        solve(model, solver="gptq", resume=True, format="uint4:group=16")
    _, result = solve(model, solver="gptq", resume=True, force=True, format="uint4:group=16")
    assert any("belong to another run" in note for note in result.report.notes)
    assert "group=16" in str(result.plan.decisions[0].format)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    model = chain(tmp_path)
    folder = tmp_path / "o.onnx.unfinished"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(qgraph.InputError, match="is in the way"):
        solve(model, solver="gptq", force=True)
    assert (folder / "precious.txt").exists()


def test_a_transposed_activation_is_rounded_with_a_reason(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((K, K)).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "g", transA=1)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [K, "B"])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["B", K])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    feeds = [{"x": np.ones((K, 8), np.float32)}]
    _, result = solve(tmp_path / "m.onnx", solver="gptq", calibrate=feeds)
    assert result.plan.decisions[0].reason == "SOLVER_FELL_BACK"
    assert "transposed" in result.plan.decisions[0].detail


def test_awq_folds_where_it_can(tmp_path: Path) -> None:
    model, feeds = chain(tmp_path), data()
    for batch in feeds:
        batch["x"][:, :2] *= 20
    plain, _ = solve(model, "p.onnx", solver="rtn", calibrate=feeds)
    output, result = solve(model, solver="awq", calibrate=feeds, options={"solve.correct": "false"})
    steps = [step for step in result.report.steps if step.rule == "scale channels"]
    folded = {step.detail.partition(" of ")[0] for step in steps if "folded" in step.detail}
    assert folded == {"1/s is folded into the output rows"}
    assert any("a Mul by 1/s is added" in step.detail for step in steps)
    want, have, rounded = (qgraph.open(path).run(feeds[0])["y"] for path in (model, output, plain))
    assert np.linalg.norm(have - want) < 0.9 * np.linalg.norm(rounded - want)
    assert all(item.solver == "awq" for item in result.plan.decisions)


def loud(folder: Path, row: int) -> tuple[Path, list[dict[str, Array]]]:
    """A float16 linear of 512 rows, and data on which its input channel 5 is 10⁴ times the others.

    One weight, of `row` in that channel, is 2000: times AWQ's larger factors it is too large for
    float16 scales, and so in every 4-bit format.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((K, 512)).astype(np.float16)
    weight[5, row] = 2000
    x = rng.standard_normal((256, K)) * 1e-3
    x[:, 5] = rng.choice([-10, 10], 256)
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> loud (float16[B, {K}] x) => (float16[B, 512] y) '
        "{ y = MatMul(x, w) }"
    )
    model.graph.node[0].name = "linear"
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx", [{"x": x.astype(np.float16)}]


def test_channel_factors_too_large_for_float16_are_passed_over(tmp_path: Path) -> None:
    model, feeds = loud(tmp_path, row=4)
    output, result = solve(model, solver="awq", calibrate=feeds)
    words = [step.detail for step in result.report.steps if "→" in step.rule]
    assert re.search(r"alpha 0\.[1-9]\d \(scales do not fit FLOAT16 at [1-9]", words[0])
    assert [node.op_type for node in onnx.load(output).graph.node] == ["Mul", "MatMulNBits"]
    plain, _ = solve(model, "p.onnx", solver="rtn", calibrate=None)
    want, have, rounded = (qgraph.open(path).run(feeds[0])["y"] for path in (model, output, plain))
    distance = [np.linalg.norm(each.astype(np.float64) - want) for each in (have, rounded)]
    assert distance[0] < 0.5 * distance[1]


def test_a_stage_goes_without_channel_factors_that_do_not_fit_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The factors are searched on every fourth row, which the large weight is not among.
    monkeypatch.setattr(solve_weights, "SAMPLED_BYTES", 4 * K * 128)
    model, feeds = loud(tmp_path, row=3)
    output, result = solve(model, solver="awq", calibrate=feeds)
    (words,) = [step.detail for step in result.report.steps if step.pass_name == "solve"]
    assert "no channel factors: with them a scale does not fit its type" in words
    assert [node.op_type for node in onnx.load(output).graph.node] == ["MatMulNBits"]
    assert np.isfinite(qgraph.open(output).run(feeds[0])["y"]).all()


@pytest.mark.parametrize("spec", ["awq+gptq", "awq+rtn"])
def test_channel_factors_work_under_other_steps(tmp_path: Path, spec: str) -> None:
    model = chain(tmp_path)
    options = {"quantize_gptq.act_order": "permuted"} if spec.endswith("gptq") else {}
    plain, _ = solve(model, "p.onnx", solver="rtn")
    output, _ = solve(model, solver=spec, options=options)
    assert error(model, output) < error(model, plain)


@pytest.mark.parametrize("solver", ["hqq", "auto"])
def test_without_data(tmp_path: Path, solver: str) -> None:
    model = chain(tmp_path)
    plain, _ = solve(model, "p.onnx", solver="rtn", calibrate=None)
    output, result = solve(model, solver=solver, calibrate=None)
    assert output.read_bytes() != plain.read_bytes()
    # Made weights have no outliers, for which its ranges are made: it gains nothing here.
    assert error(model, output) < 1.2 * error(model, plain)
    assert {item.solver for item in result.plan.decisions} == {"hqq"}


def test_auto_keeps_the_better_one_of_each_weight(tmp_path: Path) -> None:
    model = chain(tmp_path)
    output, result = solve(model, solver="auto")
    gptq, _ = solve(model, "g.onnx", solver="gptq")
    assert error(model, output) < 1.05 * error(model, gptq)
    assert {item.solver for item in result.plan.decisions} <= {"gptq", "weighted+gptq"}
    assert all("of rounding's" in step.detail for step in result.report.steps if "→" in step.rule
               and step.pass_name == "solve")  # fmt: skip


@pytest.mark.parametrize("solver", ["clip", "weighted", "clip+rtn", "hqq+gptq"])
def test_ranges_alone_and_under_codes(tmp_path: Path, solver: str) -> None:
    model = chain(tmp_path)
    plain, _ = solve(model, "p.onnx", solver="rtn")
    output, result = solve(model, solver=solver)
    assert error(model, output) < error(model, plain)
    assert {item.solver for item in result.plan.decisions} == {solver}
