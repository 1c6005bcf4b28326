"""KL divergence and perplexity: hand examples, torch as oracle, bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qgraph import InputError, divergence, kl_divergence, perplexity
from qgraph.divergence import Divergences


def logits(*shape: int, seed: int = 0) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def test_kl_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    wanted = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl_divergence(np.log(p), np.log(q)) == pytest.approx(wanted, abs=1e-7)
    # A constant added to logits changes nothing.
    assert kl_divergence(np.log(p) + 7, np.log(q) - 3) == pytest.approx(wanted, abs=1e-6)


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(2, 40))
def test_kl_against_torch(seed: int, rows: int, size: int) -> None:
    reference, candidate = logits(2, rows, size, seed=seed), logits(2, rows, size, seed=seed + 1)
    logs = [torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (candidate, reference)]
    wanted = torch.nn.functional.kl_div(*logs, reduction="none", log_target=True).sum(-1)
    found = kl_divergence(reference, candidate)
    assert found.shape == (2, rows)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-5, atol=2e-6)
    assert (kl_divergence(reference, reference) == 0).all()


def test_kl_is_one_way() -> None:
    sharp, flat = np.array([8.0, 0, 0]), np.zeros(3)
    total = math.exp(8) + 2
    p = [math.exp(8) / total, 1 / total, 1 / total]
    wanted = sum(x * math.log(3 * x) for x in p)
    assert kl_divergence(sharp, flat) == pytest.approx(wanted, rel=1e-5)
    other_way = -sum(math.log(3 * x) for x in p) / 3
    assert kl_divergence(flat, sharp) == pytest.approx(other_way, rel=1e-5)
    assert other_way > 3 * wanted


def test_impossible_tokens() -> None:
    ruled_out = np.array([0.0, 0.0, -np.inf])
    assert kl_divergence(ruled_out, np.zeros(3)) == pytest.approx(math.log(1.5), abs=1e-6)
    assert kl_divergence(np.zeros(3), ruled_out) == np.inf
    assert kl_divergence(ruled_out, ruled_out) == 0
    assert np.isnan(kl_divergence(np.array([0.0, np.nan, 1.0]), np.zeros(3)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_are_read_as_float32(dtype: Any) -> None:
    reference, candidate = logits(3, 9).astype(dtype), logits(3, 9, seed=1).astype(dtype)
    wanted = kl_divergence(reference.astype(np.float32), candidate.astype(np.float32))
    np.testing.assert_array_equal(kl_divergence(reference, candidate), wanted)


def test_slices_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, candidate = logits(11, 30), logits(11, 30, seed=1)
    targets = np.arange(11)
    whole = kl_divergence(reference, candidate), perplexity(reference, targets)
    monkeypatch.setattr(divergence, "SLICE_BYTES", 4 * 30 * 3)
    np.testing.assert_array_equal(kl_divergence(reference, candidate), whole[0])
    assert perplexity(reference, targets) == whole[1]


def test_perplexity_by_hand() -> None:
    rows = np.log([[0.5, 0.5, 1e-9], [0.125, 0.75, 0.125]])
    assert perplexity(rows, np.array([0, 0])) == pytest.approx(4, rel=1e-5)
    assert perplexity(rows, np.array([0, -100])) == pytest.approx(2, rel=1e-5)
    assert perplexity(np.zeros((2, 5, 7)), np.zeros((2, 5), np.int32)) == pytest.approx(7)


def test_perplexity_against_torch() -> None:
    rows, targets = logits(4, 6, 50), np.random.default_rng(1).integers(0, 50, (4, 6))
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(rows).reshape(-1, 50), torch.from_numpy(targets).reshape(-1)
    )
    assert perplexity(rows, targets) == pytest.approx(math.exp(loss.item()), rel=1e-5)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: kl_divergence(np.zeros((2, 3)), np.zeros((2, 4))), "same shape"),
        (lambda: kl_divergence(np.zeros(()), np.zeros(())), "vocabulary"),
        (lambda: perplexity(np.zeros((2, 3)), np.zeros(3, int)), "one integer a position"),
        (lambda: perplexity(np.zeros((2, 3)), np.zeros(2)), "one integer a position"),
        (lambda: perplexity(np.zeros((2, 3)), np.array([0, 3])), "target 3 is outside"),
        (lambda: perplexity(np.zeros((2, 3)), np.array([-1, -1])), "no position"),
    ],
)
def test_wrong_shapes(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_a_block_scores_every_position() -> None:
    reference, candidate = logits(8, 20), logits(8, 20, seed=1)
    ids = np.arange(8)
    scores = Divergences()
    scores.add(reference, candidate, ids)
    found = scores.result()
    kl = kl_divergence(reference, candidate)
    assert (found.positions, found.predictions) == (8, 7)
    assert found.mean == pytest.approx(kl.mean(), rel=1e-12)
    assert found.median == pytest.approx(np.median(kl), rel=1e-12)
    assert found.p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-12)
    assert found.maximum == kl.max()
    assert found.top1 == (reference.argmax(-1) == candidate.argmax(-1)).mean()
    assert found.reference_perplexity == pytest.approx(perplexity(reference[:-1], ids[1:]))
    assert found.candidate_perplexity == pytest.approx(perplexity(candidate[:-1], ids[1:]))


def test_llama_cpp_scores_the_predictions_of_the_second_half() -> None:
    """Of a window of n, llama.cpp's tool counts n − 1 − n/2 positions, from n/2 on."""
    reference, candidate = logits(8, 20), logits(8, 20, seed=1)
    ids = np.arange(8)
    scores = Divergences(second_half=True)
    scores.add(reference, candidate, ids)
    found = scores.result()
    assert (found.positions, found.predictions) == (3, 3)
    assert found.mean == pytest.approx(kl_divergence(reference, candidate)[4:7].mean(), rel=1e-12)
    assert found.reference_perplexity == pytest.approx(perplexity(reference[4:7], ids[5:8]))


def test_padding_is_neither_scored_nor_predicted() -> None:
    reference, candidate = logits(8, 20), logits(8, 20, seed=1)
    ids, mask = np.arange(8), np.arange(8) < 5
    padded, cut = Divergences(), Divergences()
    padded.add(reference, candidate, ids, mask)
    cut.add(reference[:5], candidate[:5], ids[:5])
    assert padded.result() == cut.result()
    assert padded.result().predictions == 4


def test_blocks_add_up() -> None:
    together = Divergences()
    parts = []
    for seed in (0, 2):
        reference, candidate = logits(5, 20, seed=seed), logits(5, 20, seed=seed + 1)
        together.add(reference, candidate, np.arange(5))
        parts.append(kl_divergence(reference, candidate))
    found = together.result()
    assert (found.positions, found.predictions) == (10, 8)
    assert found.mean == pytest.approx(np.concatenate(parts).mean())


def test_nothing_scored_is_an_error_and_no_prediction_is_nan() -> None:
    scores = Divergences()
    with pytest.raises(InputError, match="no position"):
        scores.result()
    scores.add(logits(1, 5), logits(1, 5), np.array([2]))
    assert scores.result().mean == 0
    assert math.isnan(scores.result().reference_perplexity)


def test_memory_is_bounded() -> None:
    """A block of 25 MB of logits, twice; temporaries stay far below one copy each."""
    reference = np.zeros((128, 49_152), np.float32)
    tracemalloc.start()
    try:
        Divergences().add(reference, reference, np.zeros(128, np.int64))
        kl_divergence(reference, reference)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4_000_000 < peak < 40_000_000
