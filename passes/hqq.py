"""Group ranges without calibration data, by a weight error that guesses which inputs are loud.

Half-quadratic quantization (Badri and Shaji, 2023) keeps the scale from least to largest weight
and moves the zero point, by fractions of a step, to where Σ |w − ŵ|^p is least, p < 1. Integer
zero points cannot follow: they stay where rounding to nearest has them. With the scale searched as
well, p ≤ 1 gives up the largest weights, which often meet the largest inputs: on SmolLM2-135M a KL
of 0.77 at p = 1, where rounding costs 0.37. What is left of the method is its aim, a robust loss
that needs no data; scale and integer zero point are searched together under

    Σ_k h_k (1 + c w_k² / σ²) (w_k − ŵ_k)²,   σ² the mean square of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.range_search import TILE, rows_from, search, tiles
from qgraph.passes.weighted import keep_better

if TYPE_CHECKING:
    from torch import Tensor

SHRINK = tuple(1.05 - 0.025 * step for step in range(15))
"""Widths that are tried, in units of the range from the least to the largest weight."""
LARGE = 0.05
"""c: how much more a weight counts by its own size."""
TINY = float(np.finfo(np.float32).tiny)
POWER = 4
"""How steeply a column's importance falls with the size of its weights."""
LOUDEST = 1e4
"""The most that a column counts, in units of a typical one."""


def fit(
    rows: Tensor, fmt: Format, dtype: ir.DataType, importance: Tensor | None = None
) -> QuantizedWeight:
    """The rows on the ranges of least error; of no group is it more than rounding to nearest's.

    Args:
        rows: float32 `[N, K]`; worked on in tiles of rows.
        fmt: a format whose groups have ranges of their own.
        dtype: in which the scales are stored.
        importance: h, float32 `[K]`, > 0; see `importance`. None where all columns count alike.

    Raises:
        ScaleOverflow: a scale does not fit `dtype`.
    """
    parts = []
    for tile in tiles(rows, TILE):
        with rows_from(tile.start):
            parts.append(_fit(rows[tile], fmt, dtype, importance))
    return QuantizedWeight.joined(parts)


def _fit(
    rows: Tensor, fmt: Format, dtype: ir.DataType, importance: Tensor | None
) -> QuantizedWeight:
    """One tile."""
    import torch

    n, k = rows.shape
    squares = rows.square()
    counts = 1 + LARGE * squares / squares.mean(1, keepdim=True).clamp(min=TINY)
    if importance is not None:
        counts *= importance
    counts = torch.nn.functional.pad(counts, (0, -k % (fmt.group or k)))
    counts = counts.view(n, -1, fmt.group or k)

    def loss(error: Tensor) -> Tensor:
        return error.square_().mul_(counts).sum(-1)

    found = search(rows, fmt, dtype, loss, shrink=SHRINK)
    keep_better(rows, found, loss, fmt, dtype)
    return found


def importance(readers: Sequence[Tensor]) -> Tensor | None:
    """How loud each channel of an activation probably is: float32 `[K]`, 1 for a typical channel.

    Where several linears read one activation, as q, k and v do, a channel that is loud on most
    tokens is read by small weights in at least one of them: on SmolLM2-135M one channel has up to
    80 % of the energy, and the smallest 0.5 % of v's columns have 100 times the mean energy. So
    h_k is (m / m_k)^4, m_k the median |w| of a column and m that of the columns, from the reader
    in which it is largest. One linear alone says nothing reliable: the first o was three times
    worse with it.

    Args:
        readers: float32 `[n, K]` each, all linears that read the activation, or samples of
            their rows.

    Returns:
        None for one reader.
    """
    import torch

    if len(readers) < 2:
        return None
    found = []
    for rows in readers:
        sizes = rows.abs().median(0).values
        typical = sizes.median().clamp(min=TINY)
        found.append((sizes / typical).clamp(min=LOUDEST ** (-1 / POWER)).pow(-POWER))
    return torch.stack(found).amax(0)
