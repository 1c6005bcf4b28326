"""Folding 1/s through attention into the rows of V: heads, their groups, and caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from folding import HEADER, check, find, weights

from qgraph.errors import GraphError
from qgraph.passes.fold_scale import apply_fold, find_fold
from qgraph.rewrite import Rewriter

PROJECTIONS = "[q] q0 = MatMul(h, wq) [k] k0 = MatMul(h, wk) [v] v0 = MatMul(h, wv)"
SPLIT = """
    q1 = Reshape(q0, heads_q) q2 = Transpose<perm = [0, 2, 1, 3]>(q1)
    k1 = Reshape(k0, heads_v) k2 = Transpose<perm = [0, 2, 1, 3]>(k1)
    v1 = Reshape(v0, heads_v) v2 = Transpose<perm = [0, 2, 1, 3]>(v1)
"""
REPEAT = """
    s = Shape(v2) b = Slice(s, zero, two) l = Slice(s, two, four) t = Concat<axis = 0>(b, two, l)
    k3 = Unsqueeze(k2, two) k4 = Expand(k3, t) k5 = Reshape(k4, merged)
    v3 = Unsqueeze(v2, two) v4 = Expand(v3, t) v5 = Reshape(v4, merged)
"""
SOFTMAX = """
    k6 = Transpose<perm = [0, 1, 3, 2]>(k5) a = MatMul(q2, k6) p = Softmax(a) o0 = MatMul(p, v5)
