"""Weights of which quantizing leaves nothing, because their scales are below what a type holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight
from qgraph.formats.grouping import smallest_normal
from qgraph.quant_tensor import QuantSource
from qgraph.wording import counted

LOST = 0.9
"""A relative error above this: nothing is left, zeros have 1 (2 bits leave 0.3 to 0.7)."""


@dataclasses.dataclass(frozen=True)
class Coarse:
    """What float16 scales cost one weight whose steps would be smaller than they can be.

    raised: groups whose scale was raised to the least normal number, of `groups`.
    error: ‖W − Ŵ‖/‖W‖, or a little more.
    """

    name: str
    raised: int = 0
    groups: int = 0
    error: float = 0.0


def raised(scales: Array) -> int:
    """How many scales are the least normal number of float16, or below it, and not 0."""
    if scales.dtype != np.float16:
        return 0
    sizes = np.abs(scales)
    return int(np.count_nonzero((sizes > 0) & (sizes <= smallest_normal(scales.dtype))))


def coarse_notes(found: Iterable[Coarse], way: str) -> list[str]:
    """A note on the weights that lost bits to float16 scales, though not all of them.

    Args:
        found: of any weights.
        way: what else than `--exclude` helps.
    """
    worse = [each for each in found if each.raised]
    if not worse:
        return []
    worst = max(worse, key=lambda each: each.error)
    some = f"{sum(each.raised for each in worse)} of {sum(each.groups for each in worse)}"
    return [
        f"{some} groups in {counted(len(worse), 'weight')} have steps that are too "
        f"coarse, for float16 scales go no lower: {worst.name} is {worst.error:.1%} off; keep it "
        f"in float with --exclude '{worst.name}'{way}"
    ]


class Tally:
    """How much of one weight is left, added up over blocks of its rows as they are written."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], tuple[float, float]] = {}
        self._groups: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, source: QuantSource, start: int, stop: int, found: QuantizedWeight) -> None:
        """Take in rows `start:stop`, as they are written; again: in place of what was there.

        Only where scales are no normal numbers are the rows looked at once more. Elsewhere the
        sum of the squared scales stands for the squared norm, which is never less: rounding gives
        the largest weight of a group a code of one step at least.
        """
        self._groups[start, stop] = raised(found.scales), found.scales.size
        sizes = np.abs(found.scales.astype(np.float64)).reshape(-1)
        if (sizes <= smallest_normal(found.scales.dtype)).any():
            seen = source.deviation(start, stop, found)
            self._sums[start, stop] = seen.error_sq, seen.norm_sq
        else:
            self._sums[start, stop] = 0.0, float(sizes @ sizes)

    @property
    def error(self) -> float:
        """‖W − Ŵ‖/‖W‖ where scales are no normal numbers; no more than that elsewhere."""
        error, norm = (sum(each) for each in zip(*self._sums.values(), strict=True))
        return math.sqrt(error / norm) if norm else 0.0

    def coarse(self, name: str) -> Coarse:
        """What float16 scales cost the weight of this name."""
        count, groups = (sum(each) for each in zip((0, 0), *self._groups.values(), strict=True))
        return Coarse(name, count, groups, self.error if count else 0.0)

    def check(self, name: str, stored: str) -> None:
        """Refuse a weight that is lost.

        Args:
            name: the weight.
            stored: the type of its scales.

        Raises:
            InputError: names the weight, how far it is off, and the way out.
        """
        if self._sums and self.error > LOST:
            raise InputError(
                f"weight {name}: WEIGHT_LOST: quantized, it is {self.error:.0%} off, for its "
                f"scales are below what {stored} holds; keep it in float with "
                f"--exclude '{name}'{WIDER if stored == 'float16' else ''}"
            )


WIDER = ", or take a layout whose scales are float32, such as compressed-tensors"
"""The way out where it is the layout that wants scales in float16."""
IN_FLOAT32 = ", or make the model float32 first"
"""The way out where it is the graph's own type."""
