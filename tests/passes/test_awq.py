"""AWQ's search: its loss against outputs, its promises, and what it gains on outlier channels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph.formats.base import parse
from qgraph.passes import awq

K, N = 256, 192
UINT4 = parse("uint4:group=64")


def rounded(index: int, rows: torch.Tensor) -> torch.Tensor:
    found = UINT4.quantize(np.ascontiguousarray(rows.numpy()), ir.DataType.FLOAT)
    return torch.from_numpy(UINT4.dequantize(found))


def layer(seed: int = 0, outliers: int = 3, tokens: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K] and inputs [T, K] of which about 1 % of the channels are 20 times larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, K))
    x[:, rng.choice(K, outliers, replace=False)] *= 20
    weights = rng.standard_normal((N, K)) / 16
    return torch.from_numpy(weights.astype(np.float32)), torch.from_numpy(x.astype(np.float32))


def output_error(weights: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> float:
    """Mean squared error of the outputs, run as it will be run: x / s on the rounded W · s."""
    wanted = x @ weights.T
    return float(((x / scale) @ rounded(0, weights * scale).T - wanted).pow(2).mean())


def found(
    weights: list[torch.Tensor], x: torch.Tensor, ties: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    ties = torch.arange(x.shape[1]) if ties is None else ties
    return awq.search(weights, x.T @ x, x.abs().mean(0), ties, rounded)


@pytest.mark.parametrize("seed", range(5))
def test_outlier_channels_cost_half_as_much(seed: int) -> None:
    weights, x = layer(seed)
    scale, figures = found([weights], x)
    plain = output_error(weights, x, torch.ones(K))
    assert output_error(weights, x, scale) <= 0.5 * plain
    assert figures["alpha"] > 0.2
    assert scale.dtype == torch.float32
    large = x.abs().mean(0) > 5
    assert scale[large].min() > 1.5 * scale[~large].max()


def test_the_loss_is_the_error_of_the_outputs() -> None:
    weights, x = layer()
    scale, figures = found([weights], x)
    tokens_times_rows = len(x) * len(weights)
    assert figures["rows"] == len(weights)
    for key, s in (("loss", scale), ("unscaled", torch.ones(K))):
        error = output_error(weights, x, s) * tokens_times_rows
        assert figures[key] == pytest.approx(error, rel=1e-3)


def test_several_linears_share_one_scale() -> None:
    weights, x = layer()
    other = torch.roll(weights, 1, 1) * 3
    _, figures = found([weights, other], x)
    scale, alone = found([torch.cat([weights, other])], x)
    assert figures == pytest.approx(alone)
    assert scale.shape == (K,)


def test_what_rounds_without_error_is_not_scaled() -> None:
    weights, x = layer()
    scale, figures = awq.search(
        [weights], x.T @ x, x.abs().mean(0), torch.arange(K), lambda index, rows: rows.clone()
    )
    assert figures["alpha"] == figures["unscaled"] == 0
    assert torch.equal(scale, torch.ones(K))


def test_tied_channels_have_one_factor_and_dead_ones_none() -> None:
    weights, x = layer()
    ties = torch.arange(K) // 64 * 32 + torch.arange(K) % 32  # heads of 32, two by two
    x[:, ties == 5] = 0
    scale, figures = found([weights], x, ties)
    assert figures["alpha"] > 0
    for row in ties.unique():
        assert len(scale[ties == row].unique()) == 1
    assert (scale[ties == 5] == 1).all()
    known = ties != 5
    assert float(scale[known].double().log().mean()) == pytest.approx(0, abs=1e-5)
    means = torch.stack([x.abs().mean(0)[ties == row].mean() for row in ties])
    wanted = means[known] ** figures["alpha"]
    np.testing.assert_allclose(scale[known] / wanted, (scale[known] / wanted)[0], rtol=1e-4)


def test_factors_that_no_scale_holds_are_passed_over() -> None:
    weights, x = layer()
    free, figures = found([weights], x)
    limit = float((weights * free).abs().max()) * 0.99

    def narrow(index: int, rows: torch.Tensor) -> torch.Tensor:
        if float(rows.abs().max()) > limit:
            raise OverflowError("row 0, group 0: its scale does not fit float16", (0, 0))
        return rounded(index, rows)

    arguments = ([weights], x.T @ x, x.abs().mean(0), torch.arange(K))
    scale, less = awq.search(*arguments, narrow)
    assert figures["overflowed"] == 0
    assert 0 < less["alpha"] < figures["alpha"]
    assert less["overflowed"] >= awq.GRID - 1 - round(less["alpha"] * awq.GRID) - 1
    assert float((weights * scale).abs().max()) <= limit
    assert figures["loss"] < less["loss"] < less["unscaled"]


def test_no_activation_at_all_means_no_scaling() -> None:
    weights, x = layer()
    scale, figures = found([weights], torch.zeros_like(x))
    assert torch.equal(scale, torch.ones(K))
    assert figures["alpha"] == 0


def test_a_subsample_of_rows_is_checked_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = layer()
    full, exact = found([weights], x)
    monkeypatch.setattr(awq, "ROWS", 48)
    seen: list[int] = []

    def spy(index: int, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rounded(index, rows)

    arguments = ([weights], x.T @ x, x.abs().mean(0), torch.arange(K))
    scale, figures = awq.search(*arguments, spy)
    assert seen == [48] * awq.GRID + [N, N]
    assert abs(figures["alpha"] - exact["alpha"]) <= 0.1
    assert figures["rows"] == N
    assert figures["loss"] <= 1.1 * exact["loss"]

    def bad_on_all(index: int, rows: torch.Tensor) -> torch.Tensor:
        worse = 1.0 if len(rows) < N or torch.equal(rows, weights) else 2.0
        return rows + worse * (rounded(index, rows) - rows)

    scale, figures = awq.search(*arguments, bad_on_all)
    assert torch.equal(scale, torch.ones(K))
    assert figures["alpha"] == 0
    assert figures["loss"] == figures["unscaled"]
    assert figures["rows"] == N
    assert not torch.equal(full, torch.ones(K))
