"""How far one array is from another: relative error and cosine, summed over many pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

_SLICE = 500_000


class OutputError:
    """‖y_c − y_r‖/‖y_r‖ over everything added, and the cosine of vectors along the last axis.

    Sums are float64, over slices of `_SLICE` elements. An array of rank 0 or 1 is one vector; two
    zero vectors are alike (cosine 1).
    """

    def __init__(self) -> None:
        self._error_sq = 0.0
        self._norm_sq = 0.0
        self._cosines = 0.0
        self._vectors = 0
        self.worst_cosine = math.inf

    def add(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add a pair of arrays of one shape.

        mask: False `[rows, T]` at padding, which is left out of outputs with one vector per token.

        Raises:
            InputError: the shapes differ.
        """
        if reference.shape != candidate.shape:
            raise InputError(f"shapes {reference.shape} and {candidate.shape} differ")
        first, second = (_vectors(array, mask) for array in (reference, candidate))
        if not first.size:
            return
        step = max(1, _SLICE // first.shape[1])
        for start in range(0, len(first), step):
            self._add(*(np.asarray(x[start : start + step], np.float64) for x in (first, second)))

    def _add(self, reference: NDArray[np.float64], candidate: NDArray[np.float64]) -> None:
        with np.errstate(all="ignore"):
            difference = candidate - reference
            self._error_sq += float(np.vdot(difference, difference))
            norms = [np.einsum("ij,ij->i", x, x) for x in (reference, candidate)]
            self._norm_sq += float(norms[0].sum())
            dots = np.einsum("ij,ij->i", reference, candidate)
            sizes = np.sqrt(norms[0] * norms[1])
            alike = np.where(norms[0] == norms[1], 1.0, 0.0)
            cosines = np.where(sizes == 0, alike, dots / sizes)
        self._cosines += float(cosines.sum())
        self._vectors += len(cosines)
        self.worst_cosine = min(self.worst_cosine, float(cosines.min()))

    @property
    def error(self) -> float:
        """‖y_c − y_r‖/‖y_r‖; inf where only the reference is zero, NaN where nothing was added."""
        if not self._vectors:
            return math.nan
        if self._norm_sq == 0:
            return math.inf if self._error_sq else 0.0
        return math.sqrt(self._error_sq / self._norm_sq)

    @property
    def cosine(self) -> float:
        """The mean over all vectors."""
        return self._cosines / self._vectors if self._vectors else math.nan


class ChannelError:
    """The least ‖y_c · g − y_r‖/‖y_r‖ of any factors g, one to a channel of the last axis.

    For outputs whose channels were scaled by factors that nobody knows any more. What a channel is
    off as a whole is not seen: that is one number among as many as there are tokens.
    """

    def __init__(self) -> None:
        self._sums: NDArray[np.float64] | None = None

    def add(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """See `OutputError.add`."""
        if reference.shape != candidate.shape:
            raise InputError(f"shapes {reference.shape} and {candidate.shape} differ")
        first, second = (_vectors(array, mask) for array in (reference, candidate))
        step = max(1, _SLICE // max(1, first.shape[1]))
        for start in range(0, len(first), step):
            r, c = (np.asarray(x[start : start + step], np.float64) for x in (first, second))
            with np.errstate(all="ignore"):
                sums = np.stack([np.einsum("ij,ij->j", *pair) for pair in ((r, r), (c, c), (r, c))])
                self._sums = sums if self._sums is None else self._sums + sums

    @property
    def error(self) -> float:
        """Of a channel Σr² − (Σrc)²/Σc²; NaN where nothing was added."""
        if self._sums is None:
            return math.nan
        r, c, rc = self._sums
        norm = float(r.sum())
        with np.errstate(all="ignore"):
            left = float(np.maximum(r - np.where(c > 0, rc * rc / c, 0.0), 0.0).sum())
        if norm == 0:
            return math.inf if c.sum() else 0.0
        return math.sqrt(left / norm)


def _vectors(array: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[Any]:
    """`array` as `[vectors, length]`, padding left out where there is one vector a token."""
    if array.ndim < 2:
        return array.reshape(1, -1)
    rows = array.reshape(-1, array.shape[-1])
    per_token = mask is not None and (
        array.shape[:-1] == mask.shape or (array.ndim == 2 and len(array) == mask.size)
    )
    return rows[mask.reshape(-1)] if mask is not None and per_token else rows
