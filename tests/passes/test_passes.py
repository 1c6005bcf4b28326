"""What all passes have in common, and what cleanup removes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.capabilities import Capabilities
from qgraph.errors import InputError
from qgraph.kernel_choice import query_of
from qgraph.passes.base import Context, Pass
from qgraph.planning import make_plan
from qgraph.recipe import Recipe

TEXT = """g (int64[B, T] ids, float[1, 24] x) => (float[B, T, 40] y) {
    h = Gather(e, ids)
    a = MatMul(h, w)
    r = Relu(a)
    b = Gemm<transB = 1>(x, u)
    s = Mul(r, b)
    t = Transpose(e)
    c = MatMul(s, v)
    y = MatMul(c, t)
}"""


def model(bench: Any, rng: Any) -> Any:
    shapes = {"e": (40, 32), "w": (32, 48), "u": (48, 24), "v": (48, 32)}
    constants = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return bench.build(TEXT, **constants)


@pytest.mark.parametrize("name", registry.names("pass"))
def test_a_pass_is_a_frozen_dataclass_with_a_drawing(name: str) -> None:
    kind = registry.load("pass", name)
    assert issubclass(kind, Pass)
    assert kind.name == name
    assert kind.__module__ == f"qgraph.passes.{name}"
    assert kind.__dataclass_params__.frozen
    assert "before:" in (kind.__doc__ or "")
    assert "after:" in (kind.__doc__ or "")
    assert all(f.default is not dataclasses.MISSING for f in dataclasses.fields(kind))


@pytest.mark.parametrize("target", ["ort-cpu", "qdq", "portable"])
def test_every_target_computes_the_same(bench: Any, rng: Any, target: str) -> None:
    outcome = bench.rewrite(model(bench, rng), target, embedding="int4")
    assert not {"e", "w", "u", "v"} & outcome.lowered.model.graph.initializers.keys()
    bench.check_numbers(outcome)


@pytest.mark.parametrize("name", [n for n in registry.names("pass") if n != "quantize_rtn"])
def test_a_second_run_changes_nothing(bench: Any, rng: Any, name: str) -> None:
    """On a graph where nothing is left to do, a pass does nothing."""
    outcome = bench.rewrite(model(bench, rng), "qdq" if name == "lower_qdq" else "ort-cpu")
    graph = outcome.lowered.clone()
    registry.load("pass", name)().run(
        graph, Context(outcome.plan, Capabilities("ort-cpu", "", "", ()))
    )
    before = ir.to_proto(outcome.lowered.model).SerializeToString(deterministic=True)
    assert ir.to_proto(graph.model).SerializeToString(deterministic=True) == before


def test_passes_that_follow_no_plan_do_nothing(bench: Any, rng: Any) -> None:
    """A graph without sites goes through all passes unchanged."""
    graph = bench.build("g (float[M] x) => (float[M] y) { y = Relu(x) }")
    capabilities = registry.load("target", "ort-cpu").capabilities()
    context = Context(make_plan(graph.sites(), Recipe(), capabilities), capabilities)
    for name in registry.names("pass"):
        work = graph.clone()
        assert registry.load("pass", name)().run(work, context) == []
        assert bench.ops(work) == {"Relu": 1}


def test_kernel_that_failed_its_check_is_not_taken_again(bench: Any, rng: Any) -> None:
    """The next one is a smaller block with repeated scales, then level 0; then there is none."""
    graph = bench.build(
        "g (float[M, 64] x) => (float[M, 24] y) { y = MatMul(x, w) }",
        w=rng.standard_normal((64, 24)).astype(np.float32),
    )
    outcome = bench.rewrite(graph, group=32, accuracy_level="auto")
    tried = []
    for _ in range(9):
        work = outcome.dequantized.clone()
        context = Context(
            outcome.plan, registry.load("target", "ort-cpu").capabilities(), frozenset(tried)
        )
        (step,) = registry.load("pass", "lower_matmul_nbits")().run(work, context)
        if step.outcome == "refused":
            break
        node = work.model.graph[-1].attributes
        found = (node["accuracy_level"].as_int(), node["block_size"].as_int())
        bench.close(
            bench.run(work, bench.feeds_of(graph)),
            bench.run(outcome.dequantized, bench.feeds_of(graph), reference=True),
            1e-5 if found[0] == 0 else 0.03,
        )
        tried.append(query_of(work.sites()[0]))
    assert [(q.level, q.block) for q in tried] == [(4, 32), (4, 16), (0, 32), (0, 16)]
    assert step.reason == "KERNEL_FAILED_CHECK"


def test_cleanup_keeps_what_is_read(bench: Any, rng: Any) -> None:
    """Dead chains go, with their constants; outputs, and what bodies read, stay."""
    graph = bench.build(
        """g (bool c, float[4, 6] x) => (float[4, 6] y, float[6, 4] out) {
            dead = Exp(a)
            deader = Relu(dead)
            out = Transpose(k)
            y = If (c) <then_branch = t () => (float[4, 6] p) { p = Add(x, k) },
                        else_branch = e () => (float[4, 6] q) { u = Relu(m) q = Identity(x) }>
        }""",
        **{n: rng.standard_normal((4, 6)).astype(np.float32) for n in ("a", "k", "m")},
    )
    context = Context(make_plan([], Recipe(), Capabilities("ort-cpu", "", "", ())), None)
    assert registry.load("pass", "cleanup")().run(graph, context) == []
    graph.verify()
    assert bench.ops(graph) == {"Transpose": 1, "If": 1, "Add": 1, "Identity": 1}
    assert list(graph.model.graph.initializers) == ["k"]
    assert graph.model.opset_imports == {"": 21}


def test_scale_that_float16_cannot_hold_is_named(bench: Any, rng: Any) -> None:
    """Gemm's alpha takes the weight out of float16's range."""
    array = rng.standard_normal((64, 24)).astype(np.float16)
    array[3, 5] = 60000
    text = "g (float16[M, 64] x) => (float16[M, 24] y) { y = Gemm<alpha = 16.0>(x, big) }"
    outcome = bench.rewrite(bench.build(text, big=array))
    codes = outcome.lowered.model.graph.initializers["big.codes"].const_value
    with pytest.raises(InputError, match=r"weight big: row 5, group 0: .*--exclude 'big'"):
        codes.tobytes()


@pytest.mark.parametrize(
    ("target", "ops"),
    [
        ("ort-cpu", {"MatMulNBits": 3}),
        ("qdq", {"DequantizeLinear": 2, "MatMul": 3, "Transpose": 4}),
        ("portable", {"LinearInt4V1": 3}),
    ],
)
def test_every_target_in_bodies(bench: Any, rng: Any, target: str, ops: dict[str, int]) -> None:
    """Nodes in the bodies of If and Loop read packed weights of the main graph."""
    graph = bench.build(
        """g (int64 n, bool c, float[M, 40] x) => (float[M, 40] y) {
            z = MatMul(x, w)
            y = Loop (n, c, z) <body = a (int64 i, bool go, float[M, 40] h)
                                    => (bool on, float[M, 40] r) {
                on = Identity(go)
                u = If (go) <then_branch = t () => (float[M, 40] p) { p = MatMul(h, w) },
                             else_branch = e () => (float[M, 40] q) { q = MatMul(h, w) }>
                r = Tanh(u)
            }>
        }""",
        w=rng.standard_normal((40, 40)).astype(np.float32),
    )
    outcome = bench.rewrite(graph, target)
    assert outcome.ops == {"Loop": 1, "Identity": 1, "If": 1, "Tanh": 1, **ops}
    feeds = {**bench.feeds_of(graph), "n": np.array(3), "c": np.array(True)}
    wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, 1e-5)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5)