"""
JOIN = "o1 = Transpose<perm = [0, 2, 1, 3]>(o0) x = Reshape(o1, back)"
SPELLED = SPLIT + REPEAT + SOFTMAX + JOIN
GQA = "x, pk, pv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>"
HEADS = {  # 4 heads of 8 share 2 of V
    "heads_q": np.array([0, 0, 4, 8]), "heads_v": np.array([0, 0, 2, 8]),
    "merged": np.array([0, 4, -1, 8]), "back": np.array([0, 0, 32]),
    "packed": np.array([0, 0, 3, 4, 8]), "parts": np.array([32, 16, 16]),
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "four": np.array([4]),
    "end": np.array([2**62]), "i0": np.array(0), "i1": np.array(1), "i2": np.array(2),
    "last": np.array([4, 4], np.int32), "total": np.array(5, np.int32),
}  # fmt: skip
GROUPED = np.arange(16).reshape(2, 8).repeat(2, axis=0).reshape(-1)
VALUES = {
    "spelled out": (PROJECTIONS + SPELLED, GROUPED),
    "bias of V": (
        PROJECTIONS.replace("v0 = MatMul(h, wv)", "v9 = MatMul(h, wv) v0 = Add(v9, bv)") + SPELLED,
        GROUPED,
    ),
    "bias behind": (
        PROJECTIONS + SPELLED.replace("x = Reshape(o1", "o2 = Add(o1, bo) x = Reshape(o2"),
        GROUPED,
    ),
    "Slice that takes all": (
        PROJECTIONS.replace("v0 = MatMul(h, wv)", "v9 = MatMul(h, wv) v0 = Slice(v9, zero, end)")
        + SPELLED,
        GROUPED,
    ),
    "Attention of rank 4": (
        f"{PROJECTIONS} {SPLIT} o0 = Attention<is_causal = 1>(q2, k2, v2) {JOIN}", GROUPED),
    "Attention of rank 4, repeated": (
        f"{PROJECTIONS} {SPLIT} {REPEAT} o0 = Attention(q2, k5, v5) {JOIN}", GROUPED),
    "Attention of rank 3": (
        f"{PROJECTIONS} x = Attention<q_num_heads = 4, kv_num_heads = 2>(q0, k0, v0)", GROUPED),
    "MultiHeadAttention": (
        "[q] q = MatMul(h, wq) [k] k = MatMul(h, wq2) [v] v = MatMul(h, wq3)"
        "x = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, bqkv)", np.arange(32)),
    "MultiHeadAttention without bias": (
        "[q] q = MatMul(h, wq) [k] k = MatMul(h, wq2) [v] v = MatMul(h, wq3)"
        "x = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v)", np.arange(32)),
    "GroupQueryAttention": (f"{PROJECTIONS} {GQA} (q0, k0, v0, , , last, total)", GROUPED),
    "GroupQueryAttention of QKV": (
        f"[v] qkv = MatMul(h, wqkv) {GQA} (qkv, , , , , last, total)", 48 + GROUPED),
    "Split of QKV": (
        f"[v] qkv = MatMul(h, wqkv) q0, k0, v0 = Split<axis = -1>(qkv, parts) {SPELLED}",
        48 + GROUPED,
    ),
    "Gather of QKV": (
        "[v] qkv = MatMul(h, wqkv3) r = Reshape(qkv, packed)"
        "t = Transpose<perm = [2, 0, 3, 1, 4]>(r) q2 = Gather<axis = 0>(t, i0)"
        f"k5 = Gather<axis = 0>(t, i1) v5 = Gather<axis = 0>(t, i2) {SOFTMAX} {JOIN}",
        64 + np.arange(32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sizes", ["2, 5", "B, T", "?, ?"])
@pytest.mark.parametrize("spelling", VALUES)
def test_values_of_attention(
    bench: Any, rng: np.random.Generator, spelling: str, sizes: str
) -> None:
    body, ties = VALUES[spelling]
    graph = bench.build(
        f"{HEADER} g (float[{sizes}, 12] h) => (float[{sizes}, 8] y) {{ {body}"
        "[o] y = MatMul(x, wo) }",
        **weights(
            rng, wq=(12, 32), wq2=(12, 32), wq3=(12, 32), wk=(12, 16), wv=(12, 16), wo=(32, 8),
            wqkv=(12, 64), wqkv3=(12, 96), bv=(16,), bo=(4, 1), bqkv=(96,),
        ), **HEADS,
    )  # fmt: skip
    feeds = {"h": rng.standard_normal((2, 5, 12)).astype(np.float32)}
    fold = check(bench, graph, "o", feeds=None if sizes == "2, 5" else feeds)
    assert fold.kind == "linear", fold.detail
    assert fold.site == "v"
    np.testing.assert_array_equal(fold.ties, ties)


CACHES = {
    "Concat with the past": (
        f"{PROJECTIONS} {SPLIT} present = Concat<axis = 2>(past, v2) o0 = Attention(q2, k2, v2)"
        f"{JOIN}", "v2 is also read by Concat"),
    "past of Attention": (
        f"{PROJECTIONS} {SPLIT} o0, pk, present = Attention(q2, k2, v2, , past, past) {JOIN}",
        "keeps V in a cache"),
    "present of Attention": (
        f"{PROJECTIONS} {SPLIT} o0, pk, present = Attention(q2, k2, v2, , past, past) {JOIN}",
        "keeps V in a cache"),
    "GroupQueryAttention": (
        f"{PROJECTIONS} x, pk, present = com.microsoft.GroupQueryAttention<num_heads = 4,"
        "kv_num_heads = 2>(q0, k0, v0, , , last, total)", "keeps V in a cache"),
    "the whole of V": (
        f"{PROJECTIONS} {SPLIT} present = Identity(v2) o0 = Attention(q2, k2, v2) {JOIN}",
        "v2 is also read by Identity"),
}  # fmt: skip


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_keeps_its_meaning(bench: Any, rng: np.random.Generator, case: str) -> None:
    body, reason = CACHES[case]
    graph = bench.build(
        f"""{HEADER} g (float[2, 5, 12] h, float[2, 2, 3, 8] past) =>
            (float[2, 5, 8] y, float[2, 2, P, 8] present) {{ {body} [o] y = MatMul(x, wo) }}""",
        **weights(rng, wq=(12, 32), wk=(12, 16), wv=(12, 16), wo=(32, 8)),
        **HEADS,
    )  # fmt: skip
    fold = check(bench, graph, "o")
    assert fold.kind == "mul"
    assert reason in fold.detail


def test_scales_that_are_not_as_wanted(bench: Any, rng: np.random.Generator) -> None:
    graph = bench.build(
        f"{HEADER} g (float[2, 5, 12] h) => (float[2, 5, 8] y) {{ {VALUES['spelled out'][0]}"
        "[o] y = MatMul(x, wo) }",
        **weights(rng, wq=(12, 32), wk=(12, 16), wv=(12, 16), wo=(32, 8)), **HEADS,
    )  # fmt: skip
    fold, rewriter = find(graph, "o"), Rewriter(graph.model)
    uneven = np.ones(32, np.float32)
    uneven[3] = 2
    with pytest.raises(GraphError, match="channel 3 of x has the scale 2, another one of row 3"):
        apply_fold(fold, uneven, graph, rewriter)
    for bad in (np.zeros(32, np.float32), np.full(32, np.nan, np.float32), uneven[:8]):
        with pytest.raises(GraphError, match="wanted 32 finite numbers above zero"):
            apply_fold(fold, bad, graph, rewriter)
    other = dataclasses.replace(fold.sites[0], node=graph.sites()[0].node)
    with pytest.raises(GraphError, match="that read the one value"):
        find_fold(fold.activation, [fold.sites[0], other], graph)
