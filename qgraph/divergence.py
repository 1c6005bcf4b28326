"""KL divergence and perplexity of next-token distributions, a few positions at a time.

Logits of a whole text do not fit in memory (5,120 positions of a vocabulary of 49,152 are 1 GB),
nor do the temporaries of one block have to: every function walks over slices of positions whose
float32 copies take `SLICE_BYTES` each, with at most six alive at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SLICE_BYTES = 4_000_000


def kl_divergence(reference_logits: NDArray[Any], candidate_logits: NDArray[Any]) -> Doubles:
    """KL(reference ‖ candidate) = Σᵥ p(v) · (log p(v) − log q(v)) at each position, in nats.

    p and q are the softmax of float32 logits; the sum over the vocabulary is float64. Where
    p(v) = 0 (a logit of −inf) the term is 0; where q(v) = 0 < p(v) the divergence is inf.

    Args:
        reference_logits: any float type, `[..., vocabulary]`; log-probabilities serve as well.
        candidate_logits: of the same shape.

    Returns:
        float64 `[...]`, without the vocabulary axis.

    Raises:
        InputError: the shapes differ, or have no vocabulary.
    """
    reference, candidate = _rows(reference_logits), _rows(candidate_logits)
    if np.shape(reference_logits) != np.shape(candidate_logits):
        raise InputError(
            f"logits of shape {np.shape(reference_logits)} and {np.shape(candidate_logits)} "
            "have no divergence: wanted the same shape twice"
        )
    found = np.empty(len(reference), np.float64)
    for part in _slices(reference):
        p, log_p = _softmax(reference[part])
        found[part] = _divergence(p, log_p, _softmax(candidate[part]).log)
    return found.reshape(np.shape(reference_logits)[:-1])


def perplexity(logits: NDArray[Any], targets: NDArray[Any]) -> float:
    """The exponential of the mean of −log softmax(logits)[target]; float32, the mean float64.

    The caller shifts: for next-token perplexity, logits at position t go with the token at t + 1.

    Args:
        logits: any float type, `[..., vocabulary]`.
        targets: integers `[...]`; a negative one is not scored.

    Raises:
        InputError: the shapes do not fit, a target is outside the vocabulary, or none is scored.
    """
    rows, wanted = _rows(logits), np.asarray(targets)
    if wanted.shape != np.shape(logits)[:-1] or not np.issubdtype(wanted.dtype, np.integer):
        raise InputError(
            f"targets of shape {wanted.shape} ({wanted.dtype}) do not fit logits of shape "
            f"{np.shape(logits)}: wanted one integer a position"
        )
    flat = wanted.reshape(-1).astype(np.int64)
    if not (flat >= 0).any():
        raise InputError("no position has a target of 0 or more: perplexity needs one")
    if flat.max() >= rows.shape[1]:
        raise InputError(f"target {flat.max()} is outside the vocabulary of {rows.shape[1]}")
    loss = np.zeros(len(flat), np.float64)
    for part in _slices(rows):
        log_p = _softmax(rows[part]).log
        loss[part] = -np.take_along_axis(log_p, np.maximum(flat[part], 0)[:, None], -1)[:, 0]
    with np.errstate(over="ignore"):
        return float(np.exp(loss[flat >= 0].mean()))


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How far a model's next-token distributions are from a reference's.

    mean, median, p99, maximum: KL(reference ‖ candidate) in nats over `positions`.
    top1: share of positions at which both find the same token most likely.
    reference_perplexity, candidate_perplexity: over `predictions`, the positions whose next
        token is in the same block; NaN where there are none.
    """

    positions: int
    mean: float
    median: float
    p99: float
    maximum: float
    top1: float
    predictions: int
    reference_perplexity: float
    candidate_perplexity: float


