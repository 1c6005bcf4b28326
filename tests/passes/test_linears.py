"""Every shape of linear that exporters write: quantized, fused, numbers and names kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linears import K, N, X, Y, weight

from qgraph.formats.base import parse


def linear_only(bench: Any, rng: Any, body: str, count: int = 1, **constants: Any) -> Any:
    """A graph from x to y: all linears fused, nothing else left, numbers as rounded."""
    graph = bench.build(f"g ({X}) => ({Y}) {{ {body} }}", **constants)
    outcome = bench.rewrite(graph)
    assert outcome.ops.get("MatMulNBits") == count
    bench.check_numbers(outcome)
    return outcome


@pytest.mark.parametrize("fmt", ["int4", "uint4", "int8", "uint8", "int4:scale=signed"])
@pytest.mark.parametrize("group", [16, 32, 0])
@pytest.mark.parametrize("k", [16, 48, 40, 112])
def test_matmul(bench: Any, rng: Any, fmt: str, group: int, k: int) -> None:
    """Groups that divide K and that do not, odd numbers of groups, whole rows."""
    graph = bench.build(f"g (float[M, {k}] x) => ({Y}) {{ y = MatMul(x, w) }}", w=weight(rng, k, N))
    level = "4" if "8" in fmt else "0"
    outcome = bench.rewrite(graph, format=fmt, group=group, accuracy_level=level)
    assert outcome.ops == {"MatMulNBits": 1}
    assert bench.ops(outcome.dequantized) == {outcome.function: 1, "Transpose": 1, "MatMul": 1}
    node = outcome.lowered.model.graph[-1]
    assert (node.name, node.outputs[0].name) == ("MatMul_y", "y")
    bench.check_numbers(outcome, 0.03 if level == "4" else 1e-5)


@pytest.mark.parametrize(
    ("body", "shapes", "ops"),
    [
        ("y = Gemm(x, w)", [(K, N)], {}),
        ("y = Gemm<transB = 1>(x, w)", [(N, K)], {}),
        ("y = Gemm<transB = 1>(x, w, b)", [(N, K), (N,)], {}),
        ("y = Gemm<alpha = 0.5>(x, w, b)", [(K, N), (N,)], {}),
        ("y = Gemm<beta = 3.0>(x, w, b)", [(K, N), (N,)], {}),
        ("y = Gemm<beta = 0.25>(x, w, b)", [(K, N), (1, N)], {}),
        ("y = Gemm(x, w, b)", [(K, N), (1, N)], {}),
        ("y = Gemm(x, w, b)", [(K, N), (1,)], {}),
        ("y = Gemm(x, w, b)", [(K, N), ()], {}),
        ("y = Gemm<beta = 2.0>(x, w, b)", [(K, N), ()], {}),
        ("y = Gemm(x, w, b)", [(K, N), (3, N)], {"Add": 1}),
        ("y = Gemm<beta = 2.0>(x, w, b)", [(K, N), (3, N)], {"Add": 1}),
        ("y = Gemm(x, w, b)", [(K, N), (3, 1)], {"Add": 1}),
        ("c = Exp(b) y = Gemm(x, w, c)", [(K, N), (N,)], {"Exp": 1, "Add": 1}),
        ("y = com.microsoft.FusedMatMul(x, w)", [(K, N)], {}),
        ("y = com.microsoft.FusedMatMul<transB = 1, alpha = 0.125>(x, w)", [(N, K)], {}),
    ],
)
def test_gemm(bench: Any, rng: Any, body: str, shapes: Any, ops: dict[str, int]) -> None:
    constants = dict(zip("wb", (weight(rng, *shape) for shape in shapes), strict=False))
    outcome = linear_only(bench, rng, body, **constants)
    assert outcome.ops == {"MatMulNBits": 1, **ops}
    name = next(n.name for n in outcome.source.model.graph if n.op_type in ("Gemm", "FusedMatMul"))
    assert outcome.node(name).op_type == "MatMulNBits"


def test_gemm_with_transposed_activation(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (float[{K}, M] x) => ({Y}) {{ y = Gemm<transA = 1>(x, w, b) }}",
        w=weight(rng, K, N), b=weight(rng, N),
    )  # fmt: skip
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"Transpose": 1, "MatMulNBits": 1}
    assert outcome.node("Gemm_y").op_type == "MatMulNBits"
    bench.check_numbers(outcome)


def test_computed_bias_times_beta_is_refused(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g ({X}) => ({Y}) {{ c = Exp(b) y = Gemm<beta = 2.0>(x, w, c) }}",
        w=weight(rng, K, N), b=weight(rng, N),
    )  # fmt: skip
    outcome = bench.rewrite(graph)
    assert (outcome.step("Gemm_y").outcome, outcome.step("Gemm_y").reason) == (
        "refused", "GEMM_ALPHA_BETA",
    )  # fmt: skip


CHAINS = [
    ("t = Transpose<perm = [1, 0]>(w)", (N, K)),
    ("t = Transpose(w)", (N, K)),
    ("i = Identity(w) j = Identity(i) t = Transpose(j)", (N, K)),
    ("s = Constant<value_ints = [40, 24]>() t = Reshape(w, s)", (K * N,)),
    ("s = Constant<value_ints = [0, -1]>() t = Reshape(w, s)", (K, 4, 6)),
    ("a = Constant<value_ints = [0]>() t = Squeeze(w, a)", (1, K, N)),
    ("t = Squeeze(w)", (1, K, N, 1)),
    (
        "s = Constant<value_ints = [40, 24]>() r = Reshape(w, s) i = Identity(r) t = Identity(i)",
        (1, K, N),
    ),
    (
        "b = Constant<value_ints = [24]>() e = Constant<value_ints = [48]>() "
        "a = Constant<value_ints = [1]>() t = Slice(w, b, e, a)",
        (K, 3 * N),
    ),
    (
        "b = Constant<value_ints = [-1]>() e = Constant<value_ints = [-1000]>() "
        "a = Constant<value_ints = [0]>() s = Constant<value_ints = [-1]>() "
        "t = Slice(w, b, e, a, s)",
        (K, N),
    ),
    ("i = Constant<value_int = 2>() t = Gather<axis = 0>(w, i)", (3, K, N)),
    ("t = Flatten<axis = 1>(w)", (K, 4, 6)),
]


@pytest.mark.parametrize(("chain", "shape"), CHAINS)
def test_chains(bench: Any, rng: Any, chain: str, shape: tuple[int, ...]) -> None:
    outcome = linear_only(bench, rng, f"{chain} y = MatMul(x, t)", w=weight(rng, *shape))
    assert outcome.ops == {"MatMulNBits": 1}
    assert not any(name == "w" for name in outcome.lowered.model.graph.initializers)


def test_split_is_three_sites_of_one_constant(bench: Any, rng: Any) -> None:
    body = """a, b, c = Split<axis = 1, num_outputs = 3>(w)
        p = MatMul(x, a) q = MatMul(x, b) r = MatMul(x, c)
        s = Add(p, q) y = Sub(s, r)"""
    outcome = linear_only(bench, rng, body, 3, w=weight(rng, K, 3 * N))
    assert outcome.ops == {"MatMulNBits": 3, "Add": 1, "Sub": 1}
    assert "w" not in outcome.lowered.model.graph.initializers


def test_unsqueeze_of_a_vector_is_rank_1(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (float[M, {K * N}] x) => (float[M] y) {{ y = MatMul(x, w) }}", w=weight(rng, K * N)
    )
    outcome = bench.rewrite(graph)
    assert (outcome.step("MatMul_y").outcome, outcome.step("MatMul_y").reason) == (
        "refused",
        "WEIGHT_RANK",
    )
    assert outcome.ops == {"MatMul": 1}


@pytest.mark.parametrize(
    "cast", ["c = Cast<to = 1>(w)", "d = Cast<to = 16>(w) c = Cast<to = 1>(d)"]
)
def test_casts(bench: Any, rng: Any, cast: str) -> None:
    graph = bench.build(
        f"g ({X}) => ({Y}) {{ {cast} y = MatMul(x, c) }}", w=weight(rng, K, N, dtype=np.float16)
    )
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"MatMulNBits": 1}
    assert outcome.lowered.model.graph[-1].inputs[2].dtype.name == "FLOAT"
    feeds = bench.feeds_of(graph)
    # The reference rounds through the casts once more; the scales of the site are float32.
    wanted = bench.run(outcome.dequantized, feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)


@pytest.mark.parametrize(
    ("dims", "out", "extra"),
    [("2, 3", "2, 3", {}), ("3", "1, 3", {"Unsqueeze": 1}), ("", "1", {"Unsqueeze": 1})],
)
def test_leading_axis_of_the_weight(bench: Any, rng: Any, dims: str, out: str, extra: Any) -> None:
    lead = f"{dims}, " if dims else ""
    graph = bench.build(
        f"g (float[{lead}{K}] x) => (float[{out}, {N}] y) {{ y = MatMul(x, w) }}",
        w=weight(rng, 1, K, N),
    )
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"MatMulNBits": 1, **extra}
    bench.check_numbers(outcome)


def test_leading_axis_and_unknown_rank(bench: Any, rng: Any) -> None:
    """The rank of the result depends on the activation's, which nobody knows here."""
    graph = bench.build(
        f"g (int64[R] s, float[6, {K}] x) => (float y) {{ r = Reshape(x, s) y = MatMul(r, w) }}",
        w=weight(rng, 1, K, N),
    )
    outcome = bench.rewrite(graph)
    step = outcome.step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", "WEIGHT_RANK")


