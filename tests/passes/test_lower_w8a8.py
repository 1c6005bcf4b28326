"""Products of bytes: what the graph rounds, what it shares, and that numpy gets the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from linears import K, N, weight

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import Array, parse
from qgraph.graph import Graph
from qgraph.passes.base import Context
from qgraph.passes.lower_w8a8 import LowerW8A8
from qgraph.planning import make_plan
from qgraph.recipe import Override, Recipe
from qgraph.report import Step

KINDS = ("int8", "int8-row", "int8-static")
PLAIN = f"g (float[M, {K}] x) => (float[M, {N}] y) {{ y = MatMul(x, w) }}"


FORMATS = ("int8-pairs", "int8-row")


def lower(
    graph: Graph,
    kind: str,
    target: str = "ort-cpu",
    outliers: int = 0,
    fmt: str | None = None,
    **recipe: Any,
) -> tuple[Graph, list[Step]]:
    """The passes that matter here. Without data static ranges are −1 to 1, outliers the first."""
    rounding = Override("*", fmt, activations=kind)  # a head would keep floats
    asked = Recipe(overrides=(rounding,), outliers=outliers, min_elements=64, **recipe)
    plan = make_plan(graph.sites(), asked, registry.load("target", target).capabilities())
    context = Context(plan, registry.load("target", target).capabilities())
    work, steps = graph.clone(), []
    for name in ("quantize_rtn", "lower_w8a8", "cleanup"):
        steps += registry.load("pass", name)().run(work, context)
        work.verify()
    return work, steps


def product(x: Array, w: Array, kind: str, outliers: int = 0, fmt: str = "int8-pairs") -> Array:
    """x · w by the definition: `w` `[K, N]` rounded by rows of its transpose, `x` to bytes."""
    scales_in = ir.DataType.FLOAT16 if w.dtype == np.float16 else ir.DataType.FLOAT
    w = w.astype(np.float32)
    found = parse(fmt).quantize(np.ascontiguousarray(w.T), scales_in)
    codes, scales = found.codes.astype(np.float64).T, found.scales[:, 0].astype(np.float64)
    kept = x.astype(np.float32).copy()
    kept[..., :outliers] = 0
    codes[:outliers] = 0
    if kind == "int8-row":
        step = np.maximum(np.abs(kept).max(-1, keepdims=True) / np.float32(127), np.float32(1e-30))
        bytes_ = np.rint(x / step.astype(np.float32)).clip(-128, 127)
    else:
        low, high = (
            (-1.0, 1.0) if kind == "int8-static" else (min(kept.min(), 0), max(kept.max(), 0))
        )
        step = np.float32((np.float32(high) - np.float32(low)) / np.float32(255))
        zero = np.rint(-low / step)
        bytes_ = (np.rint(kept / step) + zero).clip(0, 255) - zero
    whole = bytes_ @ codes * scales * step
    return np.asarray(whole + x[..., :outliers].astype(np.float64) @ w[:outliers])


def close(found: Array, wanted: Array) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(bench: Any, rng: Any, kind: str, fmt: str, outliers: int) -> None:
    w, x = weight(rng, K, N), rng.standard_normal((7, K)).astype(np.float32)
    lowered, steps = lower(bench.build(PLAIN, w=w), kind, outliers=outliers, fmt=fmt)
    close(bench.run(lowered, {"x": x})["y"], product(x, w, kind, outliers, fmt))
    (codes,) = (v for v in lowered.model.graph.initializers.values() if v.shape == (K, N))
    assert codes.dtype == (ir.DataType.INT8 if fmt == "int8-pairs" else ir.DataType.UINT8)
    assert steps[-1].outcome == "done"
    assert ("3 of 40 input columns in float" in steps[-1].detail) == bool(outliers)


def test_the_ops_of_each_kind(bench: Any, rng: Any) -> None:
    graph = bench.build(PLAIN, w=weight(rng, K, N))
    rows = {"Abs": 1, "ReduceMax": 1, "Mul": 2, "Max": 1, "Div": 1, "QuantizeLinear": 1}
    product = {"MatMulIntegerToFloat": 1}
    floats = {"Gather": 1, "MatMul": 1, "Add": 1}
    wanted: dict[tuple[str, int], dict[str, int]] = {
        ("int8", 0): {"DynamicQuantizeMatMul": 1},
        ("int8-row", 0): rows | product,
        ("int8-static", 0): {"QuantizeLinear": 1} | product,
        ("int8", 2): {"DynamicQuantizeMatMul": 1, "Mul": 1} | floats,
        ("int8-row", 2): rows | product | floats | {"Mul": 3},
        ("int8-static", 2): {"QuantizeLinear": 1} | product | floats,
    }
    for (kind, outliers), ops in wanted.items():
        lowered, _ = lower(graph, kind, outliers=outliers)
        assert bench.ops(lowered) == ops
        (site,) = lowered.sites()
        assert (site.name, site.state, site.n, site.k) == ("MatMul_y", "fused", N, K)
        assert site.activation.name == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_one_rounding_serves_all_readers(bench: Any, rng: Any, kind: str) -> None:
    graph = bench.build(
        f"""g (float[M, {K}] x) => (float[M, {N}] a, float[M, {N}] b) {{
            [q] a = MatMul(x, u)
            [k] b = MatMul(x, v)
        }}""",
        u=weight(rng, K, N),
        v=weight(rng, K, N),
    )
    lowered, _ = lower(graph, kind, outliers=2)
    ops = bench.ops(lowered)
    assert ops["Gather"] == 1
    assert ops.get("QuantizeLinear", 0) == (kind != "int8")
    assert ops.get("ReduceMax", 0) == (kind == "int8-row")
    assert [site.name for site in lowered.sites()] == ["q", "k"]


@pytest.mark.parametrize("outliers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gemm_with_bias(bench: Any, rng: Any, kind: str, outliers: int) -> None:
    w, b = weight(rng, N, K), weight(rng, N)
    graph = bench.build(
        f"g (float[M, {K}] x) => (float[M, {N}] y) {{ y = Gemm<transB = 1>(x, w, b) }}", w=w, b=b
    )
    lowered, _ = lower(graph, kind, outliers=outliers)
    x = rng.standard_normal((5, K)).astype(np.float32)
    close(bench.run(lowered, {"x": x})["y"], product(x, w.T, kind, outliers) + b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text, shape",
    [
        (f"g (float[B, T, {K}] x) => (float[B, T, {N}] y) {{ y = MatMul(x, w) }}", (2, 3, K)),
        (f"g (float[{K}] x) => (float[{N}] y) {{ y = MatMul(x, w) }}", (K,)),
        (f"g ({'float'}[M, {K}] x) => (float[1, M, {N}] y) {{ y = MatMul(x, w) }}", (3, K)),
        (f"g (float[{K}, M] x) => (float[M, {N}] y) {{ y = Gemm<transA = 1>(x, w) }}", (K, 3)),
    ],
    ids=["batch", "vector", "wide-weight", "transA"],
)
def test_shapes(bench: Any, rng: Any, kind: str, text: str, shape: tuple[int, ...]) -> None:
    w = weight(rng, K, N)
    given = w[None] if "[1, M" in text else w
    graph = bench.build(text, w=given)
    lowered, steps = lower(graph, kind, outliers=1)
    assert steps[-1].outcome == "done"
    x = rng.standard_normal(shape).astype(np.float32)
    rows = x.T if "transA" in text else x
    wanted = product(rows, w, kind, 1)
    close(bench.run(lowered, {"x": x})["y"], wanted[None] if "[1, M" in text else wanted)


@pytest.mark.parametrize("opset", [10, 13, 17, 18, 23])
def test_opsets(bench: Any, rng: Any, opset: int) -> None:
    """ReduceMax reads its axes from 18 on."""
    w, x = weight(rng, K, N), rng.standard_normal((3, K)).astype(np.float32)
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
    lowered, _ = lower(bench.build(head + PLAIN, w=w), "int8-row")
    assert lowered.model.opset_imports[""] == opset
    close(bench.run(lowered, {"x": x})["y"], product(x, w, "int8-row"))


def test_an_opset_without_quantize_linear_is_refused(bench: Any, rng: Any) -> None:
    head = '<ir_version: 8, opset_import: ["" : 9]>\n'
    _, steps = lower(bench.build(head + PLAIN, w=weight(rng, K, N)), "int8-row")
    assert (steps[-1].outcome, steps[-1].reason) == ("refused", "OPSET_TOO_OLD")
    assert "opset 10, the model has 9" in steps[-1].detail


def test_rows_of_zeros_and_of_huge_numbers(bench: Any, rng: Any) -> None:
    w, x = weight(rng, K, N), rng.standard_normal((4, K)).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * 1e30, x[2] * 1e-35
    lowered, _ = lower(bench.build(PLAIN, w=w), "int8-row")
    y = bench.run(lowered, {"x": x})["y"]
    assert (y[0] == 0).all()
    close(y[1] / 1e30, product(x[1:2], w, "int8-row")[0] / 1e30)
    close(y[3], product(x[3:], w, "int8-row")[0])
    assert np.isfinite(y).all()


def test_a_body_rounds_for_itself(bench: Any, rng: Any) -> None:
    """What a branch makes of an outer value is not to be had outside it."""
    w, x = weight(rng, K, N), rng.standard_normal((3, K)).astype(np.float32)
    graph = bench.build(
        f"""g (float[M, {K}] x, bool c) => (float[M, {N}] z) {{
            y = If (c) <
                then_branch = a () => (float[M, {N}] t) {{ [inner] t = MatMul(x, w) }},
                else_branch = b () => (float[M, {N}] e) {{ [other] e = MatMul(x, w) }}>
            [outer] o = MatMul(x, w)
            z = Add(y, o)
        }}""",
        w=w,
    )
    lowered, _ = lower(graph, "int8-row", outliers=1)
    assert bench.ops(lowered)["QuantizeLinear"] == 3
    assert {site.name for site in lowered.sites()} == {"inner", "other", "outer"}
    found = bench.run(lowered, {"x": x, "c": np.array(True)})["z"]
    close(found, 2 * product(x, w, "int8-row", 1))


def test_readers_of_one_weight_share_its_bytes(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"""g (float[M, {K}] x, float[M, {K}] z) => (float[M, {N}] a, float[M, {N}] b) {{
            a = MatMul(x, w)
            b = MatMul(z, w)
        }}""",
        w=weight(rng, K, N),
    )
    lowered, _ = lower(graph, "int8-row", outliers=2)
    matrices = [v for v in lowered.model.graph.initializers.values() if len(v.shape or ()) == 2]
    assert sorted(tuple(v.shape or ()) for v in matrices) == [(2, N), (K, N)]


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gemm", [False, True])
def test_float16_is_cast_around(bench: Any, rng: Any, kind: str, outliers: int, gemm: bool) -> None:
    """Integer kernels take float32; readers of one activation share its Cast."""
    w, v, b = (weight(rng, *shape, dtype=np.float16) for shape in ((K, N), (K, N), (N,)))
    first = "a = Gemm(x, w, b)" if gemm else "a = MatMul(x, w)"
    text = f"""g (float16[M, {K}] x) => (float16[M, {N}] a, float16[M, {N}] c) {{
        {first}
        c = MatMul(x, v)
    }}"""
    given = {"w": w, "v": v, **({"b": b} if gemm else {})}
    lowered, steps = lower(bench.build(text, **given), kind, outliers=outliers)
    assert [step.outcome for step in steps if step.pass_name == "lower_w8a8"] == ["done"] * 2
    ops = bench.ops(lowered)
    assert ops["Cast"] == 3  # one in front, one behind each
    assert [(site.k, site.n, site.state) for site in lowered.sites()] == [(K, N, "fused")] * 2
    x = rng.standard_normal((5, K)).astype(np.float16)
    found = bench.run(lowered, {"x": x})
    for name, array, bias in (("a", w, b if gemm else 0), ("c", v, 0)):
        assert found[name].dtype == np.float16
        wanted = product(x, array, kind, outliers) + bias
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-3 * np.abs(wanted).max())


def test_float16_in_a_q_dq_graph_is_refused(bench: Any, rng: Any) -> None:
    text = PLAIN.replace("float[", "float16[")
    graph = bench.build(text, w=weight(rng, K, N, dtype=np.float16))
    rounding = Override("*", activations="int8-static")
    asked = Recipe(overrides=(rounding,), min_elements=64)
    (decision,) = make_plan(
        graph.sites(), asked, registry.load("target", "qdq").capabilities()
    ).decisions
    assert (decision.format, decision.reason) == (None, "DTYPE_HAS_NO_KERNEL")
    assert "float32, not float16" in decision.detail


@pytest.mark.parametrize("bias", [False, True])
def test_spelled_for_any_runtime(bench: Any, rng: Any, bias: bool) -> None:
    """ONNX Runtime fuses the two DequantizeLinear into an integer product, without a bias."""
    w, b = weight(rng, N, K), weight(rng, N)
    text = f"g (float[M, {K}] x) => (float[M, {N}] y) {{ y = Gemm<transB = 1>(x, w, b) }}"
    given = {"w": w, "b": b}
    if not bias:
        text, given = PLAIN, {"w": np.ascontiguousarray(w.T)}
    lowered, steps = lower(bench.build(text, **given), "int8-static", "qdq")
    assert steps[-1].rule.endswith("→ DequantizeLinear")
    assert bench.ops(lowered) == {
        "QuantizeLinear": 1, "DequantizeLinear": 2, "MatMul": 1, **({"Add": 1} if bias else {}),
    }  # fmt: skip
    # A matrix product with a bias becomes a Gemm first, for which it wants a quantized bias.
    assert ("MatMulIntegerToFloat" in bench.optimized_ops(lowered)) == (not bias)
    x = rng.standard_normal((5, K)).astype(np.float32)
    wanted = product(x, w.T, "int8-static") + (b if bias else 0)
    close(bench.run(lowered, {"x": x}, reference=True)["y"], wanted)
    close(bench.run(lowered, {"x": x})["y"], wanted)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"observer": "minmx"}, "did you mean 'minmax'"),
        ({"threshold": -1.0}, "threshold -1: wanted 0 or more"),
        ({"threshold": float("nan")}, "wanted 0 or more"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LowerW8A8(**options)
