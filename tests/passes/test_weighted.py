"""Importance-weighted ranges: never worse in any group, exact where a grid is exact, safe edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgraph.errors import InputError
from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.passes import weighted

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
N, K = 12, 80  # the last group of 32 has 16 columns, the only one of 128 has 80


def heavy(seed: int = 0) -> torch.Tensor:
    """Heavy-tailed rows with an outlier, a group of zeros and a group of one sign."""
    rows = np.random.default_rng(seed).standard_t(4, (N, K)).astype(np.float32)
    rows[3, 5], rows[7, 32:64], rows[8, :32] = 30, 0, np.abs(rows[8, :32]) + 1
    return torch.from_numpy(rows)


def curvatures(seed: int = 1) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.exp(2 * rng.standard_normal(K)).astype(np.float32))


def losses(
    rows: torch.Tensor, found: QuantizedWeight, curvature: torch.Tensor, fmt: Format
) -> np.ndarray:
    """Σ h e² of every group, in float64, `[N, nb]`."""
    error = rows.numpy().astype(np.float64) - fmt.dequantize(found)
    starts = np.arange(0, rows.shape[1], fmt.group or rows.shape[1])
    return np.add.reduceat(error**2 * curvature.numpy(), starts, axis=1)


def test_it_is_never_worse_in_any_group(
    bench: Any, ranged: Format, scale_dtype: ir.DataType
) -> None:
    rows, curvature = heavy(), curvatures()
    found = weighted.fit(rows, curvature, ranged, scale_dtype)
    rounded = ranged.quantize(rows.numpy(), scale_dtype)
    bench.check_quantized(found, rows, ranged, scale_dtype)
    before, after = (losses(rows, each, curvature, ranged) for each in (rounded, found))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.97 * before.sum()


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    k=st.integers(1, 40),
    text=st.sampled_from(["uint4:group=16", "int4:group=16", "uint2:group=16", "uint8:group=row"]),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-7, 1e-4, 1.0, 1e4]),
    half=st.booleans(),
)
def test_whatever_comes(
    bench: Any, rows: int, k: int, text: str, seed: int, size: float, half: bool
) -> None:
    rng, fmt = np.random.default_rng(seed), parse(text)
    dtype = FLOAT16 if half else FLOAT
    values = rng.standard_normal((rows, k)) * size * (rng.random((rows, k)) < 0.7)
    weights = torch.from_numpy(values.astype(np.float32))
    curvature = torch.from_numpy(
        (np.exp(4 * rng.standard_normal(k)) * (rng.random(k) < 0.8)).astype(np.float32)
    )
    found = weighted.fit(weights, curvature, fmt, dtype)
    bench.check_quantized(found, weights, fmt, dtype)
    rounded = fmt.quantize(weights.numpy(), dtype)
    before, after = (losses(weights, each, curvature, fmt) for each in (rounded, found))
    assert (after <= before * (1 + 1e-5) + 1e-12 * size**2).all()


def test_the_scale_is_fitted_to_the_codes() -> None:
    # Codes 0…14 about zero point 5: rounding stretches 14 steps over 15, the fit finds the step.
    rows = torch.tensor([[0.1 * (code - 5) for code in range(15)] + [0.0]])
    fmt = parse("uint4:group=16")
    found = weighted.fit(rows, torch.ones(16), fmt, FLOAT)
    assert found.scales[0, 0] == pytest.approx(0.1, rel=1e-5)
    assert fmt.dequantize(found)[0] == pytest.approx(rows[0].numpy(), abs=1e-6)


def test_a_column_that_counts_is_stored_best() -> None:
    rows, fmt = heavy(), parse("uint4:group=32")
    curvature = torch.ones(K)
    curvature[40] = 1e4
    found = weighted.fit(rows, curvature, fmt, FLOAT)
    before, after = (
        abs(rows.numpy() - fmt.dequantize(each))[:, 40].mean()
        for each in (fmt.quantize(rows.numpy(), FLOAT), found)
    )
    assert after < 0.2 * before


@pytest.mark.parametrize("dead", [slice(0, K), slice(32, 64), slice(33, 64), slice(5, 6)])
def test_columns_without_curvature_are_still_stored(bench: Any, dead: slice) -> None:
    rows, fmt, curvature = heavy(), parse("uint4:group=32"), curvatures()
    curvature[dead] = 0
    found = weighted.fit(rows, curvature, fmt, FLOAT)
    bench.check_quantized(found, rows, fmt, FLOAT)
    before, after = (
        abs(rows.numpy() - fmt.dequantize(each)).max(1)
        for each in (fmt.quantize(rows.numpy(), FLOAT), found)
    )
    assert (after < 0.5 * rows.abs().amax(1).numpy()).all()
    rounded = fmt.quantize(rows.numpy(), FLOAT)
    before, after = (losses(rows, each, curvature, fmt) for each in (rounded, found))
    assert (after <= before * (1 + 1e-5)).all()


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_unit_of_the_curvature_does_not_matter(factor: float) -> None:
    rows, fmt = heavy(), parse("uint4:group=32")
    one, other = (weighted.fit(rows, curvatures() * unit, fmt, FLOAT) for unit in (1.0, factor))
    assert (one.codes == other.codes).mean() > 0.999


def test_rows_are_independent_of_one_another() -> None:
    rows, fmt = heavy(), parse("uint4:group=32")
    whole = weighted.fit(rows, curvatures(), fmt, FLOAT16)
    for at in range(N):
        alone = weighted.fit(rows[at : at + 1], curvatures(), fmt, FLOAT16)
        assert np.array_equal(alone.codes[0], whole.codes[at])
        assert np.array_equal(alone.scales[0], whole.scales[at])


def test_it_leaves_its_arguments_alone() -> None:
    rows, curvature = heavy(), curvatures()
    weighted.fit(rows, curvature, parse("uint4:group=32"), FLOAT)
    assert torch.equal(rows, heavy()) and torch.equal(curvature, curvatures())


def test_a_scale_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError, match="row 3, group 0"):
        weighted.fit(heavy() * 40_000, curvatures(), parse("uint4:group=32"), FLOAT16)


def test_scales_in_another_type_are_refused() -> None:
    with pytest.raises(InputError, match="FLOAT16"):
        weighted.fit(heavy(), curvatures(), parse("uint4:group=32"), ir.DataType.INT8)
