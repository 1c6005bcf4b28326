"""One option for each unit, of least total cost within a budget: a multiple-choice knapsack.

Solved by Lagrangian relaxation, which gives a bound and removes most options, then by dynamic
programming over the undominated (size, cost) pairs of what is left, which is exact unless there
are too many of them (Kellerer, Pferschy, Pisinger: Knapsack Problems, chapter 11).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
STATES = 100_000
"""Undominated pairs that are followed at once; above it the least promising ones are left out."""
_SLACK = 1e-12
"""Relative: what sums of floats in another order may differ by."""


@dataclasses.dataclass(frozen=True)
class Picked:
    """What was chosen.

    options: the index of each unit's option.
    cost, size: totals. bound: no choice within the budget costs less than this.
    """

    options: tuple[int, ...]
    cost: float
    size: float
    bound: float

    @property
    def gap(self) -> float:
        """How much cheaper another choice could be at most, relative to this one's cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


def pick(
    costs: Sequence[ArrayLike], sizes: Sequence[ArrayLike], budget: float, states: int = STATES
) -> Picked | None:
    """The choice of least cost whose sizes sum to at most `budget`; None where none fits.

    Args:
        costs: per unit the cost of each option, finite.
        sizes: per unit the size of each option, finite, 0 or more.
        budget: on the sum of sizes.
        states: how many pairs the dynamic programming follows.
    """
    task = _Task(
        [np.asarray(c, np.float64) for c in costs], [np.asarray(s, np.float64) for s in sizes]
    )
    budget *= 1 + _SLACK
    if sum(size.min() for size in task.sizes) > budget:
        return None
    return _Search(task, budget).run(states)


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    costs: list[Doubles]
    sizes: list[Doubles]

    def total(self, options: Sequence[int]) -> tuple[float, float]:
        """Cost and size of a choice."""
        cost = sum(each[at] for each, at in zip(self.costs, options, strict=True))
        return float(cost), float(sum(e[at] for e, at in zip(self.sizes, options, strict=True)))

    def relaxed(self, price: float) -> tuple[list[int], list[Doubles]]:
        """The best option of each unit where size costs `price`, and all options' costs then."""
        reduced = [cost + price * size for cost, size in zip(self.costs, self.sizes, strict=True)]
        # Of equal ones the smallest: a high price then always leads to a choice that fits.
        best = [
            int(np.lexsort((size, each))[0]) for each, size in zip(reduced, self.sizes, strict=True)
        ]
        return best, reduced


class _Search:
    def __init__(self, task: _Task, budget: float) -> None:
        self.task, self.budget = task, budget
        self.best: list[int] = []
        self.price = self._price()
        self._fill()
        self.upper, _ = task.total(self.best)

    def _price(self) -> float:
        """The price of size at which the relaxed choice just fits; `best` becomes that choice."""
        self.best, _ = self.task.relaxed(0.0)
        if self._fits(self.best):
            return 0.0
        spread = sum(float(np.ptp(cost)) for cost in self.task.costs)
        low, high = 0.0, max(spread, 1e-300) / max(self.budget, 1.0)
        while not self._fits(self.task.relaxed(high)[0]):
            low, high = high, 4 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (low, middle) if self._fits(self.task.relaxed(middle)[0]) else (middle, high)
            )
        self.best, _ = self.task.relaxed(high)
        return high

    def _fits(self, options: Sequence[int]) -> bool:
        return self.task.total(options)[1] <= self.budget

    def _fill(self) -> None:
        """Spend what is left: the option that saves most of those that still fit, and again."""
        while True:
            room = self.budget - self.task.total(self.best)[1]
            saved, unit, option = max(
                (
                    (float(cost[at] - cost[other]), unit, other)
                    for unit, (cost, size, at) in enumerate(
                        zip(self.task.costs, self.task.sizes, self.best, strict=True)
                    )
                    for other in np.flatnonzero(size - size[at] <= room)
                ),
                default=(0.0, 0, 0),
            )
            if saved <= 0:
                return
            self.best[unit] = int(option)

    def run(self, states: int) -> Picked:
        """The best choice, and the bound that is proven."""
        if self.price == 0:
            return Picked(tuple(self.best), self.upper, self.task.total(self.best)[1], self.upper)
        options, dropped = self._programmed(states)
        cost, size = self.task.total(options)
        return Picked(tuple(options), cost, size, min(cost, dropped))

    def _programmed(self, states: int) -> tuple[list[int], float]:
        """Dynamic programming; the best choice, and a bound on all that it left out."""
        _, reduced = self.task.relaxed(self.price)
        least = [float(each.min()) for each in reduced]
        # What the units behind the current one take at least: size, and relaxed cost.
        smallest = np.cumsum([size.min() for size in self.task.sizes][::-1])[::-1]
        relaxed = np.cumsum(least[::-1])[::-1]
        allowed = self.upper + _SLACK * abs(self.upper)
        cost, size = np.zeros(1), np.zeros(1)
        trail: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        dropped = np.inf
        floor = float(relaxed[0]) - self.price * self.budget
        for unit in range(len(reduced)):
            kept = np.flatnonzero(floor + reduced[unit] - least[unit] <= allowed)
            new_cost = (cost[:, None] + self.task.costs[unit][kept]).ravel()
            new_size = (size[:, None] + self.task.sizes[unit][kept]).ravel()
            last = unit + 1 == len(reduced)
            rest_size, rest = (0.0, 0.0) if last else (smallest[unit + 1], float(relaxed[unit + 1]))
            bound = new_cost + self.price * (new_size - self.budget) + rest
            chosen = np.flatnonzero((new_size + rest_size <= self.budget) & (bound <= allowed))
            chosen = chosen[_undominated(new_size[chosen], new_cost[chosen])]
            if len(chosen) > states:
                order = np.argsort(bound[chosen], kind="stable")
                dropped = min(dropped, float(bound[chosen[order[states]]]))
                chosen = chosen[np.sort(order[:states])]
            trail.append((chosen // len(kept), kept[chosen % len(kept)]))
            cost, size = new_cost[chosen], new_size[chosen]
            if not len(cost):  # nothing betters what is known
                return self.best, dropped
        at = int(np.argmin(cost))
        if cost[at] >= self.upper:
            return self.best, dropped
        options = []
        for parent, option in reversed(trail):
            options.append(int(option[at]))
            at = int(parent[at])
        return options[::-1], dropped


def _undominated(size: Doubles, cost: Doubles) -> NDArray[np.intp]:
    """The indices of pairs that no other one betters in both, by rising size."""
    order = np.lexsort((cost, size))
    falling = np.minimum.accumulate(cost[order])
    keep = np.ones(len(order), np.bool_)
    keep[1:] = cost[order][1:] < falling[:-1]
    return order[keep]
