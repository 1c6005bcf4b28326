"""The choice of one option for each unit, against all choices there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgraph.knapsack import pick

Units = list[list[tuple[float, int]]]
PAIRS = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 30)), min_size=1, max_size=4)


def parts(units: Units) -> tuple[list[list[float]], list[list[int]]]:
    return [[c for c, _ in unit] for unit in units], [[s for _, s in unit] for unit in units]


def brute(units: Units, budget: float) -> float | None:
    """The least cost of all choices."""
    totals = [np.sum(choice, axis=0) for choice in itertools.product(*units)]
    return min((cost for cost, size in totals if size <= budget), default=None)


@given(st.lists(PAIRS, min_size=1, max_size=6), st.integers(0, 120))
def test_least_cost_of_all_choices(units: Units, budget: int) -> None:
    found = pick(*parts(units), budget)
    best = brute(units, budget)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.gap <= 1e-9
    chosen = [unit[at] for unit, at in zip(units, found.options, strict=True)]
    assert found.cost == pytest.approx(sum(cost for cost, _ in chosen))
    assert found.size == sum(size for _, size in chosen) <= budget


@given(st.lists(PAIRS, min_size=1, max_size=6), st.integers(0, 120))
def test_bound_holds_where_pairs_are_left_out(units: Units, budget: int) -> None:
    found = pick(*parts(units), budget, states=2)
    best = brute(units, budget)
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert found.size <= budget
    assert found.bound <= best * (1 + 1e-9) + 1e-12
    assert best <= found.cost * (1 + 1e-9) + 1e-12


@given(st.lists(PAIRS, min_size=1, max_size=6), st.floats(0, 60))
def test_cost_and_size_change_places(units: Units, limit: float) -> None:
    """The least size within a limit on the cost."""
    costs, sizes = parts(units)
    found = pick(sizes, costs, limit)
    turned: Units = [[(size, cost) for cost, size in unit] for unit in units]  # type: ignore[misc]
    best = brute(turned, limit * (1 + 1e-12))
    assert (found is None) == (best is None)
    if found is not None:
        assert found.cost == best


def test_hand_example() -> None:
    """Of 3 units and 10 bytes: the relaxed choice leaves 2 bytes over, the best one none."""
    costs = [[9, 4, 1], [6, 3], [5, 1]]
    sizes = [[1, 3, 6], [2, 3], [1, 4]]
    found = pick(costs, sizes, 10)
    assert found is not None
    assert (found.options, found.cost, found.size) == ((1, 1, 1), 8, 10)


def test_no_choice_fits() -> None:
    assert pick([[1, 2]], [[5, 4]], 3) is None


def test_everything_fits() -> None:
    found = pick([[3, 1, 1]], [[1, 9, 7]], 100)
    assert found is not None
    assert (found.options, found.gap) == ((2,), 0.0)


def test_a_whole_model_is_solved_exactly() -> None:
    """As many units as a model has linears, options as formats have: exact, and in no time."""
    rng = np.random.default_rng(0)
    weights = rng.integers(100_000, 900_000, 300)
    bits = np.array([3.0625, 4.25, 4.5, 4.5625, 5.125, 8.5])
    error = np.array([15.0, 1.25, 1.1, 1.0, 0.8, 0.005])
    costs = rng.lognormal(0, 1.5, 300)[:, None] * error
    sizes = weights[:, None] * bits // 8
    found = pick(costs, sizes, float(weights.sum()) * 4.5 / 8)
    assert found is not None
    assert found.gap == 0
    uniform = costs[:, 2].sum()
    assert found.cost < 0.7 * uniform
