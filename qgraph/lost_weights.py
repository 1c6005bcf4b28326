"""Weights of which quantizing leaves nothing, because their scales are below what a type holds."""

from __future__ import annotations

import math

import numpy as np

from qgraph.errors import InputError
from qgraph.formats.base import QuantizedWeight
from qgraph.formats.grouping import smallest_normal
from qgraph.quant_tensor import QuantSource

LOST = 0.9
"""A relative error above this: nothing is left, zeros have 1 (2 bits leave 0.3 to 0.7)."""


class Tally:
    """How much of one weight is left, added up over blocks of its rows as they are written."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, source: QuantSource, start: int, stop: int, found: QuantizedWeight) -> None:
        """Take in rows `start:stop`, as they are written; again: in place of what was there.

        Only where scales are no normal numbers are the rows looked at once more. Elsewhere the
        sum of the squared scales stands for the squared norm, which is never less: rounding gives
        the largest weight of a group a code of one step at least.
        """
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
