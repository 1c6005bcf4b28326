"""What int8 activations (accuracy level 4) cost a linear on its own calibration inputs."""

from __future__ import annotations

import numpy as np

from qgraph.formats.base import Array

LARGEST_ERROR = 0.02
"""The relative output error above which a site takes the next kernel."""


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
