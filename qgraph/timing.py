"""Times that can be compared: all sides in one process, turn by turn, with their spread.

Machines change their speed by the minute, so two sides that are measured one after the other
are compared with the weather. Here each round gives every side its turn, and a ratio is taken
within the round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping

ROUND_SECONDS = 0.02
"""About how long a side is run in one round, unless one call takes longer."""
MOST_CALLS = 500
_WARM = 2


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and the least and largest ratio within one round."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call of a side: for each round the median of its calls."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of a call, the median of all rounds."""
        return statistics.median(self.rounds)

    def each(self, count: int) -> Timing:
        """Of one of `count` equal parts of a call."""
        return Timing(tuple(seconds / count for seconds in self.rounds))

    def over(self, other: Timing) -> Ratio:
        """How many times as long this side takes as `other`, which ran in the same rounds."""
        ratios = [a / b for a, b in zip(self.rounds, other.rounds, strict=True)]
        return Ratio(self.median / other.median, min(ratios), max(ratios))


def interleave(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    seconds: float = ROUND_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every side in each of `rounds` rounds; the order turns by one from round to round.

    Each side is called before it counts: to warm up, and once to learn how many calls fill
    `seconds`.
    """
    calls: dict[str, int] = {}
    for name, side in sides.items():
        for _ in range(_WARM):
            side()
        once = max(_timed(side, clock), 1e-9)
        calls[name] = min(MOST_CALLS, max(1, math.ceil(seconds / once)))
    found: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            taken = [_timed(sides[name], clock) for _ in range(calls[name])]
            found[name].append(statistics.median(taken))
        order = [*order[1:], *order[:1]]
    return {name: Timing(tuple(times)) for name, times in found.items()}


def _timed(side: Callable[[], object], clock: Callable[[], float]) -> float:
    since = clock()
    side()
    return clock() - since
