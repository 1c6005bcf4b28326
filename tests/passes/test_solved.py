"""What a solver found, kept packed: its scales times what is folded into the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.formats.base import parse
from qgraph.passes.solved import SolvedSource

N, K = 24, 64


@pytest.fixture
def solved(bench: Any, rng: np.random.Generator) -> SolvedSource:
    """Float16 rows of scales near 0.1, as rounding finds them."""
    weight = rng.uniform(0.7, 0.8, (K, N)).astype(np.float16)
    graph = bench.build(
        f"g (float16[M, {K}] x) => (float16[M, {N}] y) {{ y = MatMul(x, w) }}", w=weight
    )
    weight, fmt = graph.sites()[0].weight, parse("int4:group=32")
    found = fmt.quantize(weight.rows(0, N), ir.DataType.FLOAT16)
    return SolvedSource(weight, fmt, ir.DataType.FLOAT16, found)


def test_rows_are_scaled_code_for_code(solved: SolvedSource) -> None:
    rows = np.exp2(np.arange(N) % 5 - 2).astype(np.float32)
    scaled = solved.scaled(rows)
    assert scaled is not None
    before, after = solved.block(0, N), scaled.block(0, N)
    assert np.array_equal(after.codes, before.codes)
    assert np.array_equal(after.scales, before.scales * rows[:, None].astype(np.float16))
    again = scaled.scaled(rows)
    assert again is not None
    assert np.array_equal(again.transform.rows, rows**2)
    assert again.deviation(0, N, again.block(0, N)).worst == 0


@pytest.mark.parametrize(
    ("factor", "fits"), [(1e5, True), (1e6, False), (1e-3, True), (3e-4, False)]
)
def test_rows_whose_scales_would_not_fit_are_refused(
    solved: SolvedSource, factor: float, fits: bool
) -> None:
    """Neither infinite nor subnormal: 0.1 times the factor, against 65504 and 6.1e-5."""
    rows = np.ones(N, np.float32)
    rows[7] = factor
    assert (solved.scaled(rows) is not None) == fits
