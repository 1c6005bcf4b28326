"""Float zero points said otherwise: s·(q − z) = s·(q − h) + m, h the middle of the codes.

m = s·(h − z), the *minimum* of a group moved by h steps. Kernels without float zero points then
multiply s·(q − h), and m multiplies the sum of the group's activations, in floats.
"""

from __future__ import annotations

import numpy as np

from qgraph.formats.parts import Array, QuantizedWeight

MINIMUMS = "minimums"
"""Their name among the parts, float32 `[n, nb]`; in `QuantizedWeight.more` they may be float64."""


def minimums(weight: QuantizedWeight, middle: int) -> Array:
    """Those that the weight has, or those of its zero points: float32 `[n, nb]`."""
    if MINIMUMS in weight.more:
        stored: Array = weight.more[MINIMUMS].astype(np.float32, copy=False)
        return stored
    assert weight.zeros is not None
    offsets = middle - weight.zeros.astype(np.float64)
    found: Array = (weight.scales.astype(np.float64) * offsets).astype(np.float32)
    return found


def zero_points(scales: Array, found: Array, middle: int) -> Array:
    """Zero points `[n, nb]` in the type of the scales, to the precision of that type and of m."""
    wide = scales.astype(np.float64)
    ratio = np.divide(found, wide, out=np.zeros_like(wide), where=wide != 0)
    return (middle - ratio).astype(scales.dtype)
