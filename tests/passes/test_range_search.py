"""Ranges by search: never worse than rounding under their own loss, in every format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.formats.grouping import ScaleOverflow
from qgraph.passes import clip, hqq, weighted
from qgraph.passes.range_search import search

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
Fit: TypeAlias = Callable[[torch.Tensor, Format, ir.DataType], QuantizedWeight]

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


FITS: dict[str, Fit] = {
    "clip": lambda rows, fmt, dtype: clip.fit(rows, inputs().T @ inputs(), fmt, dtype),
    "hqq": hqq.fit,
    "weighted": lambda rows, fmt, dtype: weighted.fit(rows, inputs().square().mean(0), fmt, dtype),
    "search": lambda rows, fmt, dtype: search(rows, fmt, dtype, squares, shrink=[1, 0.9], tile=K),
}


def squares(error: torch.Tensor) -> torch.Tensor:
    return error.square_().sum(-1)


@pytest.fixture(params=FITS)
def fit(request: pytest.FixtureRequest) -> Fit:
    """Every way to choose ranges."""
    return FITS[request.param]


def test_a_group_of_zeros_is_as_the_format_has_it(fit: Fit, ranged: Format) -> None:
    rows = torch.cat([torch.zeros(1, K), weights()[:8]])
    found, own = fit(rows, ranged, FLOAT), ranged.quantize(rows.numpy(), FLOAT)
    flat = own.scales == 0
    assert flat.any(1)[0] and (ranged.group != 32 or flat[8, 1])
    assert (found.scales[flat] == 0).all()
    assert found.zeros is None or (found.zeros[flat] == 0).all()
    assert (found.codes[0] == 0).all()


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-5, 1e-4])
def test_scales_of_tiny_weights_are_normal_numbers(fit: Fit, ranged: Format, size: float) -> None:
    rows = weights()[:6] * size
    found, own = fit(rows, ranged, FLOAT16), ranged.quantize(rows.numpy(), FLOAT16)
    tiny = np.finfo(np.float16).smallest_normal
    assert (abs(found.scales[own.scales != 0]) >= tiny).all()
    assert (found.scales[own.scales == 0] == 0).all()


def test_a_range_below_the_least_scale_is_widened_to_it() -> None:
    # 0, 1, …, 14 and 50, of which 50 counts nothing; the unit is the least normal number, and a
    # fifth of the range is two thirds of it. In whole units nothing that counts is lost.
    tiny = float(np.finfo(np.float16).smallest_normal)
    rows = torch.tensor([[*range(15), 50.0]]) * tiny
    counts = torch.tensor([1.0] * 15 + [0.0])
    spec = parse("uint4:group=16")
    found = search(rows, spec, FLOAT16, lambda e: (e.square() * counts).sum(-1), shrink=[0.2])
    assert found.scales.tolist() == [[tiny]]
    assert np.array_equal(spec.dequantize(found)[0, :15], rows[0, :15].numpy())


def test_what_does_not_fit_is_named_by_its_row_in_the_weight(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (clip, hqq, weighted):
        monkeypatch.setattr(module, "TILE", K)
    monkeypatch.setattr(clip, "ROWS", 1)
    rows = weights()
    rows[19, 70] = 3e6
    with pytest.raises(ScaleOverflow, match="row 19, group 2: its scale does not fit") as refused:
        fit(rows, parse("uint4:group=32"), FLOAT16)
    assert (refused.value.row, refused.value.group) == (19, 2)


def test_columns_that_are_never_used_break_nothing() -> None:
    rows, spec = weights(), parse("uint4:group=32")
    for curvature in (torch.zeros(K), torch.ones(K).index_fill(0, torch.arange(32, 64), 0)):
        found = weighted.fit(rows, curvature, spec, FLOAT)
        assert np.isfinite(found.scales).all()
        assert abs(rows.numpy() - spec.dequantize(found)).max() < 30


def test_by_hand() -> None:
    # 0, 1, …, 14 and 100, of which 100 counts nothing: steps of 1 lose nothing that counts.
    rows = torch.tensor([[*range(15), 100.0]])
    counts = torch.tensor([1.0] * 15 + [0.0])
    spec = parse("uint4:group=16")
    found = search(
        rows, spec, FLOAT, lambda e: (e.square() * counts).sum(-1), shrink=[0.15],
        shifts=range(-16, 17),
    )  # fmt: skip
    assert found.scales[0, 0] == pytest.approx(1.0)
    assert spec.dequantize(found)[0, :15].tolist() == pytest.approx(list(range(15)))


def test_tiles_do_not_matter() -> None:
    rows, spec = weights(), parse("uint4:group=32")
    one, other = (
        search(rows, spec, FLOAT, lambda e: e.abs_().sum(-1), shrink=[1, 0.8], tile=tile)
        for tile in (1, 1 << 20)
    )
    assert np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.scales, other.scales)


MOVING = ["mxfp4", "mxfp4:order=halves", "mxfp8", "mxfp8:element=e5m2", "nvfp4"]


@pytest.mark.parametrize("spec", MOVING)
@pytest.mark.parametrize("name", FITS)
def test_scales_that_are_not_free_move_to_their_neighbours(spec: str, name: str) -> None:
    """By numpy: of the scales that may be tried none has less squared error than the one taken."""
    rows, plain = weights(), weights().numpy()
    fmt = parse(spec).fitted_to(plain)
    own, found = fmt.quantize(plain, FLOAT), FITS[name](rows, fmt, FLOAT)
    parts = fmt.pack(found, fmt.default_layout)
    back = fmt.unpack(parts, N, K, fmt.default_layout)
    np.testing.assert_array_equal(fmt.dequantize(back), fmt.dequantize(found))
    starts = np.arange(0, K, fmt.group)
    squared = [
        np.add.reduceat((plain - fmt.dequantize(each)) ** 2, starts, axis=1)
        for each in (own, found)
    ]
    if name != "search":  # the others have losses of their own
        assert (found.scales != own.scales).any()
        return
    assert (squared[1] <= squared[0] * (1 + 1e-5)).all()
    levels = np.unique(fmt.levels[np.isfinite(fmt.levels)]).astype(np.float64)
    for step in fmt.moves:
        scales = fmt.moved(own, np.full(own.scales.shape, step)).scales.astype(np.float64)
        columns = np.repeat(scales, fmt.group, axis=1)[:, :K, None]
        best = ((plain[..., None] - levels * columns) ** 2).min(-1)
        assert (squared[1] <= np.add.reduceat(best, starts, axis=1) * (1 + 1e-4) + 1e-12).all()


def test_scales_move_by_hand() -> None:
    """Powers of two; numbers of E4M3, from the least normal one to 448."""
    rows = np.ones((1, 64), np.float32)
    mx, nv = parse("mxfp4"), parse("nvfp4")
    own = mx.quantize(rows, FLOAT)
    assert own.scales.tolist() == [[0.25, 0.25]]
    assert mx.moved(own, np.array([[1, -1]])).scales.tolist() == [[0.5, 0.125]]
    assert mx.moved(own, np.array([[500, -500]])).scales.tolist() == [[2.0**127, 2.0**-127]]
    start = nv.quantize(rows, FLOAT)
    assert (start.scales / start.more["tensor"])[0] == pytest.approx([448] * 4)
    found = nv.moved(start, np.array([[1, -1, -8, -500]]))
    assert (found.scales / found.more["tensor"])[0] == pytest.approx([448, 416, 224, 2**-6])
    assert (found.more["codes"] == nv.pack(found, nv.default_layout)["scales"]).all()


def test_a_clipped_block_takes_the_larger_power_of_two() -> None:
    """7.9 is clipped to 6 in steps of 1, and is 8 in steps of 2: nothing else is there to lose."""
    rows = torch.zeros(1, 32)
    rows[0, 0] = 7.9
    found = hqq.fit(rows, parse("mxfp4"), FLOAT)
    assert found.scales.tolist() == [[2.0]]
    assert parse("mxfp4").dequantize(found)[0, 0] == 8
