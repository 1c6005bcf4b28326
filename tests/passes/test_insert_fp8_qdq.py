"""FP8 activations: the nodes, the scales, what ONNX Runtime and torch compute, and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

import qgraph
from qgraph import registry
from qgraph.calibration import Calibration
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.passes.base import Context, Findings
from qgraph.passes.insert_fp8_qdq import InsertFp8Qdq
from qgraph.plan import QuantPlan
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.report import Step

HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
TWO = """{header}g (float[B, T, 16] x) => (float[B, T, 24] y, float[B, T, 8] z) {{
    y = MatMul(x, w)
    z = MatMul(x, v)
}}"""


def two(bench: Any, rng: np.random.Generator, opset: int = 21) -> Graph:
    text = TWO.format(header=HEADER.format(opset=opset))
    w, v = (rng.standard_normal((16, n)).astype(np.float32) for n in (24, 8))
    graph: Graph = bench.build(text, w=w, v=v)
    return graph


def inserted(
    graph: Graph,
    ranges: dict[str, tuple[float, float]] | None = None,
    calibration: Calibration | None = None,
    **kinds: str,
) -> tuple[Graph, list[Step], QuantPlan]:
    """Round the weights, then quantize the activations of `kinds`, by site."""
    recipe = Recipe(format="fp8-e4m3", min_elements=1)
    capabilities = registry.load("target", "qdq").capabilities()
    plan = make_plan(graph.sites(), recipe, capabilities)
    decisions = [
        dataclasses.replace(item, activations=kinds.get(item.site.rpartition("/")[2]))
        for item in plan.decisions
    ]
    plan = dataclasses.replace(plan, decisions=tuple(decisions))
    findings = Findings(ranges=ranges or {})
    context = Context(plan, capabilities, calibration=calibration, findings=findings)
    work = graph.clone()
    registry.load("pass", "quantize_rtn")().run(work, context)
    steps = InsertFp8Qdq().run(work, context)
    work.verify()
    return work, steps, plan


def names(graph: Graph) -> list[str]:
    return [site.name for site in graph.sites()]


def e4m3(x: np.ndarray, scale: Any) -> np.ndarray:
    codes = np.clip(x / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * np.float32(scale)


def weights(graph: Graph, plan: QuantPlan, bench: Any) -> list[np.ndarray]:
    found = bench.rounded(graph, plan).model.graph.initializers
    return [found[name].const_value.numpy() for name in ("w", "v")]


def feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = rng.standard_normal((2, 5, 16)).astype(np.float32)
    x[0, 0] *= 1000
    x[0, 1] = 0
    return {"x": x}


@pytest.mark.parametrize("opset", [13, 21])
def test_one_scale(bench: Any, rng: np.random.Generator, opset: int) -> None:
    graph = two(bench, rng, opset)
    one, other = names(graph)
    ranges = {one: (-3.0, 2.0), other: (-3.0, 2.0)}
    work, steps, plan = inserted(graph, ranges, **{one: "fp8", other: "fp8"})
    assert [step.outcome for step in steps] == ["done", "done"]
    assert bench.ops(work)["QuantizeLinear"] == bench.ops(work)["DequantizeLinear"] == 1
    assert work.model.opset_imports[""] == max(opset, 19)
    given = feeds(rng)
    x = e4m3(given["x"], 3 / 448)
    wanted = {n: x @ w for n, w in zip("yz", weights(graph, plan, bench), strict=True)}
    assert np.abs(x).max() == np.float32(448) * np.float32(3 / 448)
    for reference in (True, False):
        bench.close(bench.run(work, given, reference=reference), wanted, 1e-6)


def test_a_scale_for_each_token(bench: Any, rng: np.random.Generator) -> None:
    graph = two(bench, rng)
    one, other = names(graph)
    work, _, plan = inserted(graph, **{one: "fp8-token", other: "fp8-token"})
    counts = bench.ops(work)
    assert {counts[op] for op in ("Abs", "ReduceMax", "QuantizeLinear", "Mul")} == {1}
    given = feeds(rng)
    amax = np.abs(given["x"]).max(-1, keepdims=True)
    x = e4m3(given["x"], np.maximum(amax / np.float32(448), np.finfo(np.float32).tiny))
    wanted = {n: x @ w for n, w in zip("yz", weights(graph, plan, bench), strict=True)}
    for reference in (True, False):
        found = bench.run(work, given, reference=reference)
        bench.close(found, wanted, 1e-6)
        assert np.abs(found["y"] - wanted["y"])[0, 2:].max() < 1e-4
    shape = next(n for n in work.model.graph if n.op_type == "ReduceMax").outputs[0].shape
    assert shape is not None
    assert shape[-1] == 1


def test_torch_computes_the_same(bench: Any, rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    graph = two(bench, rng)
    one, other = names(graph)
    work, _, _ = inserted(graph, {one: (-3, 2)}, **{one: "fp8", other: "fp8-token"})
    model = ir.serde.serialize_model(work.model).SerializeToString()
    given = feeds(rng)
    found = registry.load("target", "torch-cpu").open(model).run(given)
    bench.close(found, bench.run(work, given, reference=True), 1e-6)


def test_float16(bench: Any, rng: np.random.Generator) -> None:
    text = (
        HEADER.format(opset=21) + "g (float16[B, 32] x) => (float16[B, 24] y) { y = MatMul(x, w) }"
    )
    graph = bench.build(text, w=rng.standard_normal((32, 24)).astype(np.float16))
    work, _, plan = inserted(graph, **{names(graph)[0]: "fp8-token"})
    x = rng.standard_normal((4, 32)).astype(np.float16)
    x[1], x[2] = 0, x[2] * np.float16(1e-4)
    found = bench.run(work, {"x": x}, reference=True)["y"]
    w = bench.rounded(graph, plan).model.graph.initializers["w"].const_value.numpy()
    wanted = x.astype(np.float32) @ w.astype(np.float32)
    assert np.isfinite(found).all()
    for row, exact in zip(found, wanted, strict=True):
        assert np.abs(row - exact).max() <= 0.1 * np.abs(exact).max()


def test_other_readers_read_the_floats(bench: Any, rng: np.random.Generator) -> None:
    graph = two(bench, rng)
    one, other = names(graph)
    work, steps, plan = inserted(graph, **{one: "fp8-token"})
    assert [step.site for step in steps] == [one]
    given = feeds(rng)
    wanted = given["x"] @ weights(graph, plan, bench)[1]
    bench.close({"z": bench.run(work, given)["z"]}, {"z": wanted}, 1e-6)
    assert next(site for site in work.sites() if site.name == other).activation.name == "x"


def test_transposed_activations_are_refused(bench: Any, rng: np.random.Generator) -> None:
    text = HEADER.format(opset=21) + (
        "g (float[16, M] x) => (float[M, 24] y) { y = Gemm <transA = 1> (x, w) }"
    )
    graph = bench.build(text, w=rng.standard_normal((16, 24)).astype(np.float32))
    _, steps, _ = inserted(graph, **{names(graph)[0]: "fp8-token"})
    assert (steps[0].outcome, steps[0].reason) == ("refused", "ACTIVATION_UNSUPPORTED")


def test_what_calibration_does_not_see_is_refused(bench: Any, rng: np.random.Generator) -> None:
    graph = two(bench, rng)
    one, other = names(graph)
    nothing = Calibration((), (), lambda model, feeds: ())
    work, steps, _ = inserted(graph, {one: (0, 1)}, nothing, **{one: "fp8", other: "fp8"})
    assert [(step.outcome, step.reason) for step in steps] == [
        ("done", None), ("refused", "ACTIVATION_UNSUPPORTED"),
    ]  # fmt: skip
    assert bench.ops(work)["QuantizeLinear"] == 1


def test_one_scale_wants_data(bench: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    graph, options = two(bench, rng), {"target": "qdq", "min_elements": 1}
    with pytest.raises(InputError, match=r"give --calibrate FILE .* or fp8-token, needs none"):
        qgraph.optimize(graph, tmp_path / "o.onnx", activations="fp8", **options)
    shown = qgraph.optimize(graph, None, activations="fp8", dry_run=True, **options)
    assert bench.ops(shown.graph)["QuantizeLinear"] == 1


def test_an_unknown_observer_is_named() -> None:
    with pytest.raises(InputError, match="did you mean 'percentile'"):
        InsertFp8Qdq(observer="percentil")
