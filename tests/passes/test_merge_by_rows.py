"""Queries, keys and values in one integer product, and in both bodies of an If by rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from queries_keys_values import BIASED, PLAIN, TEXT

import qgraph
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.purposes import FROM_ROWS
from qgraph.row_branches import MANY
from qgraph.runtimes.ort import CPU
from qgraph.scopes import nodes

K = 64
SHAPES = {"wq": (K, 64), "wk": (K, 32), "wv": (K, 32), "bq": (64,), "bk": (32,), "bv": (32,)}
BOTH_SIDES = [(1, 1), (3, 2), (1, FROM_ROWS), (3, FROM_ROWS)]
PRODUCTS = ("MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))


def attention(
    bench: Any, rng: Any, linears: str = PLAIN, *, dtype: str = "float", more: str = ""
) -> Any:
    kind = np.float16 if dtype == "float16" else np.float32
    floats = {n: (rng.standard_normal(s) / 8).astype(kind) for n, s in SHAPES.items()}
    given = {name: array for name, array in floats.items() if f"{name})" in linears}
    numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    text = TEXT.format(linears=linears, dtype=dtype, more=more)
    return bench.build(text, **given, **numbers)


def optimized(graph: Any, purpose: str, path: Path | None = None, **options: Any) -> Any:
    asked = {"format": "int4:group=32", "min_elements": 1, "check": path is not None, **options}
    return qgraph.optimize(graph, path, purpose=purpose, **asked)


def products(model: ir.Model) -> Counter[str]:
    found = Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph))
    return Counter({name: count for name, count in found.items() if name in PRODUCTS})


def merged(result: Any) -> list[str]:
    steps = [step for step in result.report.steps if step.rule == "merge_linears"]
    return [step.outcome if step.outcome == "done" else step.detail for step in steps]


def same(old: ir.Model, new: ir.Model, dtype: Any = np.float32) -> None:
    """Both give the same on both sides of the threshold: bit for bit, but biases of halves.

    A kernel that adds them itself rounds once.
    """
    first, second = CPU.open(old), CPU.open(new)
    for batch, rows in BOTH_SIDES:
        x = np.random.default_rng(rows).standard_normal((batch, rows, K)).astype(dtype)
        found, wanted = (session.run({"x": x}) for session in (second, first))
        for name, value in wanted.items():
            if dtype == np.float16 and rows < FROM_ROWS:
                np.testing.assert_allclose(found[name], value, rtol=0, atol=4e-3)
            else:
                np.testing.assert_array_equal(found[name], value)


CASES: dict[str, dict[str, Any]] = {
    "a scale a row": {},
    "a scale a row, biases": {"linears": BIASED},
    "one scale": {"activations": "int8"},
    "one scale, biases": {"linears": BIASED, "activations": "int8"},
    "a known scale": {"activations": "int8-static", "data": True},
    "a known scale, biases": {"linears": BIASED, "activations": "int8-static", "data": True},
    "float columns": {"linears": BIASED, "outliers": 2, "data": True},
    "float columns, one scale": {"activations": "int8", "outliers": 2, "data": True},
    "halves": {"linears": BIASED, "dtype": "float16"},
}


@pytest.mark.parametrize("purpose", ["prefill", "both"])
@pytest.mark.parametrize("case", CASES)
def test_integer_products_become_one_and_compute_the_same(
    bench: Any, rng: Any, case: str, purpose: str
) -> None:
    options = dict(CASES[case])
    linears, dtype = options.pop("linears", PLAIN), options.pop("dtype", "float")
    kind = np.float16 if dtype == "float16" else np.float32
    if options.pop("data", False):
        x = rng.standard_normal((1, 32, K)).astype(kind)
        x[..., 7] *= 50
        options["calibrate"] = [{"x": x}]
    graph = attention(bench, rng, linears, dtype=dtype)
    apart, one = (optimized(graph, purpose, fuse=fuse, **options) for fuse in (False, True))
    assert merged(one) == ["done"]
    before, after = products(apart.graph.model), products(one.graph.model)
    assert {name: 3 * count for name, count in after.items()} == before
    assert len(after) == (2 if purpose == "both" else 1)
    same(apart.graph.model, one.graph.model, kind)


@pytest.mark.parametrize("purpose", ["prefill", "both"])
def test_each_decision_says_how_its_activation_is_rounded_after_all(
    bench: Any, rng: Any, purpose: str
) -> None:
    """What calibration was to choose, it chose for the one that holds all three."""
    x = rng.standard_normal((1, 32, K)).astype(np.float32)
    made = optimized(attention(bench, rng), purpose, calibrate=[{"x": x}])
    assert merged(made) == ["done"]
    for item in made.plan.decisions:
        runs = item.many or item
        assert runs.activations in ("int8-row", "int8-static")
        assert "auto" not in str(runs.kernel)


def test_the_bodies_give_one_value_in_place_of_three(bench: Any, rng: Any) -> None:
    model = optimized(attention(bench, rng), "both").graph.model
    (branch,) = [node for node in model.graph if node.op_type == "If"]
    (reader,) = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert list(reader.inputs[:3]) == [*branch.outputs, None, None]
    assert list(branch.outputs[0].shape or ())[-1] == 128
    for name, count in {"then_branch": 1, "else_branch": 8}.items():
        assert len(list(branch.attributes[name].as_graph())) == count
    assert not any(node.op_type in ("Split", "Concat") for node in model.graph)


def test_other_outputs_of_the_if_stay(bench: Any, rng: Any) -> None:
    """`a` and `e` leave it too: one is the graph's, one another linear's."""
    linears = "a = MatMul(x, wa) r = Relu(a) q = MatMul(r, wq) k = MatMul(r, wk) v = MatMul(r, wv)"
    more = ", float[B, S, 64] a"
    text = TEXT.format(linears=linears, dtype="float", more=more)
    floats = {
        n: (rng.standard_normal(SHAPES.get(n, (K, K))) / 8).astype(np.float32)
        for n in ("wa", "wq", "wk", "wv")
    }
    numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    graph = bench.build(text, **floats, **numbers)
    apart, one = (optimized(graph, "both", fuse=fuse) for fuse in (False, True))
    assert products(one.graph.model) == {"MatMulNBits": 2, "MatMulIntegerToFloat": 2}
    assert [value.name for value in one.graph.model.graph.outputs] == ["y", "a"]
    same(apart.graph.model, one.graph.model)


def test_a_file_tells_one_site_with_two_kernels(bench: Any, rng: Any, out: Path) -> None:
    graph = attention(bench, rng, BIASED)
    names = [site.name for site in graph.sites()]
    made = optimized(graph, "both", out)
    (site,) = qgraph.capture(out).sites()
    name = f"{names[0]}/qkv"
    assert (site.name, site.n, site.op, site.from_rows) == (name, 128, "MatMulNBits", FROM_ROWS)
    assert site.many is not None
    assert (site.many.name, site.many.op) == (name + MANY, "MatMulIntegerToFloat")
    explained = qgraph.explain(out)
    (row,) = explained.sites
    kernels = {item.many.kernel for item in made.plan.decisions}
    assert {row.many_kernel} == kernels == {"MatMulIntegerToFloat uint8 × int8 rows=dynamic"}
    assert row.error is not None
    assert 0 < row.error < 0.2
    assert row.weight == "wq + wk + wv"
    assert explained.totals["linears"] == explained.totals["linears_quantized"] == 1
    more = sum(item.many.packed_bytes for item in made.plan.decisions)
    assert row.detail.endswith(f"{more / 1e6:.2f} MB more")
    counts = {each.fusion: each.count for each in explained.fusions}
    assert counts == {"linear_bias": 3, "merge_linears": 1}
    again = qgraph.optimize(out, None, min_elements=1, check=False)
    assert {item.solver for item in again.plan.decisions} == {"kept"}
    same(made.graph.model, again.graph.model)


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "one weight only": ({"overrides": ["MatMul_c=int8:group=64"]}, "k is no output of rows/if"),
    "read elsewhere": ({"more": ", float[B, S, 32] k"}, "k is read elsewhere too"),
}


@pytest.mark.parametrize("case", LEFT)
def test_linears_that_differ_stay_apart_in_both_bodies(bench: Any, rng: Any, case: str) -> None:
    options, edge = LEFT[case]
    options = dict(options)
    graph = attention(bench, rng, BIASED, more=options.pop("more", ""))
    result = optimized(graph, "both", **options)
    assert edge in merged(result)[0]
    assert products(result.graph.model)["MatMulNBits"] == 3


def test_what_fails_its_proof_stays_as_it_was(
    bench: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second body's is wrong: the first one's goes too, and so does what read both."""
    from qgraph.passes import merge_by_rows as module

    real = module.merge

    def turned(builder: Any, linears: Any) -> ir.Value:
        order = linears if not linears[0].name.endswith(MANY) else linears[::-1]
        return real(builder, order)

    monkeypatch.setattr(module, "merge", turned)
    graph = attention(bench, rng)
    apart, kept = (optimized(graph, "both", fuse=fuse) for fuse in (False, True))
    assert "MatMulIntegerToFloat: " in merged(kept)[0]
    assert products(kept.graph.model) == products(apart.graph.model)
    left = [node for node in nodes(kept.graph.model.graph) if node.op_type in ("Split", "Concat")]
    assert not left
    assert not [name for name in kept.graph.model.graph.initializers if "qkv" in name]
    same(apart.graph.model, kept.graph.model)


