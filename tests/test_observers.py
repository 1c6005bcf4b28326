"""Observers against exact quantiles, against themselves in other orders, and on hand examples."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qgraph.errors import InputError
from qgraph.formats.small_floats import E4M3
from qgraph.observers import KINDS, Entropy, MinMax, Observer, Percentile, observer

VALUES = st.floats(-(2.0**100), 2.0**100, width=32)
SOME = arrays(np.float32, st.integers(1, 60), elements=VALUES)
ANY = pytest.mark.parametrize("kind", list(KINDS))


def seen(made: Observer, *parts: Any) -> Observer:
    for part in parts:
        made.update(np.asarray(part))
    return made


def same(one: Observer, other: Observer) -> None:
    for name in ("low", "high", "counts", "exponents"):
        if hasattr(one, name) or hasattr(other, name):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.values == other.values
    np.testing.assert_array_equal(one.range(), other.range())


@ANY
@given(x=SOME, data=st.data())
@settings(max_examples=40, deadline=None)
def test_neither_order_nor_batches_matter(kind: str, x: np.ndarray, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=3)))
    mixed = np.random.default_rng(0).permutation(x)
    whole, parts = observer(kind, "x"), observer(kind, "x")
    seen(whole, x)
    seen(parts, *np.split(mixed, cuts))
    same(whole, parts)


@ANY
@given(x=SOME, other=SOME)
@settings(max_examples=40, deadline=None)
def test_merging_is_seeing_both(kind: str, x: np.ndarray, other: np.ndarray) -> None:
    one, two = seen(observer(kind, "x"), x), seen(observer(kind, "x"), other)
    before = two.range()
    one.merge(two)
    same(one, seen(observer(kind, "x"), x, other))
    np.testing.assert_array_equal(two.range(), before)
    empty = observer(kind, "x")
    empty.merge(observer(kind, "x"))
    empty.merge(two)
    same(empty, two)


@given(x=SOME)
@settings(deadline=None)
def test_extremes_are_exact(x: np.ndarray) -> None:
    low, high = seen(MinMax(), x).range()
    assert (low, high) == (x.min(), x.max())


@given(x=SOME, percent=st.floats(51, 100), bins=st.sampled_from([64, 4096]))
@settings(max_examples=200, deadline=None)
def test_percentiles_are_within_a_bin_of_exact_quantiles(
    x: np.ndarray, percent: float, bins: int
) -> None:
    made = Percentile(percent=percent, bins=bins)
    low, high = seen(made, x).range()
    wide = x.astype(np.float64)
    tail = (1 - percent / 100) / 2
    for found, share in ((low, tail), (high, 1 - tail)):
        exact = np.quantile(wide, share, method="inverted_cdf")
        assert abs(found - exact) <= made.width[0]
    assert made.width[0] <= 2 * np.abs(wide).max() / bins or not wide.any()
    assert wide.min() <= low <= high <= wide.max()


def test_a_percentile_of_much_data() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.standard_normal(1_000_000), rng.standard_normal(50) * 500])
    made = seen(Percentile(), *np.array_split(rng.permutation(x), 7))
    low, high = made.range()
    exact = np.quantile(x, [0.00005, 0.99995])
    assert np.abs(np.array([low, high]) - exact).max() < 2 * made.width[0]
    assert np.abs(x).max() > 100 * high


def test_channels_have_ranges_of_their_own() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 5, 4)).astype(np.float32) * [1, 0, 100, 1e-20]
    for kind in KINDS.values():
        low, high = seen(kind(axis=-1), x[:1], x[1:]).range()
        alone = [seen(kind(axis=0), x[..., c].reshape(1, -1)).range() for c in range(4)]
        np.testing.assert_array_equal(low, [a[0][0] for a in alone])
        np.testing.assert_array_equal(high, [a[1][0] for a in alone])
    low, high = seen(MinMax(axis=1), x).range()
    np.testing.assert_array_equal(high, x.max(axis=(0, 2)))


def test_memory_is_fixed() -> None:
    made = Percentile()
    for at in range(20):
        made.update(np.full(1000, 3.0**at))
    assert made.counts.shape == (1, 8192)
    assert made.counts.sum() == made.values == 20_000
    assert made.exponents[0] == np.frexp(3.0**19)[1]


def test_zeros_alone_are_a_range() -> None:
    for kind in KINDS:
        made = seen(observer(kind, "x"), np.zeros(10), np.zeros(3))
        assert made.range() == (0, 0)
        made.update(np.array([2.0]))
        assert made.range()[1] == 2.0


def test_bins_are_counted_by_hand() -> None:
    made = Percentile(bins=4)
    made.update(np.array([0.0, 0.9, 1.0, -0.1, -1.0, 3.9]))
    assert made.width[0] == 1
    np.testing.assert_array_equal(made.counts[0], [0, 0, 0, 2, 2, 1, 0, 1])
    made.update(np.array([-7.0]))
    assert made.width[0] == 2
    np.testing.assert_array_equal(made.counts[0], [1, 0, 0, 2, 3, 1, 0, 0])


def test_entropy_clips_few_far_values_and_no_even_ones() -> None:
    rng = np.random.default_rng(3)
    usual = rng.standard_normal(200_000)
    far = np.concatenate([usual, rng.uniform(50, 60, 20)])
    low, high = seen(Entropy(), far).range()
    assert 3 < high < 8
    assert -8 < low < -3
    low, high = seen(Entropy(), rng.uniform(-1, 1, 200_000)).range()
    assert high > 0.97
    assert low < -0.97
    low, high = seen(Entropy(), np.abs(usual)).range()
    assert low == np.abs(usual).min()


def test_entropy_of_floats_clips_less() -> None:
    """FP8's levels are fine near zero whatever the clip is: nothing is won by a small one."""
    values = E4M3[:127] / E4M3[126]
    x = np.random.default_rng(4).standard_normal(100_000)
    x[:10] *= 20
    integers = seen(Entropy(), x).range()[1]
    floats = seen(observer("entropy", "x", tuple(values.tolist())), x).range()[1]
    assert floats > 1.5 * integers


