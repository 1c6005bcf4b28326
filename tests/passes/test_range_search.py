"""Ranges by search: never worse than rounding under their own loss, in every format."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import QuantizedWeight, parse
from qgraph.passes import clip, weighted
from qgraph.passes.range_search import search

FORMATS = [
    "uint4:group=32", "int4:group=16", "uint2:group=64", "int8:group=row", "uint4:group=128",
    "int4:group=32,scale=signed",
]  # fmt: skip
DTYPES = [ir.DataType.FLOAT, ir.DataType.FLOAT16]
N, K = 24, 144  # a partial last group for all groups above 16


def weights(seed: int = 0) -> torch.Tensor:
    found = np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)
    found[3, 5] = 30  # an outlier
    found[7, 32:64] = 0  # a group of zeros
    return torch.from_numpy(found)


def inputs() -> torch.Tensor:
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal((256, K)) @ (rng.standard_normal((K, K)) / 12 + np.eye(K))
    return torch.from_numpy((mixed * np.exp(rng.standard_normal(K))).astype(np.float32))


def errors(rows: torch.Tensor, found: QuantizedWeight, fmt: str) -> torch.Tensor:
    return rows - torch.from_numpy(parse(fmt).dequantize(found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_weighted_is_never_worse_under_its_weights(fmt: str, dtype: ir.DataType) -> None:
    rows, curvature = weights(), inputs().square().mean(0)
    spec = parse(fmt)
    rounded = spec.quantize(rows.numpy(), dtype)
    found = weighted.fit(rows, curvature, spec, dtype)
    before = (errors(rows, rounded, fmt).square() * curvature).sum(1)
    after = (errors(rows, found, fmt).square() * curvature).sum(1)
    assert (after <= before * (1 + 1e-5)).all()
    assert (after < before).sum() > N / 2
    assert found.codes.dtype == rounded.codes.dtype
    assert found.scales.dtype == rounded.scales.dtype
    assert (found.zeros is None) == (rounded.zeros is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_clip_is_never_worse_in_any_group(fmt: str, dtype: ir.DataType) -> None:
    rows, x = weights(), inputs()
    hessian, spec = x.T @ x / len(x), parse(fmt)
    rounded = spec.quantize(rows.numpy(), dtype)
    found = clip.fit(rows, hessian, spec, dtype)
    width = spec.group or K
    for at in range(0, K, width):
        block = hessian[at : at + width, at : at + width]
        e, f = (errors(rows, each, fmt)[:, at : at + width] for each in (rounded, found))
        before, after = (((each @ block) * each).sum(1) for each in (e, f))
        assert (after <= before * (1 + 1e-4) + 1e-9).all()


def test_a_group_of_zeros_is_as_the_format_has_it() -> None:
    spec = parse("uint4:group=32")
    rounded = spec.quantize(weights().numpy(), ir.DataType.FLOAT)
    found = weighted.fit(weights(), torch.ones(K), spec, ir.DataType.FLOAT)
    assert found.scales[7, 1] == rounded.scales[7, 1]
    assert np.array_equal(spec.dequantize(found)[7, 32:64], np.zeros(32, np.float32))


def test_columns_that_are_never_used_break_nothing() -> None:
    rows, spec = weights(), parse("uint4:group=32")
    for curvature in (torch.zeros(K), torch.ones(K).index_fill(0, torch.arange(32, 64), 0)):
        found = weighted.fit(rows, curvature, spec, ir.DataType.FLOAT)
        assert np.isfinite(found.scales).all()
        assert errors(rows, found, "uint4:group=32").abs().max() < 30


def test_by_hand() -> None:
    # 0, 1, …, 14 and 100, of which 100 counts nothing: steps of 1 lose nothing that counts.
    rows = torch.tensor([[*range(15), 100.0]])
    counts = torch.tensor([1.0] * 15 + [0.0])
    spec = parse("uint4:group=16")
    found = search(
        rows, spec, ir.DataType.FLOAT, lambda e: (e.square() * counts).sum(-1), shrink=[0.15],
        shifts=range(-16, 17),
    )  # fmt: skip
    assert found.scales[0, 0] == pytest.approx(1.0)
    assert spec.dequantize(found)[0, :15].tolist() == pytest.approx(list(range(15)))


def test_tiles_do_not_matter() -> None:
    rows, spec = weights(), parse("uint4:group=32")
    one, other = (
        search(
            rows, spec, ir.DataType.FLOAT, lambda e: e.abs_().sum(-1), shrink=[1, 0.8], tile=tile
        )
        for tile in (1, 1 << 20)
    )
    assert np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.scales, other.scales)
