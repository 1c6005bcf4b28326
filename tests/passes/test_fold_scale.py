"""Folding 1/s into what makes an activation: every fold is run, before and after, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from folding import HEADER, K, applied, check, find, scale_of, weights

from qgraph import registry
from qgraph.errors import GraphError
from qgraph.graph import Graph
from qgraph.models import tiny
from qgraph.passes.fold_scale import FoldRefused, apply_fold, find_fold
from qgraph.pipeline import capture
from qgraph.rewrite import Rewriter
from qgraph.sites import Site
from qgraph.stages import write_through


def groups(graph: Graph) -> list[list[Site]]:
    """The linears of the main graph, by the activation that they read."""
    found: dict[int, list[Site]] = {}
    for site in graph.sites():
        if site.role != "embedding" and site.scope is graph.model.graph:
            found.setdefault(id(site.activation), []).append(site)
    return list(found.values())


RMS = """
    p = Pow(h, two) m = ReduceMean<keepdims = 1>(p, last) e = Add(m, epsilon)
    r = Sqrt(e) i = Reciprocal(r) n = Mul(h, i)
"""
SMALL = {
    "two": np.float32(2), "last": np.array([-1]), "epsilon": np.float32(1e-5),
    "one": np.float32(1), "half": np.float32(0.5), "flat": np.array([-1, K]),
}  # fmt: skip
NORMS = {
    "LayerNormalization": "x = LayerNormalization<axis = -1>(h, w, b)",
    "LayerNormalization without bias": "x = LayerNormalization<axis = 2>(h, w)",
    "RMSNormalization": "x = RMSNormalization(h, w)",
    "RMSNormalization of 1 + w": "f = Add(w, one) x = RMSNormalization(h, f)",
    "SimplifiedLayerNormalization": "x = SimplifiedLayerNormalization(h, w)",
    "SkipLayerNormalization": """
        x, m, v, r = com.microsoft.SkipLayerNormalization(h, skip, w, b, bias)""",
    "SkipSimplifiedLayerNormalization": """
        x, m, v, r = com.microsoft.SkipSimplifiedLayerNormalization(h, skip, w, bias)""",
    "spelled out": f"{RMS} x = Mul(w, n)",
    "spelled out, bias": f"{RMS} t = Mul(n, w) x = Add(b, t)",
    "spelled out, Sub": f"{RMS} t = Mul(n, w) x = Sub(t, b)",
    "spelled out, Identity": f"{RMS} t = Mul(n, w) u = Identity(t) x = Add(u, b)",
    "spelled out, wide weight": f"{RMS} x = Mul(n, wide)",
    "Gemma": f"{RMS} f = Add(one, w) x = Mul(n, f)",
    "Gemma, Cast": f"{RMS} c = Cast<to = 1>(w16) f = Add(c, one) x = Mul(f, n)",
    "Cast behind": f"{RMS} c = Cast<to = 11>(n) t = Mul(c, w64) x = Cast<to = 1>(t)",
    "half of it": f"{RMS} t = Mul(n, w) x = Mul(t, half)",
    "rows flattened": f"{RMS} t = Mul(n, w) x = Reshape(t, flat)",
}


@pytest.mark.parametrize("spelling", NORMS)
def test_norms(bench: Any, rng: np.random.Generator, spelling: str) -> None:
    body = NORMS[spelling]
    outer = "float[2, 5, 16] y" + (", float[2, 5, 16] r" if "r = com" in body else "")
    graph = bench.build(
        f"""{HEADER} g (float[2, 5, 16] h, float[2, 5, 16] skip) => ({outer}, float[2, 5, 8] z) {{
            {body}
            [up] y0 = MatMul(x, wu) y1 = Tanh(y0) y = Reshape(y1, shape_y)
            [gate] z0 = MatMul(x, wg) z = Reshape(z0, shape_z)
        }}""",
        **weights(rng, w=(K,), b=(K,), bias=(K,), wide=(1, 1, K), wu=(K, K), wg=(K, 8)),
        w16=(rng.standard_normal(K) / 10).astype(np.float16), w64=rng.standard_normal(K),
        shape_y=np.array([2, 5, 16]), shape_z=np.array([2, 5, 8]), **SMALL,
    )  # fmt: skip
    tolerance = 5e-3 if "w16" in body else 1e-5  # float16 weights round by 2^-11, then 1 is added
    fold = check(bench, graph, "up", "gate", tolerance=tolerance)
    assert fold.kind == "norm"
    assert fold.producer is not None
    assert fold.producer.name is not None
    assert fold.producer.name in fold.detail
    np.testing.assert_array_equal(fold.ties, np.arange(K))
    assert fold.site is None


def norm_twice(bench: Any, rng: np.random.Generator, factor: str) -> Graph:
    """Two norms of one weight, one of them read by linears."""
    return bench.build(
        f"""{HEADER} g (float[B, T, 16] h) => (float[B, T, 8] y, float[B, T, 16] z) {{
            {RMS} {factor} x = Mul(n, f) [up] y = MatMul(x, wu)
            o = Neg(n) z = Mul(o, f)
        }}""",
        **weights(rng, w=(K,), wu=(K, 8)), **SMALL,
    )  # fmt: skip


@pytest.mark.parametrize("factor", ["f = Add(w, one)", "f = Identity(w)"])
def test_a_weight_that_others_read_gets_a_copy(
    bench: Any, rng: np.random.Generator, factor: str
) -> None:
    graph = norm_twice(bench, rng, factor)
    assert check(bench, graph, "up").kind == "norm"
    work = graph.clone()
    before = set(work.model.graph.initializers)
    applied(find(work, "up"), work)
    assert set(work.model.graph.initializers) - before == {"w/scaled"}


def test_a_weight_of_its_own_keeps_its_name(bench: Any, rng: np.random.Generator) -> None:
    graph = bench.build(
        "g (float[M, 16] h) => (float[M, 8] y) { x = LayerNormalization(h, w, b)"
        "[up] y = MatMul(x, wu) }",
        **weights(rng, w=(K,), b=(K,), wu=(K, 8)),
    )
    before = set(graph.model.graph.initializers)
    work = graph.clone()
    scale = scale_of(find(work, "up"))
    applied(find(work, "up"), work, scale)
    found = work.model.graph.initializers
    assert set(found) == before
    for name in ("w", "b"):
        np.testing.assert_allclose(
            found[name].const_value.numpy(),
            graph.model.graph.initializers[name].const_value.numpy() / scale,
            rtol=1e-6,
        )
    assert [node.op_type for node in work.model.graph] == ["LayerNormalization", "MatMul"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_constants_keep_their_type(bench: Any, rng: np.random.Generator, dtype: Any) -> None:
    kind = {"float16": "float16", "bfloat16": "bfloat16", "float64": "double"}[np.dtype(dtype).name]
    values = {name: ir.tensor(array.astype(dtype), name=name) for name, array in
              weights(rng, w=(K,), wu=(K, 8), up=(K, K), bias=(K,)).items()}  # fmt: skip
    graph = bench.build(
        f"""{HEADER} g ({kind}[M, 16] h) => ({kind}[M, 8] y) {{
            [first] u = MatMul(h, up) v = Add(u, bias) r = Relu(v) [second] t = MatMul(r, up)
            x = RMSNormalization(t, w) [third] y = MatMul(x, wu)
        }}""",
        **{name: ir.to_proto(value) for name, value in values.items()},
    )  # fmt: skip
    for name, kind in (("second", "linear"), ("third", "norm")):
        graph_of_kind = graph.clone()
        fold = find(graph_of_kind, name)
        if name == "second":
            assert fold.kind == "mul"  # one weight in two places
            assert "serves other linears" in fold.detail
        else:
            assert fold.kind == kind
        applied(fold, graph_of_kind)
        types = {v.const_value.dtype for v in graph_of_kind.model.graph.initializers.values()}
        assert types == {values["w"].dtype}


SWIGLU = "s = Sigmoid(gate) a = Mul(gate, s)"
LINEARS = {
    "SwiGLU": f"[gate] gate = MatMul(h, wg) {SWIGLU} [up] u = MatMul(h, wu) x = Mul(a, u)",
    "SwiGLU, turned": f"[gate] gate = MatMul(h, wg) {SWIGLU} [up] u = MatMul(h, wu) x = Mul(u, a)",
    "SwiGLU, bias": f"[gate] gate = MatMul(h, wg) {SWIGLU} [up] v = MatMul(h, wu) u = Add(b, v)"
    "x = Mul(u, a)",
    "SwiGLU, Split": f"[up] both = MatMul(h, wb) gate, u = Split<axis = 1, num_outputs = 2>(both)"
    f"{SWIGLU} x = Mul(a, u)",
    "SwiGLU, Slice of cast bounds": "[up] both = MatMul(h, wb) e = Cast<to = 7>(sixteen)"
    "d = Reshape(e, one) gate = Slice(both, zero, d, one) u = Slice(both, d, end, one)"
    f"{SWIGLU} x = Mul(a, u)",
    "SwiGLU, Slice": "[up] both = MatMul(h, wb) gate = Slice(both, zero, sixteen, one)"
    f"u = Slice(both, sixteen, end, one) {SWIGLU} x = Mul(a, u)",
    "plain": "[up] x = MatMul(h, wu)",
    "Relu": "[up] u = MatMul(h, wu) x = Relu(u)",
    "LeakyRelu": "[up] u = MatMul(h, wu) x = LeakyRelu<alpha = 0.1>(u)",
    "PRelu": "[up] u = MatMul(h, wu) x = PRelu(u, b)",
    "Gemm": "[up] u = Gemm(h, wu, b) x = Relu(u)",
    "Gemm, scaled": "[up] u = Gemm<transB = 1, alpha = 0.5, beta = 3.0>(h, wt, c) x = Relu(u)",
    "Gemm, one bias": "[up] u = Gemm(h, wu, one_bias) x = Abs(u)",
    "Transpose in front": "t = Transpose(wt) [up] u = MatMul(h, t) x = Neg(u)",
    "biases": "[up] t = MatMul(h, wu) u = Add(t, b) v = Relu(u) w = Sub(c, v) x = Dropout(w)",
    "Div": "[up] t = MatMul(h, wu) x = Div(t, b)",
    "Cast": "[up] t = MatMul(h, wu) u = Cast<to = 11>(t) v = Relu(u) x = Cast<to = 1>(v)",
    "shapes are free to read": "[up] t = MatMul(h, wu) s = Shape(t) x = Reshape(t, s)",
}  # fmt: skip


@pytest.mark.parametrize("spelling", LINEARS)
def test_output_rows(bench: Any, rng: np.random.Generator, spelling: str) -> None:
    told = "<float[6, 16] u>" if "cast bounds" in spelling else ""  # as exporters tell it
    graph = bench.build(
        f"""g (float[6, 12] h) => (float[6, 8] y) {told} {{
            {LINEARS[spelling]} [down] y = MatMul(x, wd) }}""",
        **weights(
            rng, wg=(12, K), wu=(12, K), wt=(K, 12), wb=(12, 2 * K), wd=(K, 8), b=(K,), c=(1, K),
            one_bias=(1,),
        ),
        zero=np.array([0]), sixteen=np.array([K]), one=np.array([1]), end=np.array([2**62]),
    )  # fmt: skip
    fold = check(bench, graph, "down")
    assert fold.kind == "linear", fold.detail
    assert fold.site == "up"
    wanted = np.arange(K) + (K if "wb" in LINEARS[spelling] else 0)
    np.testing.assert_array_equal(fold.ties, wanted)
    assert fold.rows == (2 * K if "wb" in LINEARS[spelling] else K)


def packed(rng: np.random.Generator, bench: Any, flat: bool) -> Graph:
    scales = rng.uniform(0.1, 1, (K, 2)).astype(np.float32)
    return bench.build(
        """g (float[6, 32] h) => (float[6, 8] y) {
            [up] u = com.microsoft.MatMulNBits<K = 32, N = 16, bits = 4, block_size = 16>
                (h, q, s, z, , b)
            x = Relu(u) [down] y = MatMul(x, wd)
        }""",
        q=rng.integers(0, 256, (K, 2, 8)).astype(np.uint8), s=scales.ravel() if flat else scales,
        z=rng.integers(0, 256, K if flat else (K, 1)).astype(np.uint8),
        **weights(rng, b=(K,), wd=(K, 8)),
    )  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
def test_rows_of_a_packed_linear(bench: Any, rng: np.random.Generator, flat: bool) -> None:
    fold = check(bench, packed(rng, bench, flat), "down")
    assert (fold.kind, fold.site) == ("linear", "up")


def test_the_caller_may_scale_the_rows(bench: Any, rng: np.random.Generator) -> None:
    """Biases are divided, the weight is left alone, and row_factors says by how much to go on."""
    graph = bench.build(
        "g (float[6, 12] h) => (float[6, 8] y) { [up] u = Gemm(h, wu, b) x = Relu(u)"
        "[down] y = MatMul(x, wd) }",
        **weights(rng, wu=(12, K), b=(K,), wd=(K, 8)),
    )
    feeds = bench.feeds_of(graph)
    wanted = bench.run(graph, feeds, reference=True)
    work = graph.clone()
    fold = find(work, "down")
    scale = scale_of(fold)
    applied(fold, work, scale, rows_scaled=True)
    up = next(site for site in work.sites() if site.name == "up")
    assert up.weight is not None
    np.testing.assert_array_equal(up.weight.tensor.numpy(), graph.sites()[0].weight.tensor.numpy())
    factors = fold.row_factors(scale)[:, None].astype(np.float32)
    rows = write_through(up, up.weight.rows(0, K) * factors)
    up.weight.root.const_value = ir.tensor(rows, name="wu")
    bench.close(bench.run(work, feeds, reference=True), wanted, 1e-5)


RMS_OF_H = f"{RMS} t = Mul(n, w)"
REFUSED = {
    "another reader": ("x = LayerNormalization(h, w) o = Neg(x)", "x is also read by Neg Neg_o"),
    "an output": ("x = LayerNormalization(h, w) o = Identity(h)", "x is an output of the graph"),
    "an output on the way": (f"{RMS} o = Mul(n, w) x = Add(o, b)", "o is an output of the graph"),
    "a reader on the way": (f"{RMS_OF_H} x = Add(t, b) o = Neg(t)", "t is also read by Neg"),
    "a linear that is not scaled": (
        "x = LayerNormalization(h, w) [other] o = MatMul(x, wk)", "also read by MatMul other"),
    "a body": (
        "x = LayerNormalization(h, w) o = If(yes) <then_branch = t () => (float[16, 16] a) "
        "{ a = Neg(x) }, else_branch = e () => (float[16, 16] c) { c = Identity(x) }>",
        "x is also read by Neg"),
    "a norm over all axes": (
        "x = LayerNormalization<axis = 0>(h, wk) o = Neg(h)", "is not over the last axis alone"),
    "a computed weight": (
        "x = LayerNormalization(h, v) o = Neg(h)", "a weight of LayerNormalization"),
    "a residual": (
        "[up] u = MatMul(h, wk) x = Add(u, h) o = Neg(h)",
        "Add Add_x does not join a computed value and a constant"),
    "a gate": ("[up] u = MatMul(h, wk) x = Sigmoid(u) o = Neg(h)", "Sigmoid Sigmoid_x is not hom"),
    "SiLU": ("[up] u = MatMul(h, wk) s = Sigmoid(u) x = Mul(u, s) o = Neg(h)",
             "u is also read by Sigmoid"),
    "a square": ("[up] u = MatMul(h, wk) x = Mul(u, u) o = Neg(h)", "u is also read by Mul"),
    "both halves": (
        "[up] u = MatMul(h, wb) l, r = Split<axis = 1, num_outputs = 2>(u) x = Add(l, w)"
        "o = Mul(u, wb1)", "u is also read by Mul"),
    "overlapping slices": (
        "[up] u = MatMul(h, wb) x = Slice(u, zero, sixteen, one) o = Slice(u, one, more, one)",
        "u is also read by Slice"),
    "an input": ("x = Identity(h) o = Identity(wk)", "h is no result of a node"),
    "a computed bias": ("[up] x = Gemm(h, wk, v) o = Neg(h)", "the bias of Gemm up"),
    "a computed weight of a linear": (
        "c = Mul(wk, v) [up] x = MatMul(h, c) o = Neg(h)", "MatMul up has no constant weight"),
    "rows become columns": (
        "[up] u = MatMul(h, wk) x = Transpose(u) o = Neg(h)", "are not the output rows of MatMul"),
    "a summed axis": (
        "[up] u = MatMul(h, wk) t = Transpose(u) p = Softmax(h) x = MatMul(p, t) o = Neg(h)",
        "are not the output rows of MatMul"),
    "columns of a product": (
        "[up] u = MatMul(h, wk) p = Softmax(h) t = MatMul(p, u) x = Transpose(t) o = Neg(h)",
        "has channels along its rows"),
    "rows cut elsewhere": (
        "[up] u = MatMul(h, wk) r = Reshape(u, longer) x = Reshape(r, flat) o = Neg(h)",
        "Reshape Reshape_x mixes channels"),
    "a computed choice": (
        "[up] u = MatMul(h, wk) i = ArgMax<axis = 0>(h) j = Squeeze(i, zero)"
        "x = Gather<axis = 1>(u, j) o = Neg(h)", "Gather Gather_x has no constant list"),
    "an unknown shape": (
        "[up] u = com.microsoft.FusedMatMul(h, wk) x = Div(u, w) o = Neg(h)",
        "the shape of u is not known"),
    "an unknown shape, reshaped": (
        "[up] u = com.microsoft.FusedMatMul(h, wk) x = Reshape(u, flat) o = Neg(h)",
        "the shapes around Reshape"),
    "Softmax": ("[up] u = MatMul(h, wk) x = Softmax(u) o = Neg(h)", "Softmax_x is not homogen"),
    "integers": (
        "[up] u = MatMul(h, wk) c = Cast<to = 7>(u) x = Cast<to = 1>(c) o = Neg(h)",
        "is not to a float type"),
    "dropout in training": (
        "[up] u = MatMul(h, wk) x = Dropout(u, none, yes) o = Neg(h)", "may be in training"),
    "GELU": (
        "[up] u = MatMul(h, wk) e = Erf(u) f = Add(e, w) g = Mul(f, half) x = Mul(u, g) o = Neg(h)",
        "is not homogeneous"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_mul_where_nothing_folds(bench: Any, rng: np.random.Generator, case: str) -> None:
    body, reason = REFUSED[case]
    x = ", float[16, 16] x" if case == "an output" else ""
    o = "32" if case == "both halves" else "16"
    graph = bench.build(
        f"""{HEADER} g (float[16, 16] h, float[16] v, bool yes) =>
            (float[16, 8] y, float[16, {o}] o{x}) {{ {body} [down] y = MatMul(x, wd) }}""",
        **weights(rng, w=(K,), wk=(K, K), b=(K,), wb=(K, 2 * K), wb1=(2 * K,), wd=(K, 8)),
        **{**SMALL, "one": np.array([1])}, zero=np.array([0]), sixteen=np.array([16]),
        more=np.array([17]), none=np.float32(0), longer=np.array([8, 32]),
    )  # fmt: skip
    fold = check(bench, graph, "down")
    assert fold.kind == "mul"
    assert fold.producer is None
    assert reason in fold.detail
    work = graph.clone()
    applied(find(work, "down"), work)
    ops = bench.ops(work)
    assert ops["Mul"] == bench.ops(graph).get("Mul", 0) + 1


def test_a_transposed_activation_gets_a_mul_of_its_own(bench: Any, rng: Any) -> None:
    graph = bench.build(
        "g (float[16, 16] h) => (float[16, 8] y, float[16, 8] z) { x = LayerNormalization(h, w)"
        "[a] y = MatMul(x, wa) [b] z = Gemm<transA = 1>(x, wb) }",
        **weights(rng, w=(K,), wa=(K, 8), wb=(K, 8)),
    )
    fold = check(bench, graph, "a", "b")
    assert fold.kind == "mul"
    assert "Gemm b transposes what it reads" in fold.detail


def half_norm(bench: Any, weight: Any, body: str = "x = RMSNormalization(h, w)") -> Graph:
    return bench.build(
        f"{HEADER} g (float16[M, 16] h) => (float16[M, 8] y) {{ {body} [up] y = MatMul(x, wu) }}",
        w=np.full(K, weight, np.float16), wu=np.ones((K, 8), np.float16), one=np.float16(1),
        wk=np.full((K, K), weight, np.float16),
    )  # fmt: skip


HALF = {
    "overflow": (half := "x = RMSNormalization(h, w)", 3e4, 0.25, "w would need the value 120000"),
    "zero": (half, 1e-4, 1e4, "w would need the value 1.00017e-08, which float16 cannot hold"),
    "subnormal": (half, 1e-3, 1e3, "which float16 cannot hold"),
    "near one": (
        "f = Add(w, one) x = RMSNormalization(h, f)",
        0,
        1e3,
        "w would need the value 0.001",
    ),
    "rows": ("[first] x = MatMul(h, wk)", 1e-4, 1e4, "row 0 of wk / s cannot be held in float16"),
}


@pytest.mark.parametrize("case", HALF)
def test_what_a_type_cannot_hold_is_refused(bench: Any, case: str) -> None:
    body, weight, scale, reason = HALF[case]
    graph = half_norm(bench, weight, body)
    before = ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)
    fold = find(graph, "up")
    assert fold.kind != "mul"
    with pytest.raises(FoldRefused, match=reason):
        apply_fold(fold, np.full(K, scale, np.float32), graph, Rewriter(graph.model))
    after = ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)
    assert before == after
    instead = fold.inserted("it cannot be held")
    assert "it cannot be held" in applied(instead, graph, np.full(K, scale, np.float32))
    assert bench.ops(graph)["Mul"] == 1


def test_a_mul_that_its_type_cannot_hold_is_refused(bench: Any) -> None:
    graph = half_norm(bench, 1, "x = Sigmoid(h)")
    with pytest.raises(FoldRefused, match="1/s of x would need the value 1e-09"):
        applied(find(graph, "up"), graph, np.full(K, 1e9, np.float32))


def test_a_producer_that_has_changed_meanwhile(bench: Any, rng: np.random.Generator) -> None:
    graph = bench.build(
        "g (float[6, 12] h) => (float[6, 8] y) { [up] u = MatMul(h, wu) x = Relu(u)"
        "[down] y = MatMul(x, wd) }",
        **weights(rng, wu=(12, K), wd=(K, 8)),
    )
    fold, ones = find(graph, "down"), np.ones(K, np.float32)
    up = graph.sites()[0]
    rewriter = Rewriter(graph.model)
    computed = rewriter.node("Identity", [up.node.inputs[0]], name="other", shape=[12, K])
    rewriter.insert_before(up.node, [computed])
    up.node.replace_input_with(1, computed.outputs[0])
    with pytest.raises(GraphError, match="up has left the graph"):
        apply_fold(fold, ones, graph, rewriter)


@pytest.mark.parametrize("variant", ["default", "plain"])
def test_every_activation_of_the_tiny_model(bench: Any, tmp_path: Path, variant: str) -> None:
    """All folds at once, found before the first is applied, on both of torch's exports."""
    graph = capture(tiny.build(tmp_path, "float32", variant))
    feeds = {"input_ids": tiny.batches("eval", 24, 2)}
    runtime = registry.load("target", "ort-cpu")
    wanted = runtime.open(tmp_path / "tiny.onnx", reference=True).run(feeds)
    work = graph.clone()
    known = work.sites()
    folds = [find_fold(group[0].activation, group, work, known) for group in groups(work)]
    kinds = [fold.kind for fold in folds]
    assert kinds == ["norm", "linear"] * 8 + ["norm"]
    assert [len(set(fold.ties)) for fold in folds[:4]] == [256, 128, 256, 640]
    for seed, fold in enumerate(folds):
        applied(fold, work, scale_of(fold, seed))
    assert bench.ops(work)["Mul"] == bench.ops(graph)["Mul"]
    work.save(tmp_path / "folded.onnx")
    bench.close(runtime.open(tmp_path / "folded.onnx", reference=True).run(feeds), wanted, 1e-5)
