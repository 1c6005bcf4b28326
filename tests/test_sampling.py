"""Sampling against torch's and transformers' own filters, and against counted draws."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgraph.errors import InputError
from qgraph.sampling import Sampler, Sampling, distribution

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))


def shares(logits: np.ndarray, how: Sampling) -> dict[int, float]:
    kept, weights = distribution(logits, how)
    tokens = range(len(weights)) if kept is None else kept.tolist()
    return dict(zip(tokens, (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    "how, wanted",
    [
        (Sampling(1.0), {0: 0.5, 1: 0.25, 2: 0.15, 3: 0.06, 4: 0.04}),
        (Sampling(0.5), {0: 0.7349, 1: 0.1837, 2: 0.0661, 3: 0.0106, 4: 0.0047}),
        (Sampling(1.0, top_k=2), {0: 2 / 3, 1: 1 / 3}),
        (Sampling(1.0, top_k=9), {0: 0.5, 1: 0.25, 2: 0.15, 3: 0.06, 4: 0.04}),
        (Sampling(1.0, top_p=0.6), {0: 2 / 3, 1: 1 / 3}),
        (Sampling(1.0, top_p=0.01), {0: 1.0}),
        # 0.5, 0.25 of the three that are left are 5/6 of them.
        (Sampling(1.0, top_k=3, top_p=0.8), {0: 2 / 3, 1: 1 / 3}),
    ],
)  # fmt: skip
def test_a_distribution_by_hand(how: Sampling, wanted: dict[int, float]) -> None:
    found = shares(LOGITS, how)
    assert set(found) == set(wanted)
    assert all(abs(found[token] - share) < 1e-3 for token, share in wanted.items())


@given(
    st.integers(0, 2**31),
    st.floats(0.2, 2.0),
    st.sampled_from([0, 1, 7, 40]),
    st.sampled_from([1.0, 0.95, 0.5, 0.05]),
)
def test_the_filters_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    import torch
    from transformers.generation import logits_process as theirs

    logits = (3 * np.random.default_rng(seed).standard_normal(600)).astype(np.float32)
    scores = torch.from_numpy(logits)[None] / temperature
    if top_k:
        scores = theirs.TopKLogitsWarper(top_k)(torch.zeros(1, 1), scores)
    if top_p < 1:
        scores = theirs.TopPLogitsWarper(top_p)(torch.zeros(1, 1), scores)
    wanted = torch.softmax(scores, -1)[0].numpy()
    found = shares(logits, Sampling(temperature, top_k, top_p))
    dense = np.zeros(600)
    dense[list(found)] = list(found.values())
    # A token at the edge of the nucleus may be in or out by a rounding of its sum.
    edge = np.flatnonzero((dense > 0) != (wanted > 0))
    assert len(edge) == 0 or wanted[edge].max() + dense[edge].max() < 0.1
    if not len(edge):
        np.testing.assert_allclose(dense, wanted, atol=1e-5)


@given(st.integers(0, 2**31), st.integers(1, 400), st.sampled_from([401, 640, 6500]))
def test_the_largest_are_those_of_a_full_sort(seed: int, count: int, size: int) -> None:
    # Few values, so that many are equal at the edge.
    logits = np.random.default_rng(seed).integers(0, 50, size).astype(np.float32)
    kept, _ = distribution(logits, Sampling(1.0, top_k=count))
    assert kept is not None and len(set(kept.tolist())) == count
    assert sorted(logits[kept]) == sorted(logits)[-count:]


def test_draws_come_as_often_as_their_probabilities() -> None:
    sampler = Sampler(Sampling(1.0, seed=1), range(2))
    drawn = np.array([sampler.choose(np.stack([LOGITS, LOGITS])) for _ in range(4000)])
    counts = np.stack([np.bincount(row, minlength=5) for row in drawn.T]) / 4000
    assert np.abs(counts - np.exp(LOGITS)).max() < 0.03
    assert (drawn[:, 0] != drawn[:, 1]).any()


def test_a_large_vocabulary_is_drawn_from_by_blocks() -> None:
    logits = np.full(600, -30.0, np.float32)
    logits[[0, 63, 64, 330, 599]] = LOGITS  # at the edges of blocks of 64, and in the last one
    sampler = Sampler(Sampling(1.0, seed=2), range(1))
    drawn = np.array([sampler.choose(logits[None])[0] for _ in range(4000)])
    counts = np.bincount(drawn, minlength=600)[[0, 63, 64, 330, 599]] / 4000
    assert np.abs(counts - np.exp(LOGITS)).max() < 0.03
    assert abs(counts.sum() - 1) < 1e-9


def test_greedy_takes_the_largest_and_a_seed_repeats() -> None:
    rows = np.stack([LOGITS, LOGITS[::-1]])
    assert Sampler(Sampling(), range(2)).choose(rows).tolist() == [0, 4]
    one, two = (Sampler(Sampling(1.0, seed=7), [3]) for _ in range(2))
    first = [int(one.choose(rows[:1])[0]) for _ in range(50)]
    assert first == [int(two.choose(rows[:1])[0]) for _ in range(50)]
    assert len(set(first)) > 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_step_is_cheap(top_k: int, top_p: float) -> None:
    logits = (3 * np.random.default_rng(0).standard_normal((1, 49152))).astype(np.float32)
    sampler = Sampler(Sampling(0.8, top_k, top_p), range(1))
    taken = []
    for _ in range(30):
        since = time.perf_counter()
        sampler.choose(logits)
        taken.append(time.perf_counter() - since)
    assert min(taken) < 3e-3  # a tenth of it on an idle machine


@pytest.mark.parametrize(
    "numbers", [{"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1}]
)
def test_numbers_out_of_range_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(InputError, match=": wanted"):
        Sampling(**numbers)  # type: ignore[arg-type]


def test_the_coldest_temperatures_take_the_most_likely_token() -> None:
    logits = np.array([[1.0, 3.0, 2.9999998, 0.0]], np.float32)
    for temperature in (1e-30, 1e-45, 1e-300):
        assert Sampler(Sampling(temperature), [0]).choose(logits).tolist() == [1]


@pytest.mark.parametrize(
    "options", [{"top_k": 2.5}, {"seed": 1.5}, {"temperature": "1"}, {"top_p": None}]
)
def test_numbers_of_another_kind_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"wanted a (whole )?number"):
        Sampling(**options)  # type: ignore[arg-type]
