"""SmoothQuant's search: its loss against products, its promises, and what outliers cost with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import parse
from qgraph.passes import smoothquant
from qgraph.passes.activation_ranges import STATIC
from qgraph.passes.activation_rounding import ROUNDINGS, Inputs
from qgraph.passes.smoothquant import STEPS, Stage
from qgraph.recipe import ACTIVATIONS, FLOAT

K, N = 256, 192
ROWS = parse("int8-row")
KINDS = list(ROUNDINGS)


def rounded(index: int, rows: torch.Tensor) -> torch.Tensor:
    found = ROWS.quantize(np.ascontiguousarray(rows.numpy()), ir.DataType.FLOAT)
    return torch.from_numpy(ROWS.dequantize(found))


def layer(seed: int = 0, outliers: int = 3, factor: float = 50) -> tuple[torch.Tensor, ...]:
    """Weights [N, K] and inputs [T, K] of which about 1 % of the channels are much larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((512, K))
    x[:, rng.choice(K, outliers, replace=False)] *= factor
    weights = rng.standard_normal((N, K)) / 16
    return torch.from_numpy(weights.astype(np.float32)), torch.from_numpy(x.astype(np.float32))


def stage(kind: str, x: torch.Tensor, *weights: torch.Tensor, quantize: Any = rounded) -> Stage:
    inputs = Inputs(x)
    return Stage(
        list(weights), 2 / len(x) * x.T @ x, quantize, lambda _, s: inputs.error(kind, scale=s)
    )


def found(made: Stage, x: torch.Tensor, ties: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
    ties = torch.arange(x.shape[1]) if ties is None else ties
    return smoothquant.search(made, x.abs().amax(0), ties)


def output_error(weights: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, kind: str) -> float:
    """Mean squared error of the outputs, run as they will be run."""
    product = ROUNDINGS[kind](x / scale) @ rounded(0, weights * scale).T
    return float((product - x @ weights.T).pow(2).mean())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("int8")])