@pytest.mark.parametrize("dims", ["", "M", "B, T", "B, T, M"])
def test_rank_of_the_activation(bench: Any, rng: Any, dims: str) -> None:
    lead = f"{dims}, " if dims else ""
    graph = bench.build(
        f"g (float[{lead}{K}] x) => (float[{lead}{N}] y) {{ y = MatMul(x, w) }}",
        w=weight(rng, K, N),
    )
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"MatMulNBits": 1}
    bench.check_numbers(outcome)


def test_unknown_rank_of_the_activation(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"""g (int64[2] s, float[6, {K}] x) => (float[A, B] y) {{
            r = Reshape(x, s) y = MatMul(r, w)
        }}""",
        w=weight(rng, K, N),
    )
    assert bench.rewrite(graph).ops == {"Reshape": 1, "MatMulNBits": 1}


def test_one_weight_three_readers(bench: Any, rng: Any) -> None:
    """One packed copy, whatever the spelling."""
    body = """t = Transpose(w) a = MatMul(x, t)
        u = Transpose(w) b = MatMul(x, u)
        c = Gemm<transB = 1>(x, w)
        s = Add(a, b) y = Sub(s, c)"""
    outcome = linear_only(bench, rng, body, 3, w=weight(rng, N, K))
    assert sorted(outcome.lowered.model.graph.initializers) == ["w.codes", "w.scales"]
    assert [d.shared_with for d in outcome.plan.decisions] == [None, "MatMul_a", "MatMul_a"]
    assert outcome.step("MatMul_b").outcome == "done"


