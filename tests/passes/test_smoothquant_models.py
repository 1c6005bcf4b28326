"""SmoothQuant and FP8 activations on whole models: what they gain, compose with, and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import qgraph
from qgraph.formats.base import Array
from qgraph.models import tiny

K, N = 600, 160
OUTLIERS = 3  # 0.5 % of the channels


def outliers(folder: Path) -> Path:
    """Two linears on x · scale, where 0.5 % of the channels of scale are 50 and all others 1."""
    rng = np.random.default_rng(0)
    scale = np.ones(K, np.float32)
    scale[rng.choice(K, OUTLIERS, replace=False)] = 50
    constants = {"scale": scale}
    for name in "wv":
        constants[name] = rng.standard_normal((K, N)).astype(np.float32) / K**0.5
    model = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        outliers (float[B, {K}] x) => (float[B, {N}] y, float[B, {N}] z) {{
            h = Mul(x, scale)
            a = MatMul(h, w)
            b = MatMul(h, v)
            y = Neg(a)
            z = Neg(b)
        }}"""
    )
    for node in model.graph.node:
        node.name = node.output[0]
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in constants.items()
    )
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def data(rows: int = 1024, seed: int = 3) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((rows, K)).astype(np.float32)} for _ in range(2)]


Measure = Callable[..., tuple[float, qgraph.Result]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """The relative output error on other inputs, of a model that is made with some options."""
    source, feeds = outliers(tmp_path), data(64, seed=5)[0]
    wanted = qgraph.open(source).run(feeds)

    def run(name: str, **options: Any) -> tuple[float, qgraph.Result]:
        options = {"calibrate": data(), "accuracy_level": "0", **options}
        result = qgraph.optimize(source, tmp_path / f"{name}.onnx", **options)
        found = qgraph.open(tmp_path / f"{name}.onnx").run(feeds)
        both = [np.concatenate([each["y"], each["z"]]) for each in (found, wanted)]
        return float(np.linalg.norm(both[0] - both[1]) / np.linalg.norm(both[1])), result

    return run


@pytest.mark.parametrize(("kind", "limit"), [("int8", 2), ("int8-row", 1.5), ("int8-static", 2)])
def test_outlier_channels_are_recovered_from(measure: Measure, kind: str, limit: float) -> None:
    """Within twice the error of int8 weights alone, where plain rounding is far from it."""
    weights, _ = measure("w", format="int8-row", target="qdq", solver="rtn")
    plain, _ = measure("p", activations=kind, solver="rtn")
    smooth, result = measure("s", activations=kind, solver="smoothquant")
    assert plain > 3 * weights
    assert smooth < limit * weights
    folds = [s.detail for s in result.report.steps if s.rule == "scale channels"]
    assert len(folds) == 2
    assert "folded into the weight of Mul" in folds[0]
    details = [step.detail for step in result.report.steps if step.pass_name == "solve"]
    assert any("smoothquant: alpha 0." in detail for detail in details)
    assert {item.solver for item in result.plan.decisions} == {"smoothquant"}


def test_it_composes(measure: Measure) -> None:
    alone, _ = measure("s", activations="int8-row", solver="smoothquant")
    gptq, result = measure("g", activations="int8-row", solver="smoothquant+gptq")
    assert gptq < 1.1 * alone  # no channel tells of another here: nothing can be gained
    assert {item.solver for item in result.plan.decisions} == {"smoothquant+gptq"}
    both, _ = measure("o", activations="int8-row", solver="smoothquant", outliers=OUTLIERS)
    assert both < alone


def test_auto_tries_it_where_activations_are_rounded(measure: Measure) -> None:
    """Factors are for all that read the activation: both linears take them, or none."""
    plain, _ = measure("p", activations="int8-row", solver="gptq")
    error, result = measure("a", activations="int8-row", solver="auto")
    assert error < plain / 2
    assert {item.solver for item in result.plan.decisions} == {"smoothquant+gptq"}
    floats, result = measure("f", format="int8-row", solver="auto")
    assert floats < error
    assert all("smoothquant" not in str(item.solver) for item in result.plan.decisions)
    assert not [step for step in result.report.steps if step.rule == "scale channels"]


def test_float_activations_are_refused(measure: Measure) -> None:
    with pytest.raises(qgraph.InputError, match=r"smoothquant is for rounded .*int8-row, or take"):
        measure("f", format="int8-row", solver="smoothquant")
    with pytest.raises(qgraph.InputError, match="both choose the scaling"):
        measure("f", activations="int8", solver="awq+smoothquant")


def test_linears_that_multiply_floats_get_no_factors(measure: Measure) -> None:
    floats = qgraph.Override("b", activations="float")
    error, result = measure(
        "part", activations="int8-row", solver="smoothquant", overrides=(floats,)
    )
    assert error < 1
    one, other = (result.plan.of(name) for name in "ab")
    assert one is not None and other is not None
    assert (one.activations, other.activations) == ("int8-row", None)


@pytest.mark.parametrize("observer", ["minmax", "percentile", "entropy"])
def test_fp8_by_each_observer(measure: Measure, observer: str) -> None:
    weights, _ = measure("w", format="fp8-e4m3", target="qdq", solver="rtn")
    options = {"insert_fp8_qdq.observer": observer}
    error, result = measure(
        observer, activations="fp8", target="qdq", solver="rtn", options=options
    )
    assert 1.01 * weights < error < 2.5 * weights
    steps = [step for step in result.report.steps if step.pass_name == "insert_fp8_qdq"]
    assert [step.site for step in steps] == ["a", "b"]
    assert f"by {observer} of calibration data" in steps[0].detail
    assert {item.format for item in result.plan.decisions} == {"fp8-e4m3"}


@pytest.mark.parametrize("target", ["qdq", "ort-cpu", "torch-cpu"])
def test_fp8_of_each_token(measure: Measure, target: str, tmp_path: Path) -> None:
    weights, _ = measure("w", format="fp8-e4m3", target="qdq", solver="rtn")
    error, result = measure(
        "t", activations="fp8-token", target=target, solver="rtn", calibrate=None
    )
    assert 1.01 * weights < error < 2 * weights
    assert [item.activations for item in result.plan.decisions] == ["fp8-token"] * 2
    again = qgraph.explain(tmp_path / "t.onnx", target=target)
    assert [(site.name, site.quantized) for site in again.sites] == [("a", True), ("b", True)]
    assert "activations in FP8, one scale for each token" in again.sites[0].detail


def test_contradictions_are_named(measure: Measure) -> None:
    with pytest.raises(qgraph.InputError, match=r"format int8-row contradict .* in fp8-e4m3"):
        measure("c", activations="fp8", format="int8-row")
    with pytest.raises(qgraph.InputError, match="outliers 2 and activations fp8 contradict"):
        measure("c", activations="fp8", outliers=2)


def test_the_tiny_model_is_never_worse(tmp_path: Path) -> None:
    source = tiny.build(tmp_path)
    held_out = tiny.batches("eval", 128, 16)

    def cost(**options: Any) -> float:
        output = tmp_path / "o.onnx"
        qgraph.optimize(source, output, embedding="float", force=True, check=False, **options)
        found = qgraph.compare(source, output, held_out, sites=False)
        assert found.divergence is not None
        return found.divergence.mean

    calibrate = tiny.batches("train", 128, 32)
    for kind in ("int8", "int8-row"):
        plain = cost(activations=kind)
        assert cost(activations=kind, solver="smoothquant", calibrate=calibrate) <= plain