class Divergences:
    """Sums over blocks; of each position only its divergence (8 bytes) is kept.

    second_half: score positions T/2 to T − 2 of a block of T, for which llama.cpp's perplexity
        tool counts the predictions; otherwise every position.
    """

    def __init__(self, second_half: bool = False) -> None:
        self.second_half = second_half
        self._kl: list[Doubles] = []
        self._agreed = 0
        self._predictions = 0
        self._losses = np.zeros(2)

    def add(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        ids: NDArray[np.int64],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Score one block.

        Args:
            reference: logits `[T, vocabulary]` of any float type.
            candidate: of the same shape.
            ids: the tokens `[T]` that went in.
            mask: False `[T]` where a token is padding, which is neither scored nor predicted.
        """
        length = len(ids)
        kept = np.ones(length, np.bool_) if mask is None else mask
        scored = kept.copy()
        if self.second_half:
            scored[: length // 2] = False
            scored[-1:] = False
        predicts = scored.copy()
        predicts[:-1] &= kept[1:]
        predicts[-1:] = False
        following = np.append(ids[1:], 0)
        for part in _slices(reference):
            if scored[part].any():
                rows = (reference[part], candidate[part])
                self._add(rows, scored[part], predicts[part], following[part])

    def _add(
        self,
        logits: tuple[NDArray[Any], NDArray[Any]],
        scored: NDArray[np.bool_],
        predicts: NDArray[np.bool_],
        following: NDArray[np.int64],
    ) -> None:
        p, log_p = _softmax(logits[0])
        log_q = _softmax(logits[1]).log
        self._kl.append(_divergence(p, log_p, log_q)[scored])
        self._agreed += int((log_p.argmax(-1) == log_q.argmax(-1))[scored].sum())
        rows = np.flatnonzero(predicts)
        self._predictions += len(rows)
        for at, log in enumerate((log_p, log_q)):
            self._losses[at] -= log[rows, following[rows]].sum(dtype=np.float64)

    def result(self) -> Divergence:
        """What was found so far.

        Raises:
            InputError: no position was scored.
        """
        kl = np.concatenate(self._kl) if self._kl else np.empty(0)
        if not len(kl):
            raise InputError("no position was left to score: the blocks are too short or masked")
        with np.errstate(all="ignore"):
            loss = self._losses / self._predictions if self._predictions else self._losses * np.nan
            perplexities = np.exp(loss)
            return Divergence(
                positions=len(kl),
                mean=float(kl.mean()),
                median=float(np.median(kl)),
                p99=float(np.quantile(kl, 0.99)),
                maximum=float(kl.max()),
                top1=self._agreed / len(kl),
                predictions=self._predictions,
                reference_perplexity=float(perplexities[0]),
                candidate_perplexity=float(perplexities[1]),
            )


class _Softmax(NamedTuple):
    p: Floats
    log: Floats


def _softmax(logits: NDArray[Any]) -> _Softmax:
    """Probabilities and their logarithms, float32 `[rows, vocabulary]`."""
    log = np.array(logits, np.float32)
    with np.errstate(all="ignore"):
        log -= log.max(-1, keepdims=True)
        p = np.exp(log)
        total = p.sum(-1, keepdims=True, dtype=np.float64)
        log -= np.log(total).astype(np.float32)
        p /= total.astype(np.float32)
    return _Softmax(p, log)


def _divergence(p: Floats, log_p: Floats, log_q: Floats) -> Doubles:
    with np.errstate(all="ignore"):
        terms = log_p - log_q
        terms *= p
        # 0 · (−inf − x) is NaN, and stands for 0; a p of NaN stays one.
        terms[p == 0] = 0
        found: Doubles = terms.sum(-1, dtype=np.float64)
    return found


def _rows(logits: NDArray[Any]) -> NDArray[Any]:
    """`[..., vocabulary]` as `[positions, vocabulary]`."""
    array = np.asarray(logits)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise InputError(f"logits of shape {array.shape}: wanted [..., vocabulary]")
    return array.reshape(-1, array.shape[-1])


def _slices(rows: NDArray[Any]) -> Iterator[slice]:
    """Slices of positions, `SLICE_BYTES` of float32 each, at least one position."""
    step = max(1, SLICE_BYTES // (4 * rows.shape[1]))
    return (slice(start, start + step) for start in range(0, len(rows), step))