def test_what_fails_the_check_of_its_kernel_is_taken_apart_in_both_bodies(
    bench: Any, rng: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgraph import check

    real = check.check_kernel

    def wrong(probe: Any, *rest: Any) -> Any:
        verdict = real(probe, *rest)
        bad = probe.key.n == 128 and probe.key.op.endswith("MatMulIntegerToFloat")
        return type(verdict)(2.0, "made to fail") if bad else verdict

    monkeypatch.setattr(check, "check_kernel", wrong)
    result = optimized(attention(bench, rng), "both", out)
    assert products(result.graph.model) == {"MatMulNBits": 3, "MatMulIntegerToFloat": 3}
    assert "failed a check when it was one with others" in merged(result)[0]
    assert all(item.many is not None for item in result.plan.decisions)


@pytest.mark.parametrize("purpose", ["prefill", "both"])
@pytest.mark.parametrize("activations", ["int8", "int8-row"])
def test_packed_files_are_merged_later(
    bench: Any, rng: Any, out: Path, purpose: str, activations: str
) -> None:
    optimized(attention(bench, rng, BIASED), purpose, out, fuse=False, activations=activations)
    again = qgraph.optimize(out, None, min_elements=1, check=False)
    assert merged(again) == ["done"]
    assert set(products(again.graph.model).values()) == {1}
    same(ir.load(out), again.graph.model)


@pytest.mark.parametrize("purpose", ["prefill", "both"])
def test_a_checkpoint_has_the_linears_and_biases_apart(
    bench: Any, rng: Any, tmp_path: Path, purpose: str
) -> None:
    graph, found = attention(bench, rng, BIASED), {}
    for name, fuse in (("one", True), ("apart", False)):
        path = tmp_path / f"{name}.onnx"
        optimized(graph, purpose, path, fuse=fuse)
        qgraph.export_checkpoint(path, tmp_path / name, layout="compressed-tensors")
        found[name] = open_checkpoint(tmp_path / name)
    one, apart = found["one"], found["apart"]
    assert set(one.entries) == set(apart.entries) == {f"w{each}.weight" for each in "qkv"}
    assert set(one.floats) == {f"w{each}.bias" for each in "qkv"}
    for name, entry in one.entries.items():
        ours, theirs = (each.rows(0, each.n) for each in (entry, apart.entries[name]))
        np.testing.assert_array_equal(ours.codes, theirs.codes)
