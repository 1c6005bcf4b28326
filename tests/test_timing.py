"""Interleaved timing: the order of turns, calls per round, medians and ratios, by a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qgraph.timing import MOST_CALLS, Ratio, Timing, interleave


class Clock:
    """Time that passes only while a side runs; notes which one ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def side(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.ran.append(name)

        return run


def test_every_side_has_its_turn_in_every_round_and_the_order_turns() -> None:
    clock = Clock()
    sides = {name: clock.side(name, 1.0) for name in "abc"}
    found = interleave(sides, 4, seconds=0.5, clock=clock)
    warm = ["a"] * 3 + ["b"] * 3 + ["c"] * 3  # two to warm up, one to learn the number of calls
    assert clock.ran[:9] == warm
    assert clock.ran[9:] == list("abcbcacababc")
    assert {name: timing.rounds for name, timing in found.items()} == dict.fromkeys(
        "abc", (1.0,) * 4
    )


@pytest.mark.parametrize("seconds,calls", [(1.0, 1), (0.25, 4), (0.3, 4), (1e-6, MOST_CALLS)])
def test_short_calls_are_repeated_to_fill_a_round(seconds: float, calls: int) -> None:
    clock = Clock()
    interleave({"a": clock.side("a", seconds)}, 3, seconds=1.0, clock=clock)
    assert len(clock.ran) == 3 + 3 * calls


def test_a_round_is_the_median_of_its_calls() -> None:
    clock = Clock()
    lengths = iter([1.0, 1.0, 0.3, *[0.3, 0.3, 9.0, 0.3], *[0.2, 0.2, 0.2, 0.2]])

    def side() -> None:
        clock.now += next(lengths)

    (timing,) = interleave({"a": side}, 2, seconds=1.0, clock=clock).values()
    assert timing.rounds == pytest.approx((0.3, 0.2))


def test_ratios_are_of_medians_and_their_spread_of_rounds() -> None:
    ours, other = Timing((1.0, 2.0, 4.0)), Timing((3.0, 4.0, 16.0))
    assert other.over(ours) == Ratio(2.0, 2.0, 4.0)
    assert ours.over(ours) == Ratio(1.0, 1.0, 1.0)
    assert other.each(4) == Timing((0.75, 1.0, 4.0))
