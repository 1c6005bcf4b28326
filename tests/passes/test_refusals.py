"""What is left as it is, byte for byte, and why."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from linears import K, N, X, Y, weight

from qgraph.errors import InputError


@pytest.mark.parametrize("kind", ["bfloat16", "double"])
def test_types_without_a_kernel(bench: Any, kind: str) -> None:
    """Refused before anything is written, and told why."""
    graph = bench.build(
        f"g ({kind}[M, {K}] x) => ({kind}[M, {N}] y) {{ y = MatMul(x, w) }}",
        w=np.ones((K, N), ml_dtypes.bfloat16 if kind == "bfloat16" else np.float64),
    )
    outcome = bench.rewrite(graph)
    step = outcome.step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", "DTYPE_HAS_NO_KERNEL")
    assert outcome.ops == {"MatMul": 1}


@pytest.mark.parametrize(
    ("body", "shape", "code", "detail"),
    [
        (
            "r = ReduceSum<keepdims = 0>(x) s = Mul(w, r) y = MatMul(x, s)", (K, N),
            "WEIGHT_NOT_CONSTANT", "its weight is computed by Mul Mul_s",
        ),
        (
            "t = Transpose(x) z = MatMul(w, t) y = Transpose(z)", (N, K),
            "WEIGHT_ON_THE_LEFT", "weight w is operand A",
        ),
        (
            "a = Constant<value_ints = [40, 24]>() t = Transpose(w) r = Reshape(t, a) "
            "y = MatMul(x, r)",
            (20, 48), "WEIGHT_VIEW", "reshape of a transposed or sliced constant needs a copy",
        ),
        (
            "i = Constant<value_ints = [0, 2, 3]>() t = Gather<axis = 1>(w, i) e = MatMul(x, t) "
            "y = Concat<axis = 1>(e, e, e, e, e, e, e, e)",
            (K, N), "WEIGHT_VIEW", "Gather Gather_t picks rows in no regular order",
        ),
        (
            "a = Constant<value_ints = [0]>() e = MatMul(x, w) y = ReduceSum<keepdims = 0>(e, a)",
            (4, K, N), "WEIGHT_RANK", "weight w has shape [4, 40, 24]",
        ),
    ],
)  # fmt: skip
def test_refusals(
    bench: Any, rng: Any, body: str, shape: tuple[int, ...], code: str, detail: str
) -> None:
    """Each with its reason; the weight stays, byte for byte, and the graph as it was."""
    graph = bench.build(f"g ({X}) => ({Y}) {{ {body} }}", w=weight(rng, *shape))
    outcome = bench.rewrite(graph)
    (decision,) = outcome.plan.decisions
    step = outcome.step(decision.site)
    assert (step.outcome, step.reason, step.detail) == ("refused", code, detail)
    assert outcome.ops == bench.ops(graph)
    kept = outcome.lowered.model.graph.initializers["w"].const_value
    assert kept is graph.model.graph.initializers["w"].const_value


def test_folded_constant_is_computed(bench: Any, rng: Any) -> None:
    """Exp of a constant is constant for a runtime; for us it is a weight that is computed."""
    graph = bench.build(f"g ({X}) => ({Y}) {{ e = Exp(w) y = MatMul(x, e) }}", w=weight(rng, K, N))
    (decision,) = bench.rewrite(graph).plan.decisions
    assert (decision.reason, decision.detail) == (
        "WEIGHT_NOT_CONSTANT", "its weight is computed by Exp Exp_e",
    )  # fmt: skip


def test_weight_that_is_an_output(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g ({X}) => ({Y}, float[{K}, {N}] w) {{ y = MatMul(x, w) }}", w=weight(rng, K, N)
    )
    outcome = bench.rewrite(graph)
    step = outcome.step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", "GRAPH_OUTPUT")
    assert outcome.ops == {"MatMul": 1}


def test_attention_is_no_site(bench: Any, rng: Any) -> None:
    """A product of two activations is nothing that could be quantized."""
    graph = bench.build(
        f"""g ({X}) => (float[M, {N}] y) {{
            q = MatMul(x, a) k = MatMul(x, b) v = MatMul(x, c)
            t = Transpose<perm = [1, 0]>(k) s = MatMul(q, t) p = Softmax<axis = -1>(s)
            y = MatMul(p, v)
        }}""",
        a=weight(rng, K, N), b=weight(rng, K, N), c=weight(rng, K, N),
    )  # fmt: skip
    outcome = bench.rewrite(graph)
    assert [d.site for d in outcome.plan.decisions] == ["MatMul_q", "MatMul_k", "MatMul_v"]
    assert outcome.ops == {"MatMulNBits": 3, "Transpose": 1, "MatMul": 2, "Softmax": 1}
    bench.check_numbers(outcome)


def test_rotary_frequencies_are_no_linear(bench: Any, rng: Any) -> None:
    """inv_freq · positions is a MatMul with a small constant: listed, not counted."""
    graph = bench.build(
        f"""g (int64[M] pos, {X}) => ({Y}, float[32, M] f) {{
            p = Cast<to = 1>(pos)
            a = Constant<value_ints = [0]>()
            r = Unsqueeze(p, a)
            f = MatMul(w, r)
            y = MatMul(x, v)
        }}""",
        w=weight(rng, 32, 1), v=weight(rng, K, N),
    )  # fmt: skip
    outcome = bench.rewrite(graph)
    assert {d.site: d.reason for d in outcome.plan.decisions} == {
        "MatMul_f": "WEIGHT_TOO_SMALL", "MatMul_y": None,
    }  # fmt: skip
    assert outcome.plan.coverage.linears == 1
    assert outcome.ops["MatMul"] == 1


@pytest.mark.parametrize("elements", [0, 64])
def test_weight_without_elements(bench: Any, rng: Any, elements: int) -> None:
    graph = bench.build(
        f"g (float[M, 0] x) => (float[M, {N}] y) {{ y = MatMul(x, w) }}",
        w=np.zeros((0, N), np.float32),
    )
    outcome = bench.rewrite(graph, min_elements=elements)
    assert outcome.step("MatMul_y").reason == "WEIGHT_TOO_SMALL"
    assert outcome.ops == {"MatMul": 1}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weight_is_named(bench: Any, rng: Any, value: float) -> None:
    array = weight(rng, K, N)
    array[7, 3] = value
    graph = bench.build(f"g ({X}) => ({Y}) {{ y = MatMul(x, proj) }}", proj=array)
    outcome = bench.rewrite(graph)
    with pytest.raises(InputError, match=r"proj.*NON_FINITE_WEIGHT.*row 3, column 7.*--exclude"):
        outcome.lowered.model.graph.initializers["proj.codes"].const_value.tobytes()
