"""The grid that integer codes of a group count: scales and zero points from least and largest.

`least` and `most` are float32 `[n, nb, 1]`, `codes` the least and the largest code; scales are
those that read back from the type `stored`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qgraph.formats.base import Array
from qgraph.formats.grouping import as_stored, divisors

FAR = 1024
"""Steps that a float zero point may lie away from zero: a float16 still holds every half."""


class Grid(NamedTuple):
    """What the codes of groups count: float32 `[n, nb, 1]`."""

    steps: Array
    zeros: Array | None = None
    clips: Array | None = None
    """Groups in which a code may exceed the highest; None where none can."""


def signed_grid(
    least: Array, most: Array, codes: tuple[int, int], stored: np.dtype[np.floating[Any]]
) -> Grid:
    """No zero points; the weight furthest from zero gets the least code, whatever its sign."""
    low, high = codes
    furthest = np.where(most > -least, most, least)
    steps = as_stored(furthest / np.float32(low), furthest, stored)
    opposite = np.where(steps > 0, most, least)
    return Grid(steps, None, np.rint(opposite / steps) > high)


def integer_grid(
    least: Array, most: Array, codes: tuple[int, int], stored: np.dtype[np.floating[Any]]
) -> Grid:
    """Zero points are codes, so the grid holds zero."""
    high = codes[1]
    least, most = np.minimum(least, 0), np.maximum(most, 0)
    span = most - least
    steps = as_stored(span / np.float32(high), span, stored)
    units = divisors(steps)
    zeros = np.rint(-least / units)
    return Grid(steps, zeros, np.rint(most / units) + zeros > high)


def float_grid(
    least: Array, most: Array, codes: tuple[int, int], stored: np.dtype[np.floating[Any]]
) -> Grid:
    """From the least to the largest weight, wherever zero lies.

    Where weights are far from zero and close together the step is kept at a share of their size,
    so that the zero point, up to FAR steps away, is a number that its type can hold.
    """
    reach = np.maximum(np.abs(least), np.abs(most))
    steps = np.maximum((most - least) / np.float32(codes[1]), reach / np.float32(FAR))
    steps = as_stored(steps, reach, stored)
    zeros = (-least / divisors(steps)).astype(stored).astype(np.float32)
    return Grid(steps, zeros)
