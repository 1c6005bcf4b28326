"""Ranges without data: never worse under their own loss, and what guesses of importance do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.passes import hqq

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
N, K = 12, 80  # the last group of 32 has 16 columns, the only one of 128 has 80


def normal(seed: int = 0) -> torch.Tensor:
    """Normal rows with an outlier and a group of zeros."""
    rows = np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)
    rows[3, 5], rows[7, 32:64] = 30, 0
    return torch.from_numpy(rows)


def losses(
    rows: torch.Tensor, found: QuantizedWeight, fmt: Format, counts: np.ndarray
) -> np.ndarray:
    """Σ h (1 + c w²/σ²) e² of every group, in float64, `[N, nb]`."""
    weights = rows.numpy().astype(np.float64)
    large = 1 + hqq.LARGE * weights**2 / (weights**2).mean(1, keepdims=True)
    error = weights - fmt.dequantize(found)
    starts = np.arange(0, rows.shape[1], fmt.group or rows.shape[1])
    return np.add.reduceat(error**2 * large * counts, starts, axis=1)


@pytest.mark.parametrize("weighs", [False, True])
def test_it_is_never_worse_in_any_group(
    bench: Any, ranged: Format, scale_dtype: ir.DataType, weighs: bool
) -> None:
    rows = normal()
    counts = np.exp(np.random.default_rng(1).standard_normal(K)).astype(np.float32)
    found = hqq.fit(rows, ranged, scale_dtype, torch.from_numpy(counts) if weighs else None)
    bench.check_quantized(found, rows, ranged, scale_dtype)
    rounded = ranged.quantize(rows.numpy(), scale_dtype)
    before, after = (
        losses(rows, each, ranged, counts if weighs else np.ones(K)) for each in (rounded, found)
    )
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < before.sum()


def test_zero_points_and_ends_move_together() -> None:
    # 15 codes about zero point 5: rounding stretches their 14 steps over 15, the search does not.
    rows = torch.tensor([[0.1 * (code - 5) for code in range(15)] + [0.0]])
    fmt = parse("uint4:group=16")
    rounded, found = fmt.quantize(rows.numpy(), FLOAT), hqq.fit(rows, fmt, FLOAT)
    before, after = (abs(fmt.dequantize(each) - rows.numpy()).mean() for each in (rounded, found))
    assert after < 0.8 * before


def test_an_outlier_is_kept() -> None:
    """What a robust loss alone would give up: large weights often meet large inputs."""
    fmt = parse("uint4:group=32")
    found = hqq.fit(normal(), fmt, FLOAT)
    assert fmt.dequantize(found)[3, 5] == pytest.approx(30, rel=0.1)


def test_a_column_that_counts_is_stored_best() -> None:
    rows, fmt = normal(), parse("uint4:group=32")
    counts = torch.ones(K)
    counts[40] = 1e4
    plain, weighted = hqq.fit(rows, fmt, FLOAT), hqq.fit(rows, fmt, FLOAT, counts)
    before, after = (abs(rows.numpy() - fmt.dequantize(each))[:, 40] for each in (plain, weighted))
    assert after.mean() < 0.2 * before.mean()


def test_importance_by_hand() -> None:
    # Columns of the first reader have medians 2, 2, 1, of the second 4, 1, 4; (m / m_k)^4.
    one = torch.tensor([[2.0, -2, 1], [-2, 2, 1], [9, 2, -1]])
    other = torch.tensor([[4.0, 1, 4]])
    found = hqq.importance([one, other])
    assert found is not None
    assert found.tolist() == pytest.approx([1, 4**4, 2**4])


def test_importance_of_one_reader_is_none() -> None:
    assert hqq.importance([normal()]) is None


def test_importance_does_not_depend_on_units() -> None:
    readers = [normal(1), normal(2)]
    one, other = hqq.importance(readers), hqq.importance([readers[0] * 1e-3, readers[1] * 1e3])
    assert one is not None and other is not None
    assert torch.allclose(one, other, rtol=1e-4)


def test_importance_is_finite_where_weights_are_zero() -> None:
    rows = normal()
    rows[:, 3] = 0
    for readers in ([rows, normal(1)], [torch.zeros(2, K), torch.zeros(2, K)]):
        found = hqq.importance(readers)
        assert found is not None
        assert found.isfinite().all() and (found > 0).all()
        assert found.max() <= hqq.LOUDEST * 1.001


def test_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, fmt = normal(), parse("uint4:group=32")
    whole = hqq.fit(rows, fmt, FLOAT16)
    monkeypatch.setattr(hqq, "TILE", K)
    single = hqq.fit(rows, fmt, FLOAT16)
    assert np.array_equal(whole.codes, single.codes)
    assert np.array_equal(whole.scales, single.scales)


def test_it_leaves_its_arguments_alone() -> None:
    rows, counts = normal(), torch.full((K,), 2.0)
    hqq.fit(rows, parse("uint4:group=32"), FLOAT, counts)
    assert torch.equal(rows, normal()) and torch.equal(counts, torch.full((K,), 2.0))
