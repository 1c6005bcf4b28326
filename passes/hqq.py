"""HQQ: group ranges by a robust weight error, without calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.range_search import search

if TYPE_CHECKING:
    from torch import Tensor

SHRINK = tuple(1.0 - 0.025 * step for step in range(13))


def fit(rows: Tensor, fmt: Format, dtype: ir.DataType) -> QuantizedWeight:
    """Minimise Σ |w − ŵ|^p, p < 1, in each group (Badri and Shaji, 2023), zero points integer.

    Args:
        rows: float32 `[N, K]`.
        fmt: an integer format in groups. dtype: in which scales are stored.
    """

    def loss(error: Tensor) -> Tensor:
        root = error.abs_().sqrt_()
        return root.mul_(root.sqrt()).sum(-1)  # p = 0.75

    return search(rows, fmt, dtype, loss, shrink=SHRINK)
