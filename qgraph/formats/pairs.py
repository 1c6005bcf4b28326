"""`int8-pairs`: rows of 8 bits whose products with bytes never leave 16 bits.

The fastest integer kernels of processors without VNNI instructions multiply uint8 by int8 and add
the products of two neighbours, columns 2i and 2i + 1, in 16 bits: 255 · 127 · 2 saturates there.
Here the codes of two such columns add up to at most 128 in magnitude, and 255 · 128 fits. (Of two
codes of unlike signs no sum of products is further from zero than the larger product.) A row's
scale is max(|w|, |w₂ᵢ + w₂ᵢ₊₁|)/127: on Gaussian weights a quarter larger than that of `int8-row`,
where leaving the lowest bit out (7 bits) would double it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from qgraph.formats.base import Array, QuantizedWeight
from qgraph.formats.grouping import as_stored, extremes
from qgraph.formats.integer_grids import Grid
from qgraph.formats.integer_groups import IntegerGroups

MOST = 128
"""The most that two codes add up to: 255 · 128 < 2¹⁵."""


@dataclasses.dataclass(frozen=True)
class PairedRows(IntegerGroups):
    """Signed codes with one scale a row, for kernels that add pairs of products in 16 bits."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """None."""
        return {}

    @property
    def has_ranges(self) -> bool:
        """No: on a smaller scale pairs would not fit."""
        return False

    @property
    def fits_16_bits(self) -> bool:
        """See `Format.fits_16_bits`."""
        return True

    def _grid(self, groups: Array, work: Array, stored: np.dtype[np.floating[Any]]) -> Grid:
        """Rounded, codes add up to at most 1 more than the numbers: 127 leaves room for it."""
        most = extremes(groups, work, absolute=True)[0]
        even = groups.shape[2] // 2 * 2
        if even:
            sums = groups[..., 0:even:2] + groups[..., 1:even:2]
            most = np.maximum(most, np.abs(sums, out=sums).max(axis=2, keepdims=True))
        return Grid(as_stored(most / np.float32(self.code_range[1]), most, stored))

    def settled(self, weight: QuantizedWeight) -> QuantizedWeight:
        """See `Format.settled`: both codes of a pair that is too large are made smaller alike."""
        if fit_16_bits(weight.codes):
            return weight
        codes = np.ascontiguousarray(weight.codes).astype(np.int16)
        even = codes.shape[1] // 2 * 2
        pairs = codes[:, :even].reshape(len(codes), -1, 2)
        total = pairs.sum(axis=2, dtype=np.int16)
        excess = np.maximum(np.abs(total) - MOST, 0) * np.sign(total)
        pairs -= np.stack([excess - excess // 2, excess // 2], axis=2)
        codes[:, :even] = pairs.reshape(len(codes), -1)
        return dataclasses.replace(weight, codes=codes.astype(np.int8))


def fit_16_bits(codes: Array) -> bool:
    """Whether bytes times two neighbours of the signed codes `[n, K]` always fit 16 bits."""
    even = codes.shape[1] // 2 * 2
    sums = codes[:, 0:even:2].astype(np.int16) + codes[:, 1:even:2]
    return bool((np.abs(sums, out=sums) <= MOST).all())


INT8_PAIRS = PairedRows("int8-pairs", 8, symmetric=True, group=0)
