"""Choosing the next token from logits: greedy, or temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

Floats: TypeAlias = NDArray[np.float32]


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
        if not 0 <= self.temperature < np.inf:
            raise InputError(f"temperature {self.temperature}: wanted 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k}: wanted 1 or more, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p}: wanted a number above 0, up to 1")
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: wanted 0 or more")


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
        sums = np.cumsum(weights, dtype=np.float64)
        index = int(np.searchsorted(sums, at * sums[-1], side="right"))
        index = min(index, len(sums) - 1)
        return index if kept is None else int(kept[index])


def distribution(logits: Floats, how: Sampling) -> tuple[NDArray[np.int64] | None, Floats]:
    """The tokens `[n]` that may come, and their weights `[n]`, proportional to probabilities.

    logits: `[V]`, float32. Tokens are None where all may come, in their order. `how.temperature`
    is above 0.
    """
    kept: NDArray[np.int64] | None = None
    if 0 < how.top_k < len(logits):
        kept = np.argpartition(logits, -how.top_k)[-how.top_k :]
        logits = logits[kept]
    weights = np.exp((logits - logits.max()) / np.float32(how.temperature))
    if how.top_p < 1:
        inside = _nucleus(weights, how.top_p)
        kept, weights = inside if kept is None else kept[inside], weights[inside]
    return kept, weights


def _nucleus(weights: Floats, share: float) -> NDArray[np.int64]:
    """The fewest largest weights whose sum is `share` of all; the largest first.

    Weights below (1 - share) / V of the sum have less than 1 - share together, so the nucleus is
    full before it comes to them: only the others are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero(weights >= total * (1 - share) / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    sums = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(np.searchsorted(sums, share * total)) + 1]
