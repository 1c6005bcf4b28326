"""Integer products as products of floats: what the stored weight makes of what was not rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qgraph
from qgraph.passes.cache_noise import ROUNDING
from qgraph.passes.unrounded import PER_AXIS, unround
from qgraph.runtimes.ort import CPU
from qgraph.scopes import nodes

TEXT = """<ir_version: 10, opset_import: ["" : {opset}]>
g (float[M, 64] x) => (float[M, 8] y) {{
    a = MatMul(x, w)
    s = Add(a, b)
    r = Relu(s)
    y = MatMul(r, head)
}}"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))


def quantized(bench: Any, rng: Any, opset: int = 17, **options: Any) -> Any:
    """A linear with rounded activations, its input, and what float64 makes of both."""
    given = {
        "w": (rng.standard_normal((64, 96)) / 8).astype(np.float32),
        "b": rng.standard_normal(96).astype(np.float32),
        "head": rng.standard_normal((96, 8)).astype(np.float32),
    }
    x = rng.standard_normal((40, 64)).astype(np.float32)
    x[:, 5] *= 30
    graph = bench.build(TEXT.format(opset=opset), **given)
    asked: dict[str, Any] = {"check": False, "min_elements": 1, "exclude": ["head"]}
    asked |= {"calibrate": [{"x": x}], **options}
    made = qgraph.optimize(graph, None, **asked).graph.model
    inner = x.astype(np.float64) @ given["w"] + given["b"]
    return made, x, np.maximum(inner, 0) @ given["head"]


CASES: dict[str, dict[str, Any]] = {
    "one scale": {"activations": "int8"},
    "a scale a row": {"activations": "int8-row"},
    "a known scale": {"activations": "int8-static"},
    "float columns": {"activations": "int8-row", "outliers": 2},
    "one way of two": {"purpose": "both"},
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_rounds_and_what_is_left_is_the_weights_error(
    bench: Any, rng: Any, case: str
) -> None:
    model, x, wanted = quantized(bench, rng, **CASES[case])
    assert any(node.op_type in ROUNDING for node in nodes(model.graph))
    rounded = CPU.open(model).run({"x": x})["y"]
    unround(model)
    assert not any(node.op_type in ROUNDING for node in nodes(model.graph))
    found = CPU.open(model).run({"x": x})["y"]
    errors = [np.linalg.norm(each - wanted) for each in (found, rounded)]
    assert errors[0] < errors[1]
    assert errors[0] < 0.01 * np.linalg.norm(wanted)


def test_an_opset_without_a_scale_for_each_column_stays(bench: Any, rng: Any) -> None:
    model, _, _ = quantized(bench, rng, opset=PER_AXIS - 1, activations="int8-row")
    before = [node.op_type for node in nodes(model.graph)]
    assert not ROUNDING.isdisjoint(before)
    unround(model)
    assert [node.op_type for node in nodes(model.graph)] == before
