"""Which activations take one scale from calibration, and which a scale for each row.

A scale known beforehand costs one QuantizeLinear; one for each row costs five more passes over the
activation, and one over each product. Behind a norm rows are alike and the former loses little; in
front of an output projection some tokens are hundreds of times larger than others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import numpy as np

from qgraph.activation_kinds import INT8_AUTO, INT8_ROW, INT8_STATIC, TOP_CODE
from qgraph.formats.base import Array
from qgraph.integer_sites import LEAST_STEP, REACH
from qgraph.passes.quantized_inputs import static_grid
from qgraph.passes.solved import as_stored, transform_of
from qgraph.passes.stage_walk import Stop
from qgraph.plan import QuantPlan
from qgraph.quant_tensor import QuantSource
from qgraph.sites import Site

DEFAULT_LOSS = 1e-4
OUTPUT = "output"
"""The observer of static ranges that goes by what they cost the outputs."""
SHARES = (1.0, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)
"""Of the extremes: the ranges that are tried for a static scale."""
LARGEST = 0.01
"""The error of any one row of products, relative and squared, that a static scale may have."""
_TOKENS = 1024
"""Rows that the errors are taken from, spread over all calibration data."""
_CHANNELS = 4096
"""Rows of a weight that they are taken from: the first ones, all rows being alike."""


@dataclasses.dataclass(frozen=True)
class InputScale:
    """How one activation is rounded.

    kind: `int8-static` or `int8-row`. low, high: the static range. detail: why.
    by_row, static: mean squared errors of a row of outputs, relative. worst: the largest of the
        latter.
    """

    kind: str
    low: float
    high: float
    by_row: float
    static: float
    worst: float

    @property
    def detail(self) -> str:
        """What both cost."""
        words = f"a scale for each row costs {self.by_row:.2%} of the output, one for all"
        worst = f", {self.worst:.0%} at the worst row" if self.worst > LARGEST else ""
        return f"{words} {self.static:.2%}{worst}"

    def within(self, loss: float) -> InputScale:
        """With a scale for each row where one for all costs more than `loss` beyond it."""
        fine = self.worst <= LARGEST and self.static - self.by_row <= loss
        return dataclasses.replace(self, kind=INT8_STATIC if fine else INT8_ROW)


def scales(
    stop: Stop,
    plan: QuantPlan,
    sources: Mapping[str, QuantSource | None],
    outliers: Mapping[str, Array],
    loss: float,
    kinds: Collection[str] = (INT8_AUTO,),
) -> dict[str, InputScale]:
    """By site, how its activation is rounded where the plan leaves it to this; alike where shared.

    A static range is the one of `SHARES` that costs the outputs least: mean over rows of the
    squared error, relative to the row's own outputs. Of `int8-auto`, a scale
    for each row is taken where that is more than `loss` better.

    kinds: of activations, those that this is asked for: `int8-auto`, `int8-static`.
    sources: what each site's weight is stored as.
    outliers: columns of the inputs that stay in float, and count for nothing.
    """
    groups: dict[tuple[str, Hashable, bytes], list[tuple[str, Site, QuantSource]]] = {}
    for site in stop.stage.sites:
        for decision in plan.named(site.name):
            source = sources[site.name]
            kind = decision.activations
            if kind is None or kind not in kinds or source is None:
                continue
            left = outliers.get(decision.site, np.empty(0, np.int64))
            key = (kind, transform_of(source).of_inputs, left.tobytes())
            groups.setdefault(key, []).append((decision.site, site, source))
    found: dict[str, InputScale] = {}
    for (kind, _, left_out), members in groups.items():
        columns = np.frombuffer(left_out, np.int64)
        unlike = {id(source): (site, source) for _, site, source in members}
        one = _chosen(stop, list(unlike.values()), columns)
        one = one.within(loss) if kind == INT8_AUTO else one
        found.update({name: one for name, _, _ in members})
    return found


def _chosen(stop: Stop, members: Sequence[tuple[Site, QuantSource]], columns: Array) -> InputScale:
    """The best static range."""
    first = members[0][1]
    ends = _Ends()
    rows = (np.delete(as_stored(each, first), columns, axis=1) for each in stop.inputs())
    x = _sampled(map(ends.seen, rows))
    low, high = ends.low, ends.high
    errors = _Errors(x, [_weight(*each, columns) for each in members])
    by_row, _ = errors.of(by_rows(x) - x)
    tried = [(share * low, share * high) for share in SHARES]
    found = [(errors.of(in_range(x, *each) - x), each) for each in tried]
    fitting = [item for item in found if item[0][1] <= LARGEST] or found[:1]
    (static, worst), (low, high) = min(fitting, key=lambda item: item[0][0])
    return InputScale(INT8_STATIC, low, high, by_row, static, worst)


@dataclasses.dataclass
class _Ends:
    """The least and the largest value that went by, or 0."""

    low: float = 0.0
    high: float = 0.0

    def seen(self, block: Array) -> Array:
        self.low = min(self.low, float(block.min(initial=0)))
        self.high = max(self.high, float(block.max(initial=0)))
        return block


def _sampled(blocks: Iterable[Array]) -> Array:
    """Rows `[at most _TOKENS, K]` spread over all."""
    kept: list[Array] = []
    step, count = 1, 0
    for block in blocks:
        kept.append(np.array(block[(-count) % step :: step], np.float32))
        count += len(block)
        while sum(map(len, kept)) > _TOKENS:  # every other one of those at multiples of `step`
            kept = [np.concatenate(kept)[::2]]
            step *= 2
    return np.concatenate(kept)


def _weight(site: Site, source: QuantSource, columns: Array) -> Array:
    """What inputs are multiplied by, `[K, N]`.

    Of a head each row has mean 0: a softmax takes no notice of what is added to all logits.
    """
    rows = source.format.dequantize(source.block(0, min(source.n, _CHANNELS)))
    found = np.ascontiguousarray(np.delete(rows, columns, axis=1).T)
    return found - found.mean(axis=1, keepdims=True) if site.role == "head" else found


class _Errors:
    """Of the outputs of linears that read x, row by row."""

    def __init__(self, x: Array, weights: Sequence[Array]) -> None:
        self.weights = weights
        self.sizes = np.maximum(self._squares(x), np.finfo(np.float32).tiny)

    def of(self, error: Array) -> tuple[float, float]:
        """Mean and largest relative squared error of a row where x is `error` off."""
        found = self._squares(error) / self.sizes
        return float(found.mean()), float(found.max(initial=0))

    def _squares(self, x: Array) -> Array:
        found = np.zeros(len(x))
        for weight in self.weights:
            found += np.square(x @ weight).sum(axis=1)
        return found


def by_rows(x: Array) -> Array:
    """Inputs `[T, K]` on the grid of each row: `REACH` steps to its largest magnitude."""
    step = np.maximum(np.abs(x).max(axis=1, keepdims=True) / REACH, LEAST_STEP)
    found: Array = (np.rint(x / step) * step).astype(np.float32)
    return found


def in_range(x: Array, low: float, high: float) -> Array:
    """Inputs on the grid of a static range, zero in it, clipped to it."""
    step, zero = static_grid(low, high)
    codes = np.clip(np.rint(x / step) + zero, 0, TOP_CODE)
    found: Array = ((codes - zero) * step).astype(np.float32)
    return found
