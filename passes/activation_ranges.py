"""Ranges of activations that are rounded by scales known before the model runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from qgraph.activation_kinds import FP8, INT8_STATIC
from qgraph.formats.base import Array
from qgraph.formats.small_floats import E4M3, E4M3_MAX
from qgraph.observers import observer
from qgraph.passes.input_scales import OUTPUT
from qgraph.passes.solved import as_stored, transform_of
from qgraph.passes.stage_walk import Stop
from qgraph.plan import QuantPlan
from qgraph.quant_tensor import QuantSource
from qgraph.row_branches import MANY

DEFAULT = "minmax"
STATIC = {
    INT8_STATIC: ("lower_w8a8.observer", OUTPUT),
    FP8: ("insert_fp8_qdq.observer", DEFAULT),
}
"""Activations with such scales; the option that says how their ranges are found; its default."""
_NONE = np.empty(0, np.int64)
_FP8_LEVELS = tuple(float(value) for value in E4M3[:127] / E4M3_MAX)


def observed(
    stop: Stop,
    plan: QuantPlan,
    sources: Mapping[str, QuantSource | None],
    outliers: Mapping[str, Array] | None = None,
) -> dict[str, tuple[float, float]]:
    """By site, what its inputs span over all calibration data, channel factors divided out.

    sources: what each site's weight is stored as.
    outliers: columns of the inputs that stay in float, and count for nothing.
    """
    found: dict[str, tuple[float, float]] = {}
    known: dict[Hashable, tuple[float, float]] = {}
    decisions = [each for site in stop.stage.sites for each in plan.named(site.name)]
    for decision in decisions:
        kind, source = decision.activations or "", sources[decision.site.removesuffix(MANY)]
        if kind not in STATIC or source is None:
            continue
        name = plan.recipe.options.get(*STATIC[kind])
        if name == OUTPUT:
            continue  # `input_scales` finds it
        left_out = (outliers or {}).get(decision.site, _NONE)
        key = (kind, transform_of(source).of_inputs, left_out.tobytes())
        if key not in known:
            watching = observer(name, stop.stage.name, _FP8_LEVELS if kind == FP8 else None)
            for rows in stop.inputs():
                watching.update(np.delete(as_stored(rows, source), left_out, axis=1))
            low, high = watching.range()
            known[key] = float(low), float(high)
        found[decision.site] = known[key]
    return found