def test_chains_in_front_of_everything(bench: Any, rng: Any) -> None:
    """Exporters put all Transposes first; the passes insert in front of what is left."""
    body = "t = Transpose(v) u = Transpose(w) a = MatMul(x, t) y = MatMul(a, u)"
    linear_only(bench, rng, body, 2, v=weight(rng, 32, K), w=weight(rng, N, 32))


def test_half_converted_is_told(bench: Any, rng: Any) -> None:
    body = "a = MatMul(x, w) n = Neg(x) b = MatMul(n, w) y = Sub(a, b)"
    graph = bench.build(f"g ({X}) => ({Y}) {{ {body} }}", w=weight(rng, K, N))
    outcome = bench.rewrite(graph, exclude=("MatMul_b",))
    assert outcome.ops == {"MatMulNBits": 1, "MatMul": 1, "Neg": 1, "Sub": 1}
    assert [d.reason for d in outcome.plan.decisions] == ["HALF_CONVERTED", "EXCLUDED"]
    assert outcome.plan.decisions[0].detail.startswith("MatMul_b reads the float weight")
    kept = outcome.lowered.model.graph.initializers["w"].const_value
    assert kept is graph.model.graph.initializers["w"].const_value
    feeds = bench.feeds_of(graph)
    source = graph.sites()[0].weight
    fmt = parse(outcome.plan.decisions[0].format)
    rounded = fmt.dequantize(fmt.quantize(source.rows(0, N), ir.DataType.FLOAT))
    wanted = feeds["x"] @ rounded.T + feeds["x"] @ source.rows(0, N).T
    bench.close(bench.run(outcome.lowered, feeds), {"y": wanted}, 1e-5)


