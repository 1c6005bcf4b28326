"""Ranges of a cache in few bits: how far out the codes of a channel reach.

In 4 bits a step is a seventh of the range, and values at its end are few: a range that leaves them
out has smaller steps for all others. A position of which a channel has the same error for all keys
changes all scores of a query by the same, which the softmax takes no notice of: what counts of
keys is how the errors spread.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from qgraph.formats.kv_cache import CacheFormat
from qgraph.observers import Histogram, Range

SHARES = tuple(1 - step / 20 for step in range(17))
"""Of the largest magnitude: the ranges that are tried."""
BINS = 128
"""On each side of 0, at least nine to a step of int4."""
_FORMAT = CacheFormat("int4")


@dataclasses.dataclass(eq=False)
class LeastError(Histogram):
    """The range of each channel, or of all with one scale, by which rounding moves values least.

    format: what is rounded to. spread: whether an error that all values have does not count, as
    for keys.
    """

    bins: int = BINS
    axis: int | None = -1
    format: CacheFormat = _FORMAT
    spread: bool = False

    def _clip(self) -> Range:
        reach = self.reach(np.zeros_like(self.low))
        return -reach, reach

    def reach(self, offset: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far the range goes to both sides of `offset`, `[C]` both."""
        largest = np.maximum(np.abs(self.low - offset), np.abs(self.high - offset))
        middles = np.arange(-self.bins, self.bins)[:, None] + 0.5
        middles = np.clip(middles * self.width, self.low, self.high) - offset
        x = middles[None, None].astype(np.float32)
        share = self.counts.T / self.values
        best, chosen = np.full_like(largest, np.inf), largest
        for each in SHARES:
            loss = self._loss(x, share, each * largest)
            chosen = np.where(loss < best, each * largest, chosen)
            best = np.minimum(loss, best)
        return chosen

    def _loss(
        self, x: NDArray[np.float32], share: NDArray[np.float64], reach: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Mean squared error of each channel for ranges up to `reach`, `[C]`; of all, repeated."""
        scales = self.format.scales(reach[None])
        error = (self.format.dequantize(self.format.quantize(x, scales), scales) - x)[0, 0]
        found: NDArray[np.float64] = np.einsum("bc,bc,bc->c", error, error, share)
        if self.spread:
            found = found - np.einsum("bc,bc->c", error, share) ** 2
        one = self.format.scale == "tensor"
        return np.full_like(found, found.sum()) if one else found
