"""GPTQ's linear algebra against what it must be: exact oracles, bounds, the hard Hessians."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import parse
from qgraph.passes import gptq
from qgraph.passes.codebook import Integers
from qgraph.passes.moments import factor

N, K = 24, 64
FORMATS = ["uint4:group=32", "int4:group=16", "uint2:group=32", "int8:group=row", "uint4:group=64"]


def problem(fmt: str, inputs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, gptq.Grid]:
    """Weights, Hessian and the grid that rounding has for them."""
    weights = np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)
    spec = parse(fmt)
    rounded = spec.quantize(weights, ir.DataType.FLOAT)
    grid = gptq.grid_of(rounded, spec, torch.device("cpu"))
    x = torch.from_numpy(inputs.astype(np.float32))
    return torch.from_numpy(weights), x.T @ x, grid


def gaussian(tokens: int = 256) -> np.ndarray:
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((K, K)) / 8 + np.eye(K)
    return rng.standard_normal((tokens, K)) @ mixing


def nearest(weights: torch.Tensor, grid: gptq.Grid) -> torch.Tensor:
    scales, zeros = grid.columns(weights.shape[1])
    book = grid.book
    assert isinstance(book, Integers)
    return (torch.round(weights / scales) + zeros).clamp(book.low, book.high)


def solved(
    weights: torch.Tensor, hessian: torch.Tensor, grid: gptq.Grid, act_order: bool = True
) -> torch.Tensor:
    found = factor(hessian, act_order, 0.01)
    assert found is not None
    return gptq.solve(weights, grid, found.order, found.upper)[0]


def total(weights: torch.Tensor, codes: torch.Tensor, grid: gptq.Grid, h: torch.Tensor) -> float:
    return float(gptq.loss(weights, grid.dequantize(codes), h).sum())


def test_with_a_diagonal_hessian_it_is_rounding_to_nearest() -> None:
    weights, _, grid = problem(FORMATS[0], gaussian())
    diagonal = torch.diag(torch.linspace(1, 2, K))
    assert torch.equal(solved(weights, diagonal, grid), nearest(weights, grid))


def test_two_columns_by_hand() -> None:
    # H = [[1, .5], [.5, 1]]: an error e of column 0 moves column 1 by +e/2 before it is rounded.
    hessian = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    grid = gptq.Grid(torch.ones(1, 1), torch.zeros(1, 1), Integers(-8, 7), 0)
    found = factor(hessian, False, 1e-9)
    assert found is not None
    weights = torch.tensor([[0.4, 0.4]])  # 0.4 → 0, error 0.4; 0.4 + 0.2 → 1
    codes, _ = gptq.solve(weights, grid, found.order, found.upper)
    assert codes.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("act_order", [False, True])
def test_it_beats_rounding_on_its_own_loss(fmt: str, act_order: bool) -> None:
    weights, hessian, grid = problem(fmt, gaussian())
    codes = solved(weights, hessian, grid, act_order)
    assert isinstance(grid.book, Integers)
    assert codes.min() >= grid.book.low
    assert codes.max() <= grid.book.high
    assert torch.equal(codes, codes.round())
    before = total(weights, nearest(weights, grid), grid, hessian)
    assert total(weights, codes, grid, hessian) < 0.75 * before


@pytest.mark.parametrize("fmt", FORMATS)
def test_refining_never_raises_the_loss(fmt: str) -> None:
    weights, hessian, grid = problem(fmt, gaussian())
    codes = nearest(weights, grid)
    before = total(weights, codes, grid, hessian)
    for _ in range(3):
        codes = gptq.refine(weights, hessian, grid, codes, 1)
        after = total(weights, codes, grid, hessian)
        assert after <= before * (1 + 1e-5)
        before = after


def test_refining_ends_where_no_single_code_can_be_bettered() -> None:
    weights, hessian, grid = problem(FORMATS[0], gaussian())
    codes = gptq.refine(weights, hessian, grid, nearest(weights, grid), 50)
    best = gptq.loss(weights, grid.dequantize(codes), hessian)
    for column in range(0, K, 7):
        for step in (-1.0, 1.0):
            other = codes.clone()
            other[:, column] = (other[:, column] + step).clamp(0, 15)
            worse = gptq.loss(weights, grid.dequantize(other), hessian)
            assert (worse >= best * (1 - 1e-4)).all()


def test_refitted_scales_are_the_least_squares_answer() -> None:
    weights, hessian, grid = problem(FORMATS[0], gaussian())
    codes = nearest(weights, grid)
    fitted = gptq.refit(weights, hessian, grid, codes, ir.DataType.FLOAT)
    best = total(weights, codes, fitted, hessian)
    assert best < total(weights, codes, grid, hessian)
    for change in (0.995, 1.005):
        scaled = dataclasses.replace(fitted, scales=fitted.scales * change)
        assert total(weights, codes, scaled, hessian) > best * (1 - 1e-3)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_refitted_scales_are_those_that_float16_holds(size: float) -> None:
    weights, hessian, grid = problem(FORMATS[0], gaussian())
    codes = nearest(weights, grid)
    fitted = gptq.refit(weights * size, hessian, grid, codes, ir.DataType.FLOAT16).scales
    if size > 1:  # too large to be stored: they stay as they were
        assert torch.equal(fitted, grid.scales)
    else:  # below the normal numbers
        tiny = torch.finfo(torch.float16).tiny
        assert (fitted >= tiny).all() and (fitted == tiny).any()
        assert torch.equal(fitted.half().float(), fitted)


HARD = {
    "8 tokens for 64 columns": gaussian(8),
    "a column that is always zero": gaussian() * (np.arange(K) != 5),
    "two equal columns": np.concatenate([gaussian()[:, :-1], gaussian()[:, :1]], axis=1),
    "one channel of 1e5": gaussian() * np.where(np.arange(K) == 3, 1e5, 1),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_hessians_solve_and_are_no_worse_than_rounding(case: str) -> None:
    weights, hessian, grid = problem(FORMATS[0], HARD[case])
    codes = solved(weights, hessian, grid)
    assert torch.isfinite(codes).all()
    codes = gptq.refine(weights, hessian, grid, codes, 1)
    before = total(weights, nearest(weights, grid), grid, hessian)
    assert total(weights, codes, grid, hessian) <= before * (1 + 1e-5)


def test_damping_grows_until_the_matrix_factors() -> None:
    singular = torch.ones(4, 4) * 1e8
    indefinite = singular - torch.eye(4) * 2e6  # smallest eigenvalue −2e6: 0.01 · 1e8 is too little
    found = factor(indefinite, False, 0.01)
    assert found is not None
    assert found.damping == pytest.approx(0.1)
    assert factor(torch.full((4, 4), float("nan")), False, 0.01) is None
