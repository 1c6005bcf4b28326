"""Queries, keys and values of which one fails the check of int8 activations on its inputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fusing import run

import qgraph
from tests.passes.test_merge_linears import B, K, S, attention, merged, ops

pytest.importorskip("torch")

RNG = np.random.default_rng(3)
HUGE = 5
"""A channel of the activation that is a thousand times as large as the others."""


def activations() -> list[dict[str, np.ndarray]]:
    found = RNG.standard_normal((6, B, S, K)).astype(np.float32)
    found[..., HUGE] *= 1000
    return [{"x": each} for each in found]


def model(blind: str) -> ir.Model:
    """Those named read nothing of the huge channel, which takes the steps from the rest."""
    made = attention()
    for name in blind:
        value = made.graph.initializers[f"{name}.weight"]
        weight = np.array(value.const_value.numpy())
        weight[HUGE] = 0
        value.const_value = ir.tensor(weight, name=value.name)
    return made


def optimized(blind: str) -> qgraph.Result:
    return qgraph.optimize(
        model(blind), format="uint4", group=32, min_elements=64, calibrate=activations()
    )


def test_keys_and_values_follow_queries_and_all_become_one() -> None:
    result = optimized("q")
    assert merged(result) == ["done"]
    assert ops(result) == {"MatMulNBits": 1, "GroupQueryAttention": 1}
    kernels = {item.site: item.kernel for item in result.plan.decisions}
    assert len(set(kernels.values())) == 1
    assert "level=0" in str(kernels["k"])
    steps = {s.site: s.detail for s in result.report.steps if s.rule == "one kernel"}
    assert set(steps) == {"k", "v"}
    assert steps["k"].startswith("q fails the check of int8 activations on calibration data;")
    for name in "qkv":
        assert result.plan[name].reason == "LEVEL_FAILED_CHECK"
    apart = qgraph.optimize(
        model("q"), format="uint4", group=32, min_elements=64, accuracy_level=0, fuse=False
    )
    feeds = activations()[0]
    old, new = (run(each.graph.model, feeds) for each in (apart, result))
    np.testing.assert_allclose(new["y"], old["y"], rtol=1e-3, atol=1e-3)


def test_queries_do_not_follow_values() -> None:
    """Most rows would change, for one product less."""
    result = optimized("v")
    (why,) = merged(result)
    assert why.endswith("differ in bits, block, level or zero points")
    assert ops(result)["MatMulNBits"] == 3
    assert "level=4" in str(result.plan["q"].kernel)
    assert "level=0" in str(result.plan["v"].kernel)
    assert not [step for step in result.report.steps if step.rule == "one kernel"]


def test_linears_that_pass_keep_their_kernels() -> None:
    result = optimized("")
    assert merged(result) == ["done"]
    assert "level=4" in str(result.plan["q"].kernel)
