"""Codes that a model brings: any window of them is what numpy shows, read block by block."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qdq import TYPES, K, N, codes_of, dq, scales_of, stored

from qgraph.adopted import adopt
from qgraph.pipeline import capture
from qgraph.qdq_weight import NoGrid, locate
from qgraph.sites import Refusal
from qgraph.view import View


def test_deviation_counts_any_changed_code(bench: Any, rng: Any) -> None:
    body = "w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)"
    graph = dq(bench, body, q=stored(codes_of(rng, "int8", (K, N))), s=scales_of(rng, (N,)))
    source = adopt(graph.sites()[0])
    assert not isinstance(source, Refusal)
    weight = source.block(8, 16)
    assert source.deviation(8, 16, weight).worst == 0
    weight.codes[3, 5] ^= 1
    assert source.deviation(8, 16, weight).worst == np.inf


@pytest.mark.parametrize("dtype", ["int4", "uint8"])
@pytest.mark.parametrize("axis", [0, 1])
def test_codes_in_a_file_are_read_a_block_at_a_time(
    bench: Any, rng: Any, tmp_path: Path, dtype: str, axis: int
) -> None:
    """A block of rows neither maps nor unpacks the whole weight for good."""
    k, n = 512, 4096
    shape, grid = ((k, n), (k // 32, n)) if axis == 0 else ((n, k), (n, k // 32))
    codes, scales = codes_of(rng, dtype, shape), scales_of(rng, grid)
    multiply = "MatMul(x, w)" if axis == 0 else "Gemm<transB = 1>(x, w)"
    body = f"w = DequantizeLinear<axis = {axis}, block_size = 32>(q, s) y = {multiply}"
    inputs = f"g (float[M, {k}] x) => (float[M, {n}] y)"
    graph = dq(bench, body, inputs, q=stored(codes), s=scales)
    path = tmp_path / "m.onnx"
    ir.save(graph.model, path, external_data="m.data", size_threshold_bytes=0)
    site = capture(path).sites()[0]
    source = adopt(site)
    assert not isinstance(source, Refusal)
    tracemalloc.start()
    block = source.block(1024, 1032)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < codes.size // 8
    rows = codes.T if axis == 0 else codes
    wanted = rows[1024:1032].astype(np.int8)
    assert np.array_equal(block.codes.view(np.int8), wanted)
    grid_rows = scales.T if axis == 0 else scales
    assert np.array_equal(block.scales, grid_rows[1024:1032])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_window_reads_what_numpy_shows(data: Any) -> None:
    """Against ONNX's own dequantization of the whole tensor, then the view."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from(sorted(TYPES)))
    dims = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    axis = data.draw(st.integers(0, len(dims) - 1))
    block = data.draw(st.sampled_from([0, 2, 3, 4]))
    grid = list(dims)
    grid[axis] = -(-dims[axis] // (block or 1))
    shape = tuple(grid) if block else (dims[axis],)
    codes, scales = codes_of(rng, dtype, dims), scales_of(rng, shape)
    zeros = codes_of(rng, dtype, shape)
    broadcast = (
        (lambda a: np.repeat(a, block, axis).take(range(dims[axis]), axis))
        if block
        else (lambda a: a.reshape([-1 if i == axis else 1 for i in range(len(dims))]))
    )
    wide = (codes.astype(np.float32) - broadcast(zeros.astype(np.float32))) * broadcast(scales)
    perm = tuple(data.draw(st.permutations(range(len(dims)))))
    view = View().then("transpose", perm)
    if len(dims) == 3:
        view = view.then("index", 0, data.draw(st.integers(0, dims[perm[0]] - 1)))
    start = data.draw(st.integers(0, view.shape_of(wide).shape[1] - 1))
    view = view.then("slice", 1, start, 1 << 30, 1)
    tensors = [ir.serde.deserialize_tensor(stored(each)) for each in (codes, scales, zeros)]
    try:
        weight = locate(*tensors, axis, block, view)
        span = weight.span
    except NoGrid:
        shown = view.shape_of(np.broadcast_to(broadcast(scales), dims).copy())
        assert (shown[:, 1:] != shown[:, :-1]).any(), "these scales make a grid"
        return
    first = data.draw(st.integers(0, weight.n - 1))
    found = weight.read_codes(first, weight.n).astype(np.float32)
    steps = weight.read_scales(first, weight.n, span)
    middle = weight.read_zeros(first, weight.n, span)
    assert middle is not None
    spread = np.arange(weight.k) // span if span else np.zeros(weight.k, int)
    found = (found - middle.astype(np.float32)[:, spread]) * steps[:, spread]
    assert np.array_equal(found, view.shape_of(wide)[first:])