def test_weight_that_another_op_reads(bench: Any, rng: Any) -> None:
    body = "a = MatMul(x, w) m = ReduceMax<keepdims = 0>(w) y = Add(a, m)"
    graph = bench.build(f"g ({X}) => ({Y}) {{ {body} }}", w=weight(rng, K, N))
    outcome = bench.rewrite(graph)
    assert outcome.plan.decisions[0].reason == "HALF_CONVERTED"
    assert "ReduceMax" in outcome.plan.decisions[0].detail
    assert outcome.ops == {"MatMulNBits": 1, "ReduceMax": 1, "Add": 1}


def test_transposed_weight_that_is_an_output_is_told(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g ({X}) => ({Y}, float[{K}, {N}] t) {{ t = Transpose(w) y = MatMul(x, t) }}",
        w=weight(rng, N, K),
    )
    outcome = bench.rewrite(graph)
    assert outcome.plan.decisions[0].reason == "HALF_CONVERTED"
    assert outcome.plan.decisions[0].detail.startswith("output t reads the float weight")
    assert outcome.ops == {"MatMulNBits": 1, "Transpose": 1}


def test_float16(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (float16[M, {K}] x) => (float16[M, {N}] y) {{ y = Gemm(x, w, b) }}",
        w=weight(rng, K, N, dtype=np.float16), b=weight(rng, N, dtype=np.float16),
    )  # fmt: skip
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"MatMulNBits": 1}
    node = outcome.lowered.model.graph[-1]
    assert {node.inputs[2].dtype.name, node.inputs[5].dtype.name} == {"FLOAT16"}
    bench.check_numbers(outcome, 2e-3)


BRANCHES = f"""g (bool c, {X}) => ({Y}) {{
    y = If (c) <
        then_branch = a () => (float[M, {N}] p) {{ p = MatMul(x, w) }},
        else_branch = b () => (float[M, {N}] q) {{ INNER t = Transpose(v) q = MatMul(x, t) }}>
}}"""


def test_branches_with_outer_weights(bench: Any, rng: Any) -> None:
    graph = bench.build(BRANCHES.replace("INNER", ""), w=weight(rng, K, N), v=weight(rng, N, K))
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"If": 1, "MatMulNBits": 2}
    assert bench.ops(outcome.dequantized)["DequantizeInt4V1"] == 2
    for c in (True, False):
        feeds = {**bench.feeds_of(graph), "c": np.array(c)}
        wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
        bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, 1e-5)
        bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)


def test_branch_with_a_weight_of_its_own(bench: Any, rng: Any) -> None:
    """Capture lifts it; the packed copy lies in the main graph."""
    numbers = ", ".join(f"{number:.3f}" for number in rng.standard_normal(N * K))
    inner = f"v = Constant<value = float[{N}, {K}] {{{numbers}}}>()"
    graph = bench.build(BRANCHES.replace("INNER", inner), w=weight(rng, K, N))
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"If": 1, "MatMulNBits": 2}
    feeds = {**bench.feeds_of(graph), "c": np.array(False)}
    wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)


def test_loop_and_scan(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"""g (int64 n, bool c, float[M, {K}] x, float[2, M, {K}] s)
            => (float[M, {K}] y, float[2, M, {K}] z) {{
            y = Loop (n, c, x) <body = a (int64 i, bool go, float[M, {K}] h)
                                    => (bool on, float[M, {K}] r) {{
                on = Identity(go)
                u = MatMul(h, w)
                r = Tanh(u)
            }}>
            z = Scan <num_scan_inputs = 1, body = b (float[M, {K}] e) => (float[M, {K}] f) {{
                f = MatMul(e, w)
            }}> (s)
        }}""",
        w=weight(rng, K, K),
    )
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"Loop": 1, "Identity": 1, "MatMulNBits": 2, "Tanh": 1, "Scan": 1}
    assert sorted(outcome.lowered.model.graph.initializers) == ["w.codes", "w.scales"]
    feeds = {**bench.feeds_of(graph), "n": np.array(3), "c": np.array(True)}
    wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)


