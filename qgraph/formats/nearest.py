"""The nearest level of a table: which code a float32 gets, for any table of levels.

A float32's upper 16 bits (sign, exponent, 7 bits of fraction) name an interval that holds at most
one threshold between neighbouring levels: one look-up finds it, one comparison settles the code.
"""

from __future__ import annotations

import functools

import numpy as np

from qgraph.formats.base import Array


class Nearest:
    """Codes of the levels nearest to float32 values, ties to the even code.

    Values beyond the outermost levels get those; NaN gets any code. Where a table has two zeros,
    values keep their sign. Every gap between levels must be wider than 1/128 of what it lies at.
    """

    def __init__(self, levels: Array) -> None:
        """Take the levels in the order of their codes, float32 `[codes]`; NaN for no level."""
        self._thresholds = np.full(1 << 16, np.inf, np.float32)
        self._codes = np.zeros(1 << 17, np.uint8)
        for half in (0, 1):
            self._fill(levels, half)

    def _fill(self, levels: Array, negative: int) -> None:
        """The intervals of one sign."""
        at = slice(negative << 15, (negative << 15) + 0x7F80)  # below infinity
        first = np.arange(at.start, at.stop, dtype=np.uint32) << 16
        ends = first.view(np.float32), (first | 0xFFFF).view(np.float32)
        lower, upper = reversed(ends) if negative else ends
        usable = np.flatnonzero(np.isfinite(levels))
        zeros = usable[levels[usable] == 0]
        if len(zeros) > 1:
            other = np.signbit(levels[zeros]) != bool(negative)
            usable = np.setdiff1d(usable, zeros[other])
        codes = usable[np.argsort(levels[usable], kind="stable")]
        thresholds = thresholds_between(levels[codes], codes)
        low, high = (np.searchsorted(thresholds, end, "left") for end in (lower, upper))
        assert (high - low <= 1).all()
        inside = low < high
        self._thresholds[at][inside] = thresholds[low[inside]]
        pairs = self._codes.reshape(-1, 2)[at]
        pairs[:, 0], pairs[:, 1] = codes[low], codes[high]
        beyond = slice(at.stop, at.start + (1 << 15))  # infinity and NaN
        self._codes.reshape(-1, 2)[beyond] = pairs[-1, 0 if negative else 1]

    def codes(self, values: Array) -> Array:
        """Codes, uint8, of float32 values in one piece of memory."""
        index = values.view(np.uint32) >> np.uint32(16)
        above = values > np.take(self._thresholds, index, mode="clip")
        index <<= np.uint32(1)
        index |= above
        found: Array = np.take(self._codes, index, mode="clip")
        return found


def thresholds_between(levels: Array, codes: Array) -> Array:
    """The largest float32 that still gets the lower of two neighbouring levels.

    levels: float32, rising, each of another value; codes: theirs, of which ties take the even one.
    """
    wide = levels.astype(np.float64)
    middle = (wide[:-1] + wide[1:]) / 2
    with np.errstate(under="ignore"):
        found = middle.astype(np.float32)
    found = np.where(found > middle, np.nextafter(found, np.float32(-np.inf)), found)
    tie_goes_up = (found == middle) & (codes[:-1] % 2 == 1)
    found = np.where(tie_goes_up, np.nextafter(found, np.float32(-np.inf)), found)
    return found.astype(np.float32)


@functools.cache
def nearest(levels: bytes) -> Nearest:
    """The look-up for levels given as the bytes of their float32 array."""
    return Nearest(np.frombuffer(levels, np.float32))
