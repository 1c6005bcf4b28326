"""What int8 activations (accuracy level 4) cost a linear on its own calibration inputs."""

from __future__ import annotations

import dataclasses

import numpy as np

from qgraph.formats.base import Array

LARGEST_ERROR = 0.02
"""The relative output error above which a site takes the next kernel."""
LARGEST_HEAD_ERROR = 0.1
"""Likewise, of what tells the outputs of a head apart: far above what healthy ones lose (0.03 in
SmolLM2-135M), and near where the largest logit is another one."""


@dataclasses.dataclass(frozen=True)
class LevelCost:
    """A relative error, its bound, and what it is an error of."""

    error: float = 0.0
    bound: float = LARGEST_ERROR
    of: str = "the output"

    @property
    def too_much(self) -> bool:
        """Whether the site should take another kernel."""
        return self.error > self.bound

    def __str__(self) -> str:
        return f"{self.error:.1%} of {self.of}"


def level_cost(x: Array, weight: Array, block: int, role: str) -> LevelCost:
    """What int8 activations cost a linear: the first of its measures that is beyond its bound.

    What all outputs of a head have in common softmax and argmax do not see, and a channel that is
    huge and gives them just that would make the error of the rest look small.

    Args:
        x, weight, block: see `level_error`. role: of the site.
    """
    cost = LevelCost(level_error(x, weight, block))
    if cost.too_much or role != "head":
        return cost
    apart = LevelCost(
        level_error(x, weight - weight.mean(0), block),
        LARGEST_HEAD_ERROR,
        "what tells outputs apart",
    )
    return apart if apart.too_much else cost


def level_error(x: Array, weight: Array, block: int) -> float:
    """‖(x₈ − x) Ŵᵀ‖ / ‖y − ȳ‖ (Frobenius), y = x Ŵᵀ, x₈ being x rounded to int8 in blocks.

    ONNX Runtime's level 4 rounds each block of an activation's row to ±127 steps of its largest
    absolute value. ȳ, the mean over the tokens, is left out of the measure: a channel that is
    huge and the same for all tokens tells nothing, and takes the steps from those that do.

    Args:
        x: float32 `[T, K]`. weight: float32 `[N, K]`, dequantized. block: along K, at least 1.
    """
    k = x.shape[1]
    starts = np.arange(0, k, block)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=1)
    step = np.repeat(largest / 127, np.diff([*starts, k]), axis=1)
    rounded = np.zeros_like(x)
    np.divide(x, step, out=rounded, where=step > 0)
    error = (np.rint(rounded) * step - x) @ weight.T
    y = x @ weight.T
    size = float(np.linalg.norm(y - y.mean(0))) if len(y) > 1 else float(np.linalg.norm(y))
    return float(np.linalg.norm(error)) / size if size > 0 else 0.0
