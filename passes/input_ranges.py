"""Outliers of activations that are to be rounded: the input columns that are to stay in float."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from qgraph.formats.base import Array
from qgraph.passes.solved import as_stored, transform_of
from qgraph.passes.stage_walk import Stop
from qgraph.plan import QuantPlan
from qgraph.quant_tensor import QuantSource


def outliers(
    stop: Stop, plan: QuantPlan, sources: Mapping[str, QuantSource | None], threshold: float
) -> dict[str, Array]:
    """By site, the columns of its input that are to stay in float, ascending, int64.

    Of those that the decision allows, the ones of the largest |x| over all calibration data,
    channel factors divided out; none whose |x| stays below `threshold` times the median column's.

    sources: what each site's weight is stored as.
    """
    found: dict[str, Array] = {}
    known: dict[Hashable, Array] = {}
    for site in stop.stage.sites:
        source = sources[site.name]
        for decision in plan.named(site.name) if source is not None else ():
            count = decision.outliers
            if not count or source is None:
                continue
            key = (transform_of(source).of_inputs, count)
            if key not in known:
                rows = (as_stored(each, source) for each in stop.inputs())
                known[key] = largest(rows, count, threshold)
            found[decision.site] = known[key]
    return found


def largest(rows: Iterable[Array], count: int, threshold: float) -> Array:
    """The at most `count` columns of the largest |x| in blocks of rows `[T, K]`, ascending."""
    most = np.zeros(0, np.float32)
    for block in rows:
        sizes = np.abs(block).max(axis=0, initial=0.0)
        most = np.maximum(most, sizes) if len(most) else sizes
    first = np.argsort(-most, kind="stable")[:count]
    kept = first[most[first] >= threshold * np.median(most)] if len(most) else first
    return np.sort(kept).astype(np.int64)
