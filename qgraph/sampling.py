"""Choosing the next token from logits: greedy, or temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

Floats: TypeAlias = NDArray[np.float32]
_BLOCK, _FEW = 64, 256
_COLDEST = 1e-30
"""Below it all but the largest logit have no weight left, and float32 has no such numbers."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: only the k most likely tokens; 0: all.
    top_p: of those only the fewest most likely that have this probability together.
    seed: each row of a batch has a generator of its own, from the seed and its number.

    Raises:
        InputError: a number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            require_whole(getattr(self, name), name.replace("_", "-"))
        for name in ("temperature", "top_p"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, numbers.Real):
                raise InputError(f"{name.replace('_', '-')} {number!r}: wanted a number")
        if not 0 <= self.temperature < np.inf:
            raise InputError(f"temperature {self.temperature}: wanted 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k}: wanted 1 or more, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p}: wanted a number above 0, up to 1")
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: wanted 0 or more")


def require_whole(number: object, name: str) -> None:
    """Refuse what is no whole number.

    Raises:
        InputError: it is none.
    """
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise InputError(f"{name} {number!r}: wanted a whole number")


class Sampler:
    """Chooses tokens for texts of these numbers."""

    def __init__(self, sampling: Sampling, rows: Sequence[int]) -> None:
        self._how = sampling
        self._random = [np.random.default_rng((sampling.seed, row)) for row in rows]

    def choose(self, logits: Floats) -> NDArray[np.int64]:
        """Logits `[B, V]` → tokens `[B]`."""
        if self._how.temperature == 0:
            return np.asarray(logits.argmax(-1), np.int64)
        pairs = zip(logits, self._random, strict=True)
        return np.array([self._draw(row, random.random()) for row, random in pairs], np.int64)

    def _draw(self, logits: Floats, at: float) -> int:
        """The token at the share `at` of the distribution's sum."""
        kept, weights = distribution(logits, self._how)
        index = _place(weights, at)
        return index if kept is None else int(kept[index])


def _place(weights: Floats, at: float) -> int:
    """The index at the share `at` of the sum: of many first its block, then its place in that."""
    if len(weights) <= _FEW:
        sums = np.cumsum(weights, dtype=np.float64)
        return min(int(sums.searchsorted(at * sums[-1], side="right")), len(sums) - 1)
    starts = np.arange(0, len(weights), _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    wanted = at * sums[-1]
    block = min(int(np.searchsorted(sums, wanted, side="right")), len(sums) - 1)
    inside = np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    rest = wanted - (sums[block - 1] if block else 0.0)
    index = min(int(np.searchsorted(inside, rest, side="right")), len(inside) - 1)
    return int(starts[block]) + index


def distribution(logits: Floats, how: Sampling) -> tuple[NDArray[np.int64] | None, Floats]:
    """The tokens `[n]` that may come, and their weights `[n]`, proportional to probabilities.

    logits: `[V]`, float32. Tokens are None where all may come, in their order. `how.temperature`
    is above 0.
    """
    kept: NDArray[np.int64] | None = None
    if 0 < how.top_k < len(logits):
        kept = _largest(logits, how.top_k)
        logits = logits[kept]
    weights = logits - logits.max()
    weights /= np.float32(max(how.temperature, _COLDEST))
    np.exp(weights, out=weights)
    if how.top_p < 1:
        inside = _nucleus(weights, how.top_p)
        kept, weights = inside if kept is None else kept[inside], weights[inside]
    return kept, weights


def _largest(logits: Floats, count: int) -> NDArray[np.int64]:
    """Where the `count` largest are, in no order.

    The count-th largest of the maxima of blocks is no more than the count-th largest of all: what
    is below it is left out at the price of a comparison, and little is left to partition. A block
    is every `blocks`-th element: maxima of columns are found many at once.
    """
    blocks = len(logits) // _BLOCK
    if count > blocks:
        return np.argpartition(logits, -count)[-count:]
    maxima = logits[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(0)
    likely = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    return likely[np.argpartition(logits[likely], -count)[-count:]]


def _nucleus(weights: Floats, share: float) -> NDArray[np.int64]:
    """The fewest largest weights whose sum is `share` of all; the largest first.

    It is mostly within the few largest. Else: weights below (1 - share) / V of the sum have less
    than 1 - share together, so the nucleus is full before it comes to them. Only what is left is
    sorted.
    """
    total = float(weights.sum())
    if len(weights) <= _FEW:
        order = np.argsort(-weights, kind="stable")
    else:
        likely = _largest(weights, _FEW)
        if weights[likely].sum() < share * total:
            likely = np.flatnonzero(weights >= total * (1 - share) / len(weights))
        order = likely[np.argsort(-weights[likely], kind="stable")]
    sums = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(sums.searchsorted(share * total)) + 1]
