"""Solving all weights of a graph: the walk over its stages, and what is done at each stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.activation_kinds import INT8_AUTO, INT8_STATIC
from qgraph.capabilities import Query
from qgraph.formats.base import Array, parse
from qgraph.graph import Graph
from qgraph.kernel_choice import best_kernel, spell_kernel
from qgraph.kernel_ops import MATMUL_NBITS
from qgraph.passes.activation_ranges import STATIC, observed
from qgraph.passes.base import Context
from qgraph.passes.input_ranges import outliers
from qgraph.passes.input_scales import OUTPUT, scales
from qgraph.passes.level_check import LevelCost, level_cost
from qgraph.passes.lower_matmul_nbits import LowerMatMulNBits
from qgraph.passes.lower_w8a8 import LowerW8A8
from qgraph.passes.rounded import rounded
from qgraph.passes.solve_results import Kept, identity_of, keys_of
from qgraph.passes.solve_weights import Options, Solution, StageSolver, solve_alone
from qgraph.passes.solved import as_stored, transform_of
from qgraph.passes.stage_walk import SAMPLED_BATCHES, Stop, Walk
from qgraph.quant_tensor import QuantSource
from qgraph.recipe import FLOAT
from qgraph.report import Outcome, Step
from qgraph.sites import Site
from qgraph.stages import write_through

if TYPE_CHECKING:
    from torch import Tensor

    from qgraph.calibration import Calibration

SEQUENTIAL = "sequential"
SAMPLED_ROWS = 4096
"""Rows of a weight that say which of its input channels count."""


def solve_all(options: Options, graph: Graph, chosen: Sequence[Site], context: Context) -> None:
    """Solve `chosen` into `context.findings.solved`, and check kernels on calibration inputs.

    Sites that share a packed weight are solved at the first one. What the walk cannot reach, or
    a solver cannot do there, is solved without data or rounded, and says why.
    """
    run = _Solving(options, graph, chosen, context)
    if context.calibration is not None:
        run.walk(context.calibration)
    run.rest()


class _Solving:
    def __init__(
        self, options: Options, graph: Graph, chosen: Sequence[Site], context: Context
    ) -> None:
        self.options, self.graph, self.context = options, graph, context
        self.owners = [site for site in chosen if self.context.plan[site.name].shared_with is None]
        self.sites = graph.sites()
        self.stored = Stored()
        self.main = {id(node) for node in graph.model.graph}
        self.kept: Kept | None = None
        self.lowering = context.plan.recipe.configured("lower_w8a8", LowerW8A8)
        self.fusing = context.plan.recipe.configured(LowerMatMulNBits.name, LowerMatMulNBits)
        self.guesses: dict[int, Tensor | None] = {}

    def walk(self, data: Calibration) -> None:
        """Every stage, in the order of execution."""
        seen = [site for site in self.sites if self._is_seen(site)]
        self._resume(seen, data)
        solved = self.context.findings.solved
        wanted = {site.name for site in self.owners if site.name not in solved}
        self._round_others(self.sites)
        decisions = self.context.plan.everywhere
        known = (*STATIC, INT8_AUTO)
        observing = any(item.activations in known or item.outliers for item in decisions)
        if not wanted and not observing:  # a few tokens are enough to check kernels
            few = slice(SAMPLED_BATCHES)
            data = dataclasses.replace(data, batches=data.batches[few], masks=data.masks[few])
        sequential = bool(self.owners) and self.context.plan.recipe.calibration == SEQUENTIAL
        walk = Walk(
            self.graph, seen, data, self.stored,
            sequential=sequential, crossed=self.options.correct, residual=self.options.residual,
            relative=self.options.relative,
            wanted=wanted,
        )  # fmt: skip
        stages = len(walk.stages)
        for at, stop in enumerate(walk):
            self._stop(stop)
            if self.context.progress is not None:
                self.context.progress(1000 * (at + 1) // stages)
        self.context.findings.measured = True

    def _resume(self, seen: Sequence[Site], data: Calibration) -> None:
        """Take what an earlier run kept."""
        work = self.context.work
        if work is None or not self.owners:
            return
        target, plan = self.context.capabilities.target, self.context.plan
        identity = identity_of(self.options, self.graph, plan, data, target)
        work.begin(identity)
        self.kept = Kept(work, keys_of(identity, self.graph, plan, seen))
        solved = self.context.findings.solved
        for site in self.owners:
            found = self.kept.load(site, plan[site.name]) if site.name not in solved else None
            if found is not None:
                solved[site.name] = found

    def _is_seen(self, site: Site) -> bool:
        """Whether the walk stops at a site: a linear of the main graph that is quantized here."""
        decision = self.context.plan.of(site.name)
        quantized = decision is not None and decision.quantized and site.state == "float"
        if not quantized or site.gathers or id(site.node) not in self.main:
            return False
        return site.node.attributes.get_int("transA", 0) == 0

    def _round_others(self, sites: Sequence[Site]) -> None:
        """What the plan rounds is seen rounded by what follows."""
        for site in sites:
            decision = self.context.plan.of(site.name)
            if decision is None or decision.solver != "rtn" or site.state != "float":
                continue
            self.stored.add(site, rounded(site, decision))

    def _stop(self, stop: Stop) -> None:
        owned = {site.name for site in self.owners}
        sites = [site for site in stop.stage.sites if site.name in owned]
        todo = [site for site in sites if site.name not in self.context.findings.solved]
        if todo and stop.moments is not None:
            stage = StageSolver(self.options, self.graph, self.sites, self.context.plan, stop)
            found = stage.solve(todo)
            for site in todo:
                if self.kept is not None:
                    self.kept.keep(site, found[site.name])
            self.context.findings.solved.update(found)
            self.context.findings.statistics.update(
                {site.name: (stop.moments.tokens, stop.moments.dead) for site in todo}
            )
        for site in sites:
            self.stored.add(site, self.context.findings.solved[site.name].source)
        sources = {site.name: self.stored.source(site) for site in stop.stage.sites}
        plan, findings = self.context.plan, self.context.findings
        columns = outliers(stop, plan, sources, self.lowering.threshold)
        findings.outliers.update(columns)
        findings.ranges.update(observed(stop, plan, sources, columns))
        asked = (INT8_AUTO, INT8_STATIC) if self.lowering.observer == OUTPUT else (INT8_AUTO,)
        chosen = scales(stop, plan, sources, columns, self.lowering.loss, asked)
        findings.scales.update(chosen)
        findings.ranges.update({name: (each.low, each.high) for name, each in chosen.items()})
        for site in stop.stage.sites:
            self._check_level(site, stop)

    def _check_level(self, site: Site, stop: Stop) -> None:
        """Ban, for this site, the kernels whose int8 activations cost too much on its inputs."""
        source, context = self.stored.source(site), self.context
        if source is None or site.name in context.findings.banned_at or not len(stop.sample):
            return
        level = self.fusing.accuracy_level or context.plan.recipe.accuracy_level
        failed, instead = self._without_level(site, source, stop.sample, level)
        if not failed:
            return
        worst = max(failed.values(), key=lambda each: each.error)
        outcome: Outcome = "kept"
        detail = f"int8 activations cost {worst}, and level 4 was asked for"
        if instead or level != "4":
            context.findings.banned_at[site.name] = frozenset(failed)
            other = f"{instead} instead" if instead else "no other kernel has its codes"
            bound = f"on calibration data (bound {worst.bound:.0%})"
            outcome, detail = "changed", f"int8 activations would cost {worst} {bound}: {other}"
        context.findings.level_steps.append(
            Step("solve", "level check", site.name, outcome, "LEVEL_FAILED_CHECK", detail)
        )

    def _without_level(
        self, site: Site, source: QuantSource, sample: Array, level: str
    ) -> tuple[dict[Query, LevelCost], str]:
        """Kernels that lose too much on `sample`, `[T, K]`, and what follows them, spelled."""
        context, recipe = self.context, self.context.plan.recipe
        decision = context.plan[site.name]
        assert decision.format is not None
        failed: dict[Query, LevelCost] = {}
        weight = None
        while True:
            answer, query = best_kernel(
                context.capabilities,
                site,
                parse(decision.format),
                level,
                context.banned.union(failed),
                recipe.prefer,
                recipe.dequantize_at_load,
                decision.activations or FLOAT,
            )
            if not answer:
                return failed, ""
            if query.op != MATMUL_NBITS or query.level != 4:
                return failed, spell_kernel(query)
            if weight is None:
                weight = source.format.dequantize(source.block(0, min(source.n, SAMPLED_ROWS)))
            x = as_stored(sample, source)
            cost = level_cost(x, weight, query.block or source.k, site.role)
            if not cost.too_much:
                return failed, spell_kernel(query)
            failed[query] = cost

    def rest(self) -> None:
        """What the walk did not solve."""
        for site in self.owners:
            if site.name not in self.context.findings.solved:
                self.context.findings.solved[site.name] = self._alone(site)

    def _alone(self, site: Site) -> Solution:
        why = "there is no calibration data"
        if self.context.calibration is not None:
            why = "its activation is transposed"
            if id(site.node) not in self.main:
                why = "its node lies in a body, which is not calibrated"
        return solve_alone(site, self.context.plan[site.name], why, self._importance(site))

    def _importance(self, site: Site) -> Tensor | None:
        """What all linears that read the site's activation say of its channels."""
        import torch

        from qgraph.passes import hqq

        key = id(site.activation)
        if key not in self.guesses:
            readers = [
                torch.from_numpy(np.array(other.weight.rows(0, min(other.n, SAMPLED_ROWS))))
                for other in self.sites
                if other.weight is not None
                and not other.gathers
                and other.state == "float"
                and other.k == site.k
                and other.activation is site.activation
            ]
            self.guesses[key] = hqq.importance(readers)
        return self.guesses[key]


class Stored(Mapping[str, Array]):
    """Constants as the quantized model has them, computed when a stage reads them."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Site, QuantSource]] = {}

    def add(self, site: Site, source: QuantSource) -> None:
        """The site's constant is quantized as `source` says."""
        assert site.weight is not None
        self._sources[site.weight.name] = (site, source)

    def source(self, site: Site) -> QuantSource | None:
        """What the site's weight is stored as."""
        assert site.weight is not None
        found = self._sources.get(site.weight.name)
        return found[1] if found is not None else None

    def __getitem__(self, name: str) -> Array:
        site, source = self._sources[name]
        rows = source.format.dequantize(source.block(0, source.n))
        return write_through(site, transform_of(source).undo(rows))

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