@ANY
@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_what_is_not_finite_is_named(kind: str, bad: float, word: str) -> None:
    x = np.ones((4, 3))
    x[2, 1] = bad
    with pytest.raises(InputError, match=rf"h3 holds {word} \(value 7, 1 such"):
        observer(kind, "h3").update(x)
    with pytest.raises(InputError, match=rf"h3 holds {word} \(value 2 of channel 1"):
        KINDS[kind]("h3", axis=1).update(x)


def test_bad_input_says_so() -> None:
    with pytest.raises(InputError, match="x: no values were seen"):
        observer("minmax", "x").range()
    with pytest.raises(InputError, match="did you mean 'percentile'"):
        observer("percentiles", "x")
    with pytest.raises(InputError, match="percentile 101: wanted above 50, at most 100"):
        Percentile(percent=101)
    with pytest.raises(InputError, match="100 bins a side: wanted a power of two"):
        Entropy(bins=100)
    with pytest.raises(InputError, match="2 channels, 3 before"):
        seen(MinMax("x", axis=-1), np.ones((2, 3)), np.ones((2, 2)))
    with pytest.raises(InputError, match="does not merge"):
        seen(Percentile(), [1.0]).merge(seen(Percentile(percent=90), [1.0]))
    with pytest.raises(InputError, match="2 channels does not merge into one of 3"):
        seen(MinMax(axis=0), np.ones((3, 2))).merge(seen(MinMax(axis=0), np.ones((2, 2))))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats(dtype: Any) -> None:
    x = np.linspace(-3, 2, 50).astype(dtype)
    assert seen(MinMax(), x, x[:0]).range() == (-3, 2)
