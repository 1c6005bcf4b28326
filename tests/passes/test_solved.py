"""What a solver found, kept packed: its scales times what is folded into the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.formats.base import parse
from qgraph.passes.rounded import RoundedSource
from qgraph.passes.solved import SolvedSource, Transform, as_stored, transform_of

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


def test_inputs_meet_the_channels_as_they_are_stored(
    solved: SolvedSource, rng: np.random.Generator
) -> None:
    """In another order and scaled, both sides of the product: it stays what it was."""
    order, columns = rng.permutation(K), np.exp2(rng.integers(-2, 3, K)).astype(np.float32)
    transform, rows = Transform(columns, order), solved.weight.rows(0, N)
    found = solved.format.quantize(transform.apply(rows), ir.DataType.FLOAT16)
    source = SolvedSource(solved.weight, solved.format, ir.DataType.FLOAT16, found, transform)
    x = rng.standard_normal((3, K)).astype(np.float32)
    np.testing.assert_array_equal(as_stored(x, source), (x / columns)[:, order])
    np.testing.assert_allclose(
        as_stored(x, source) @ transform.apply(rows).T, x @ rows.T, rtol=1e-4
    )
    plain = RoundedSource(solved.weight, solved.format, ir.DataType.FLOAT16)
    assert as_stored(x, plain) is x
    assert transform_of(plain).of_inputs == transform_of(solved).of_inputs
    assert transform_of(source).of_inputs != transform_of(solved).of_inputs


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
