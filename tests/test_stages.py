"""Cutting a graph into stages: every value once, nothing missing, the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qgraph import pipeline, stages
from qgraph.stages import cut, residual_of, run_stage, write_through

TEXT = """<ir_version: 9, opset_import: ["" : 17]>
g (float[B, 8] x, bool c) => (float[B, 8] y) {
    a = MatMul(x, w1)
    b = MatMul(x, w2)
    r = Relu(a)
    m = Mul(r, b)
    n = If(c) <
        then_branch = t () => (float[B, 8] p) { p = Add(m, x) },
        else_branch = e () => (float[B, 8] q) { q = Sub(m, x) }
    >
    s = MatMul(n, w3)
    y = Add(s, x)
}"""


def captured() -> Any:
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for name in ("w1", "w2", "w3"):
        array = rng.standard_normal((8, 8)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return pipeline.capture(ir.serde.deserialize_model(model))


def feeds(rows: int = 3, branch: bool = True) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((rows, 8)).astype(np.float32)
    return {"x": x, "c": np.array(branch)}


def run(model: bytes | Path, batches: Iterable[dict[str, np.ndarray]]) -> Any:
    """As a runtime does; a model that is a file was too large for a message."""
    assert isinstance(model, bytes) == (stages.MESSAGE_BYTES > 0)
    given = model if isinstance(model, bytes) else str(model)
    session = ort.InferenceSession(given, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = {item.name for item in session.get_inputs()}
    for batch in batches:
        found = session.run(names, {name: batch[name] for name in wanted})
        yield dict(zip(names, found, strict=True))


@pytest.fixture(params=["in messages", "in files"], autouse=True)
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in files":
        monkeypatch.setattr(stages, "MESSAGE_BYTES", 0)
        monkeypatch.setattr(stages, "SMALL", 1)


def test_linears_on_one_activation_are_one_stage_and_nothing_runs_twice() -> None:
    graph = captured()
    first, second = cut(graph.model, graph.sites())
    assert [len(stage.sites) for stage in (first, second)] == [2, 1]
    assert [first.name, second.name] == ["x", "n"]
    assert first.nodes == ()
    ran = [node.name for node in second.nodes]
    assert sorted(ran) == ["If_n", "MatMul_a", "MatMul_b", "Mul_m", "Relu_r"]
    assert {value.name for value in second.inputs} == {"x", "c"}


def test_the_stages_compute_what_the_model_does() -> None:
    graph = captured()
    for branch in (True, False):
        values = feeds(branch=branch)
        for stage in cut(graph.model, graph.sites()):
            if stage.nodes:
                (made,) = run_stage(graph.model, stage, [values], {}, run)
                values |= made
        x, (w1, w2) = values["x"], (_weight(graph, "w1"), _weight(graph, "w2"))
        m = np.maximum(x @ w1, 0) * (x @ w2)
        np.testing.assert_allclose(values["n"], m + x if branch else m - x, rtol=1e-4, atol=1e-5)


def test_replaced_weights_are_used() -> None:
    graph = captured()
    first, second = cut(graph.model, graph.sites())
    site = next(site for site in first.sites if site.weight_name == "w2")
    zero = {"w2": write_through(site, np.zeros((8, 8), np.float32))}
    values = feeds()
    (made,) = run_stage(graph.model, second, [values], zero, run)
    np.testing.assert_array_equal(made["n"], values["x"])


def test_writing_through_a_view_is_the_inverse_of_reading() -> None:
    graph = captured()
    for site in graph.sites():
        rows = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
        stored = write_through(site, rows)
        np.testing.assert_array_equal(site.weight.view.shape_of(stored), rows)
        assert stored.shape == tuple(site.weight.tensor.shape)


def _weight(graph: Any, name: str) -> np.ndarray:
    return np.asarray(graph.model.graph.initializers[name].const_value.numpy())


def residuals(body: str) -> dict[str, str | None]:
    """Per MatMul of a graph that starts with x `[B, 8]`: the value that its output is added to."""
    text = f"""<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[B, 8] x) => (float[B, 8] y) {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    for name in ("w1", "w2"):
        array = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(8, np.float32), "c"))
    graph = pipeline.capture(ir.serde.deserialize_model(model))
    found = {}
    for site in graph.sites():
        value = residual_of(site)
        found[site.weight_name] = value.name if value is not None else None
    return found


def test_the_value_that_an_output_is_added_to() -> None:
    assert residuals("a = MatMul(x, w1) y = Add(x, a)") == {"w1": "x"}
    behind_bias = "a = MatMul(x, w1) b = Add(a, c) i = Identity(b) y = Add(i, x)"
    assert residuals(behind_bias) == {"w1": "x"}
    skip = (
        "a = MatMul(x, w1) "
        "y = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, a, c)"
    )
    assert residuals(skip) == {"w1": "x"}


def test_what_is_no_residual_sum() -> None:
    assert residuals("a = MatMul(x, w1) y = Mul(a, x)") == {"w1": None}
    assert residuals("a = MatMul(x, w1) y = Add(a, c)") == {"w1": None}
    two_readers = "a = MatMul(x, w1) b = Relu(a) d = Add(a, x) y = Add(d, b)"
    assert residuals(two_readers) == {"w1": None}
    assert residuals("a = MatMul(x, w1) y = Add(a, a)") == {"w1": None}
