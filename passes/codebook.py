"""Rounding to what the codes of a format stand for, on torch: ŵ = step · scale.

Solvers keep codes as their arithmetic makes them: whole numbers in float32, or positions among
the levels of a table in the order of their size. `stored` makes codes of the format of them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from qgraph.formats.base import Array, Format
from qgraph.formats.nearest import thresholds_between

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Codebook(ABC):
    """Which codes there are, and which one is nearest to a weight."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of codes as solvers keep them."""

    @abstractmethod
    def nearest(self, ratio: Tensor, zero: Tensor) -> Tensor:
        """The codes nearest to weights over scales; `ratio` may be overwritten.

        Ties go where the format's own rounding has them.
        """

    @abstractmethod
    def steps(self, codes: Tensor, zero: Tensor) -> Tensor:
        """What codes stand for in units of the scale, float32."""

    @abstractmethod
    def stored(self, codes: Tensor) -> Array:
        """The format's codes, `[…]` of any integer type."""


@dataclasses.dataclass(frozen=True)
class Integers(Codebook):
    """Whole numbers from `low` to `high`, less a zero point; 0 where there is none."""

    low: int
    high: int

    @property
    def dtype(self) -> torch.dtype:
        """See `Codebook.dtype`."""
        import torch

        return torch.float32

    def nearest(self, ratio: Tensor, zero: Tensor) -> Tensor:
        """See `Codebook.nearest`: zero points are codes, so ties are those of the ratio."""
        return ratio.round_().add_(zero).clamp_(self.low, self.high)

    def steps(self, codes: Tensor, zero: Tensor) -> Tensor:
        """See `Codebook.steps`."""
        return codes - zero

    def stored(self, codes: Tensor) -> Array:
        """See `Codebook.stored`."""
        found: Array = codes.cpu().numpy().astype(np.int16)
        return found


@dataclasses.dataclass(frozen=True)
class Shifted(Integers):
    """Whole numbers less a zero point that may lie between them."""

    def nearest(self, ratio: Tensor, zero: Tensor) -> Tensor:
        """See `Codebook.nearest`."""
        return ratio.add_(zero).clamp_(self.low, self.high).round_()


@dataclasses.dataclass(frozen=True, eq=False)
class Table(Codebook):
    """The levels of a table; of two that are equal, as +0 and −0 are, the first one's code.

    levels: float32, rising. thresholds: float32, between them: the largest number that is still
    rounded down. codes: uint8, the format's code of each level.
    """

    levels: Tensor
    thresholds: Tensor
    codes: Array

    @classmethod
    def of(cls, values: Array, device: torch.device) -> Table:
        """The table of a format's levels, NaN for codes that are no number."""
        import torch

        usable = np.flatnonzero(np.isfinite(values))
        rising, first = np.unique(values[usable], return_index=True)
        codes = usable[first]
        thresholds = thresholds_between(rising, codes)
        levels, between = (torch.from_numpy(part).to(device) for part in (rising, thresholds))
        return cls(levels, between, codes.astype(np.uint8))

    @property
    def dtype(self) -> torch.dtype:
        """See `Codebook.dtype`."""
        import torch

        return torch.int32

    def nearest(self, ratio: Tensor, zero: Tensor) -> Tensor:
        """See `Codebook.nearest`; there are no zero points."""
        import torch

        return torch.bucketize(ratio, self.thresholds, out_int32=True)

    def steps(self, codes: Tensor, zero: Tensor) -> Tensor:
        """See `Codebook.steps`."""
        return self.levels[codes]

    def stored(self, codes: Tensor) -> Array:
        """See `Codebook.stored`."""
        found: Array = self.codes[codes.cpu().numpy()]
        return found


def codebook(fmt: Format, device: torch.device, *, float_zeros: bool = False) -> Codebook:
    """The codes of a format; `float_zeros` where its zero points are floats."""
    low, high = fmt.code_range
    if not np.array_equal(fmt.levels, np.arange(low, high + 1)):
        return Table.of(fmt.levels, device)
    return Shifted(low, high) if float_zeros else Integers(low, high)


def has_float_zeros(zeros: Array | None) -> bool:
    """Whether zero points are floats."""
    return zeros is not None and zeros.dtype.kind == "f"