@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_cost_little(kind: str, seed: int) -> None:
    weights, x = layer(seed)
    scale, figures = found(stage(kind, x, weights), x)
    plain = output_error(weights, x, torch.ones(K), kind)
    assert output_error(weights, x, scale, kind) < 0.1 * plain
    assert 0.3 < figures["alpha"] <= 1
    assert scale.dtype == torch.float32
    large = x.abs().amax(0) > 40
    assert scale[large].min() > 3 * scale[~large].max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_error_of_the_outputs(kind: str) -> None:
    weights, x = layer(factor=10)
    scale, figures = found(stage(kind, x, weights), x)
    for key, s in (("loss", scale), ("unscaled", torch.ones(K))):
        assert figures[key] == pytest.approx(2 * N * output_error(weights, x, s, kind), rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_no_linear_is_worse_than_without(kind: str) -> None:
    weights, x = layer()
    other = torch.zeros(8, K)  # reads outlier channels only: any factor is a loss to it
    other[:, x.abs().amax(0) > 40] = 1
    made = stage(kind, x, weights, other)
    scale, _ = found(made, x)
    before, after = made.losses(torch.ones(K)), made.losses(scale)
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_what_rounds_without_error_is_not_scaled() -> None:
    weights, x = layer()
    made = Stage([weights], x.T @ x, lambda index, rows: rows.clone(), lambda index, scale: None)
    scale, figures = found(made, x)
    assert torch.equal(scale, torch.ones(K))
    assert math.isnan(figures["alpha"])
    assert figures["loss"] == figures["unscaled"] == 0


def test_tied_channels_have_one_factor_and_dead_ones_none() -> None:
    weights, x = layer()
    ties = torch.arange(K) // 64 * 32 + torch.arange(K) % 32  # heads of 32, two by two
    x[:, ties == 5] = 0
    weights[:, ties == 7] = 0
    scale, figures = found(stage("int8-row", x, weights), x, ties)
    for row in ties.unique():
        assert len(scale[ties == row].unique()) == 1
    assert (scale[(ties == 5) | (ties == 7)] == 1).all()
    known = (ties != 5) & (ties != 7)
    assert float(scale[known].double().log().mean()) == pytest.approx(0, abs=1e-5)
    largest = [
        torch.stack([m.abs().amax(0)[ties == row].max() for row in ties])[known]
        for m in (x, weights)
    ]
    alpha = figures["alpha"]
    wanted = largest[0] ** alpha / largest[1] ** (1 - alpha)
    np.testing.assert_allclose(scale[known] / wanted, (scale[known] / wanted)[0], rtol=1e-4)


def test_factors_that_no_scale_holds_are_passed_over() -> None:
    weights, x = layer()
    free, figures = found(stage("int8", x, weights), x)
    limit = float((weights * free).abs().max()) * 0.99

    def narrow(index: int, rows: torch.Tensor) -> torch.Tensor:
        if float(rows.abs().max()) > limit:
            raise OverflowError("row 0, group 0: its scale does not fit float16", (0, 0))
        return rounded(index, rows)

    scale, less = found(stage("int8", x, weights, quantize=narrow), x)
    assert figures["overflowed"] == 0
    assert 0 <= less["alpha"] < figures["alpha"]
    assert less["overflowed"] > 0
    assert float((weights * scale).abs().max()) <= limit


def test_a_subsample_of_rows_is_checked_on_all() -> None:
    weights, x = layer()
    many = torch.cat([weights] * 4)
    seen: list[int] = []

    def spy(index: int, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rounded(index, rows)

    found(stage("int8-row", x, many, quantize=spy), x)
    assert seen == [256] * (STEPS + 4) + [len(many)] * 2

    def bad_on_all(index: int, rows: torch.Tensor) -> torch.Tensor:
        scaled = len(rows) == len(many) and not torch.equal(rows, many)
        return rows + (100.0 if scaled else 1.0) * (rounded(index, rows) - rows)

    scale, figures = found(stage("int8-row", x, many, quantize=bad_on_all), x)
    assert torch.equal(scale, torch.ones(K))
    assert figures["loss"] == figures["unscaled"]


def test_every_kind_of_rounded_activations_has_a_rounding() -> None:
    assert {FLOAT, *ROUNDINGS} == set(ACTIVATIONS)
    assert set(STATIC) < set(ROUNDINGS)


def test_roundings_by_hand() -> None:
    x = torch.tensor([[127.0, 1.4, -0.6], [0.0, 0.0, 0.0], [2.54, 0.013, -0.008]])
    rows = ROUNDINGS["int8-row"](x)
    torch.testing.assert_close(rows, torch.tensor([[127.0, 1, -1], [0, 0, 0], [2.54, 0.02, 0]]))
    whole = ROUNDINGS["int8"](torch.tensor([[-1.0, 0.3, 254.0]]))
    torch.testing.assert_close(whole, torch.tensor([[-1.0, 0, 254]]))
    assert torch.equal(ROUNDINGS["int8"](torch.zeros(2, 2)), torch.zeros(2, 2))
    one = ROUNDINGS["fp8"](torch.tensor([[448.0, 17.0, 3.3], [-9.5, 0, 1e-3]]))
    torch.testing.assert_close(one, torch.tensor([[448.0, 16, 3.25], [-10, 0, 2.0**-9 * 1]])[:2])
    tokens = ROUNDINGS["fp8-token"](torch.tensor([[448.0, 17.0], [4.48, 0.17], [0, 0]]))
    torch.testing.assert_close(tokens, torch.tensor([[448.0, 16], [4.48, 0.16], [0, 0]]))


def test_weights_of_tokens_count() -> None:
    x = torch.tensor([[127.0, 0.5], [1.0, 0.004]])
    even = Inputs(x).error("int8-row")
    assert even is not None
    torch.testing.assert_close(even, ROUNDINGS["int8-row"](x) - x)
    only = Inputs(x, torch.tensor([0.0, 2.0])).error("int8-row")
    assert only is not None
    torch.testing.assert_close(only, torch.tensor([[0.0, 0], [2**0.5, 2**0.5]]) * even)
    assert Inputs(x).error("float") is None


def test_outlier_columns_count_for_nothing() -> None:
    x = torch.tensor([[127.0, 0.5, 0.2], [10.0, 0.004, 0.1]])
    found = Inputs(x).error("int8-row", 1)
    rest = Inputs(x[:, 1:]).error("int8-row")
    assert found is not None and rest is not None
    torch.testing.assert_close(found[:, 1:], rest)
    assert not found[:, 0].any()
    swapped = Inputs(x).error("int8-row", 1, scale=torch.tensor([1000.0, 1, 1]))
    assert swapped is not None
    assert not swapped[:, 1].any()
