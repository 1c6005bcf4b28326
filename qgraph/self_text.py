"""Calibration text that a causal language model samples itself, for users without data.

The model's own text has the distribution that the model knows best, needs no tokenizer, and was
found to calibrate about as well as real text (Liu et al., LLM-QAT, 2023; Williams et al.,
Self-calibration for Language Model Quantization and Pruning, 2024).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.language_model import LanguageModel, language_model
from qgraph.progress import Progress
from qgraph.stepping import Logits, Steps, WholeSteps, steps_of

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

Ids: TypeAlias = NDArray[np.int64]
SEED = 0
CACHE_BYTES = 1_200_000_000
"""What the caches of all texts that grow together may take, the old and the new one of a step."""
MOST_ROWS = 32
"""More texts at once gain little: by then the products are about as fast as they get."""


@dataclasses.dataclass(frozen=True, eq=False)
class SelfText:
    """Token ids `[samples, sequence]`, and notes on how they came about."""

    ids: Ids
    notes: tuple[str, ...] = ()


def sample_text(
    runtime: Runtime, model: Path | ir.Model, samples: int, sequence: int, progress: Progress
) -> SelfText:
    """Text that a model samples itself, at temperature 1.

    The first token of a text is drawn from the whole vocabulary with equal chances, so that the
    texts start everywhere; each of the others from the model's distribution given those before
    it. A sample of more tokens than is quick to make is put together from several texts. The
    seed is fixed: on one machine the same model gives the same text.

    Raises:
        InputError: the model is no causal language model, or its logits are not finite.
    """
    found = language_model(runtime, model)
    steps = steps_of(found, sequence)
    texts = math.ceil(sequence / steps.longest)
    length = math.ceil(sequence / texts)
    ids = _Sampler(found, steps).sample(samples * texts, length, progress)
    notes = []
    if isinstance(steps, WholeSteps):
        notes.append(
            f"--calibrate self: no cache fits this model, so its text comes in pieces of {length} "
            "tokens; a longer text of your own may calibrate better"
        )
    return SelfText(ids.reshape(samples, texts * length)[:, :sequence], tuple(notes))


class _Sampler:
    """Grows texts, as many at once as their caches have room for."""

    def __init__(self, model: LanguageModel, steps: Steps) -> None:
        self._model, self._steps = model, steps
        self._rng = np.random.default_rng(SEED)

    def sample(self, texts: int, length: int, progress: Progress) -> Ids:
        """So many texts of one length, `[texts, length]`."""
        rows = self._model.rows or self._rows(texts, length)
        batches = math.ceil(texts / rows)
        progress.stage("sampling calibration text", total=batches * length)
        found = []
        for batch in range(batches):
            ids = np.zeros((rows, length), np.int64)
            ids[:, 0] = self._rng.integers(0, self._model.vocabulary, rows)
            self._steps.begin(rows)
            for at in range(1, length):
                ids[:, at] = self._draw(self._steps.step(ids[:, at - 1]))
                progress.advance(batch * length + at + 1)
            found.append(ids)
        return np.concatenate(found)[:texts]

    def _rows(self, texts: int, length: int) -> int:
        """How many at once: as many as there is room for, in even batches."""
        text = 2 * self._steps.token_bytes() * length
        most = min(MOST_ROWS, max(1, CACHE_BYTES // max(1, text)))
        return math.ceil(texts / math.ceil(texts / most))

    def _draw(self, logits: Logits) -> Ids:
        """A token from each row's softmax, by the inverse of its distribution function."""
        known = logits[:, : self._model.vocabulary]
        sums = np.exp(known - known.max(axis=-1, keepdims=True)).cumsum(axis=-1, dtype=np.float64)
        if not np.isfinite(sums[:, -1]).all():
            raise InputError(
                "--calibrate self: the model's logits are not finite on its own text; give "
                "--calibrate FILE instead, or a float32 export"
            )
        places = self._rng.random(len(sums)) * sums[:, -1]
        rows = zip(sums, places, strict=True)
        return np.array([np.searchsorted(row, place, "right") for row, place in rows], np.int64)