def test_new_names_never_collide(bench: Any, rng: Any) -> None:
    """The model uses every name that the passes would give."""
    body = "w_codes = Neg(x) w_scales = Neg(w_codes) y = MatMul(w_scales, w)"
    graph = bench.build(f"g ({X}) => ({Y}) {{ {body} }}", w=weight(rng, K, N))
    values = graph.model.graph
    values[0].outputs[0].name, values[1].outputs[0].name = "w.codes", "w.scales"
    values[0].name, values[1].name = "MatMul_y/fused", "w/dequantize"
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"Neg": 2, "MatMulNBits": 1}
    assert sorted(outcome.lowered.model.graph.initializers) == ["w.codes_1", "w.scales_1"]
    bench.check_numbers(outcome)


def test_names_in_the_middle_are_kept(bench: Any, rng: Any) -> None:
    body = "[up] a = MatMul(x, w) [act] b = Relu(a) [down] y = MatMul(b, v)"
    graph = bench.build(
        f"g ({X}) => ({Y}) {{ {body} }}", w=weight(rng, K, 64), v=weight(rng, 64, N)
    )
    outcome = bench.rewrite(graph)
    found = [(n.name, n.op_type, n.outputs[0].name) for n in outcome.lowered.model.graph]
    assert found == [("up", "MatMulNBits", "a"), ("act", "Relu", "b"), ("down", "MatMulNBits", "y")]
    shapes = [n.outputs[0].shape for n in outcome.lowered.model.graph]
    assert shapes == [n.outputs[0].shape for n in graph.model.graph]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_matmul(bench: Any, data: Any) -> None:
    """Whatever the size, group, bits and symmetry: the fused op multiplies by what was rounded."""
    k, n = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 40))
    fmt = data.draw(st.sampled_from(["int4", "uint4"]))
    group = data.draw(st.sampled_from([16, 32, 64, 128, 256, 0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    array = (weight(rng, k, n) * 10.0 ** rng.integers(-3, 3, n)).astype(np.float32)
    graph = bench.build(f"g (float[M, {k}] x) => (float[M, {n}] y) {{ y = MatMul(x, w) }}", w=array)
    outcome = bench.rewrite(graph, format=fmt, group=group, min_elements=1)
    assert outcome.ops == {"MatMulNBits": 1}
    bench.check_numbers(outcome, 2e-5)


@pytest.mark.parametrize("opset", [11, 12])
def test_old_opsets(bench: Any, rng: Any, opset: int) -> None:
    """The fused op needs no opset; what stands around it is spelled as the model's opset has it."""
    graph = bench.build(
        f'<ir_version: 6, opset_import: ["" : {opset}]>\n'
        f"g (float[3, {K}] x) => (float[1, 3, {N}] y) {{ y = MatMul(x, w) }}",
        w=weight(rng, 1, K, N),
    )
    outcome = bench.rewrite(graph)
    assert outcome.ops == {"MatMulNBits": 1, "Unsqueeze": 1}
    feeds = bench.feeds_of(graph)
    wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)


@pytest.mark.parametrize("option", ["transA = 1", "transBatchA = 1"])
def test_fused_matmul_that_transposes_its_activation(bench: Any, rng: Any, option: str) -> None:
    graph = bench.build(
        f"g (float[{K}, M, {K}] x) => (float[A, B, {N}] y) "
        f"{{ y = com.microsoft.FusedMatMul<{option}>(x, w) }}",
        w=weight(rng, K, N),
    )
    outcome = bench.rewrite(graph)
    step = outcome.step("FusedMatMul_y")
    assert (step.outcome, step.reason) == ("refused", "WEIGHT_VIEW")
    assert step.detail == "FusedMatMul transposes its activation"
