"""What a calibrated run will take: time and memory, from the plan's shapes, before data is read."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph import registry
from qgraph.activations import LIMIT
from qgraph.calibration import BATCH_ROWS
from qgraph.formats.base import Format, parse
from qgraph.graph import Graph
from qgraph.plan import UNSOLVED, Decision, QuantPlan
from qgraph.sites import Site
from qgraph.solver_names import needs_activations, needs_data, parts_of
from qgraph.stages import Stage, cut, residual_of
from qgraph.wording import counted

EFFICIENCY = 0.6
"""The share of the matmul's speed that a whole run keeps: stages are short, rounding is no
product, and activations are copied between the runtime and the sums. On SmolLM2-135M."""
BASE_BYTES = 400_000_000
"""The process with the runtime and torch loaded (316 MB on Linux), and sessions of small stages."""
WEIGHT_COPIES = 6
"""Float32 copies of one weight: as it is, corrected, permuted, rounded, solved, compared."""
SQUARE_COPIES = 5
"""Float64 `[K, K]` matrices at once: two sums (float32), H, damped H, two factors, an inverse."""
_FACTORING = 8
"""Flops per K³ and activation: about 4 in float64, which counts double."""
_CORRECTION = 6
"""Flops per N·K² and linear: the product with the cross moment, and H⁻¹ applied in float64."""
_LOSSES = 4
"""Flops per N·K² and linear: the losses of what was found and of rounding."""
_CODES = 1
"""Flops per N·K² and linear: GPTQ's updates."""
_COMPARED = 2
"""Flops per K² and row on which channel factors are compared: the product with H."""
_RANGE = 200
"""Per weight and range tried, in flops of a product that would take as long: elementwise work at
the pace of memory. 140 to 270 measured, for 4 bits with and without zero points."""
_SHIFTS = 3
"""Zero points that are tried for each width, where a format has them."""
_TRIAL = 1024
_TRIAL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Time and peak resident memory of a calibrated run on at most `tokens` tokens."""

    seconds: float
    bytes: int
    tokens: int

    @property
    def line(self) -> str:
        """`about 5 min and 2.1 GB of memory at the peak, for at most 32768 tokens`."""
        return (
            f"about {spell_time(self.seconds)} and {spell_size(self.bytes)} of memory at the "
            f"peak, for at most {counted(self.tokens, 'token')}"
        )

    def to_json(self) -> dict[str, float | int]:
        """Seconds, bytes and tokens, for reports."""
        return {"seconds": round(self.seconds, 1), "bytes": self.bytes, "tokens": self.tokens}


def is_calibrated(plan: QuantPlan, with_data: bool) -> bool:
    """Whether a run of this plan walks through calibration data for its solvers."""
    solvers = {item.solver for item in plan.decisions if item.quantized} - {None, *UNSOLVED}
    return any(with_data or needs_data(str(solver)) for solver in solvers)


def predict(
    graph: Graph,
    sites: Sequence[Site],
    plan: QuantPlan,
    *,
    samples: int,
    sequence: int,
    rate: float | None = None,
) -> Prediction:
    """What solving `plan` on `samples` blocks of `sequence` tokens will take, on CPUs.

    rate: flops per second of a float32 matmul here; None measures it.
    """
    tokens = samples * sequence
    walk = _Walked(graph, sites, plan, sequence)
    seconds = walk.flops(tokens) / (EFFICIENCY * (rate or matmul_rate()))
    return Prediction(seconds, walk.peak(samples), tokens)


def matmul_rate() -> float:
    """Flops per second of float32 products here, over about 0.1 s, with all threads."""
    matrix = np.ones((_TRIAL, _TRIAL), np.float32)
    np.matmul(matrix, matrix)  # starts the threads
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < _TRIAL_SECONDS:
        np.matmul(matrix, matrix)
        count += 1
    return 2 * _TRIAL**3 * count / seconds


class _Walked:
    """The stages that calibration data goes through, and what is done at each."""

    def __init__(self, graph: Graph, sites: Sequence[Site], plan: QuantPlan, sequence: int) -> None:
        self.plan, self.sequence = plan, sequence
        self.two = plan.recipe.calibration == "sequential"
        self.linears = {id(s.node): s for s in sites if not s.gathers and s.n and s.k}
        self.widths = {id(s.node.outputs[0]): s.n for s in self.linears.values()}
        self.widths |= {id(s.activation): s.k for s in self.linears.values()}
        main = {id(node) for node in graph.model.graph}
        seen = [site for site in sites if id(site.node) in main and self._stops_at(site)]
        self.stages = cut(graph.model, seen)

    def _stops_at(self, site: Site) -> bool:
        decision = self.plan.of(site.name)
        if decision is None or not decision.quantized or site.state != "float":
            return False
        return not site.gathers and site.node.attributes.get_int("transA", 0) == 0

    def _solved(self, stage: Stage) -> list[tuple[Site, Decision]]:
        """The stage's linears whose weights are solved there."""
        pairs = [(site, self.plan.of(site.name)) for site in stage.sites]
        return [
            (site, found)
            for site, found in pairs
            if found is not None and found.shared_with is None and found.solver not in UNSOLVED
        ]

    def flops(self, tokens: int) -> float:
        """Of the forward passes, the sums and the solvers, for `tokens` tokens in all."""
        return sum(self._forward(s, tokens) + self._solving(s, tokens) for s in self.stages)

    def _forward(self, stage: Stage, tokens: int) -> float:
        ran = [self.linears[id(node)] for node in stage.nodes if id(node) in self.linears]
        return float((1 + self.two) * sum(2 * tokens * site.n * site.k for site in ran))

    def _solving(self, stage: Stage, tokens: int) -> float:
        solved = self._solved(stage)
        if not solved:
            return 0.0
        k = solved[0][0].k
        found = float((1 + self.two) * 2 * tokens * k**2 + _FACTORING * k**3)
        by_spec: dict[str, list[tuple[Site, Decision]]] = {}
        for pair in solved:
            by_spec.setdefault(str(pair[1].solver), []).append(pair)
            if self.two and residual_of(pair[0]) is not None:
                found += 2 * tokens * pair[0].n * k
        for spec, pairs in by_spec.items():
            found += sum(self._composed(each, pairs, k) for each in _tried(spec, pairs))
        return found

    def _composed(self, spec: str, pairs: Sequence[tuple[Site, Decision]], k: int) -> float:
        """Flops of one composed solver on the weights of a stage that it solves."""
        steps = {solver.role: solver for solver in _steps(spec)}
        found, rows = 0.0, 0
        for site, decision in pairs:
            products = _LOSSES + _CODES * ("codes" in steps) + _CORRECTION * self.two
            searched = _searching(steps.get("ranges"), parse(decision.format or ""))
            found += site.n * k * (products * k + searched)
            rows += site.n
        if "scaling" in steps:
            # the ranges of the last weight stand for those of all: formats rarely differ in a stage
            found += steps["scaling"].evaluated(rows) * k * (_COMPARED * k + searched)
        return found

    def peak(self, samples: int) -> int:
        """Bytes: the process, the streams, one stage's work, and what was solved before."""
        kept = min(LIMIT, samples * self.sequence * self._live())
        running = min(samples, BATCH_ROWS) * self.sequence * self._inside()
        solved = [pair for stage in self.stages for pair in self._solved(stage)]
        weight = max((4 * site.n * site.k for site, _ in solved), default=0)
        square = max((8 * site.k**2 for site, _ in solved), default=0)
        return (
            BASE_BYTES
            + (1 + self.two) * (kept + running)
            + WEIGHT_COPIES * weight
            + SQUARE_COPIES * square
            + sum(decision.packed_bytes for _, decision in solved)
        )

    def _live(self) -> int:
        """Bytes per token of the values that one stream holds at once, at its fullest stage."""
        held: dict[int, int] = {}
        most = 0
        for stage in self.stages:
            for value in (*stage.inputs, *stage.outputs, stage.activation):
                held[id(value)] = self._bytes(value)
            most = max(most, sum(held.values()))
            for value in stage.dead:
                held.pop(id(value), None)
        return most

    def _inside(self) -> int:
        """Bytes per token of all that the largest stage computes: a runtime's arena keeps it."""
        return max(
            (
                sum(self._bytes(value) for node in stage.nodes for value in node.outputs)
                for stage in self.stages
            ),
            default=0,
        )

    def _bytes(self, value: ir.Value) -> int:
        """Bytes of a value per token.

        Two axes that are not fixed are batch and sequence, each further one is the sequence once
        more, as in `[B, heads, S, S]`; where there are fewer the last axis counts alone.
        """
        size = max(1, value.dtype.bitwidth // 8) if value.dtype is not None else 4
        dims = tuple(value.shape) if value.shape is not None else ()
        fixed = [dim for dim in dims if isinstance(dim, int)]
        free = len(dims) - len(fixed)
        width = self.widths.get(id(value))
        if width is None and free >= 2:
            width = math.prod(fixed) * self.sequence ** (free - 2)
        elif width is None:
            width = dims[-1] if dims and isinstance(dims[-1], int) else 1
        return width * size


def _steps(spec: str) -> list[Any]:
    """The solvers that a composed one is made of, with their own defaults."""
    return [registry.load("solver", name)() for name in parts_of(spec)]


def _tried(spec: str, pairs: Sequence[tuple[Site, Decision]]) -> list[str]:
    """The composed solvers that are tried on weights: those with something to do there."""
    (first, *_) = _steps(spec)
    if first.role != "choice":
        return [spec]
    free = any(parse(decision.format or "").has_ranges for _, decision in pairs)
    rounded = any(decision.activations for _, decision in pairs)
    return [
        each
        for each in first.candidates(True)
        if (free or all(solver.role != "ranges" for solver in _steps(each)))
        and (rounded or not needs_activations(each))
    ]


def _searching(ranges: Any, fmt: Format) -> float:
    """Of a search for ranges, per weight, in flops of a product that takes as long."""
    if ranges is None:
        return 0.0
    if not fmt.free_scales:
        return float(_RANGE * len(fmt.moves))
    return float(_RANGE * ranges.widths() * (1 if fmt.symmetric else _SHIFTS))


def spell_time(seconds: float) -> str:
    """`40 s`, `5 min`, `2.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def spell_size(count: int) -> str:
    """Bytes, roughly: `420 MB`, `2.1 GB`."""
    return f"{count / 1e6:.0f} MB" if count < 999_500_000 else f"{count / 1e9:.1f} GB"
