"""Which format each weight gets, so that a budget of bits, of bytes or of loss is kept.

Losses are measured for one format of each weight and scaled to the others by the error of the
weight's own output. They add to first order; what that leaves wrong is measured on whole plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from qgraph.calibration import Calibration
from qgraph.capabilities import Capabilities
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.graph import Graph
from qgraph.held_out import fewer
from qgraph.mixed import Doubles, Option, Problem, Unit, units_of
from qgraph.passes.sensitivity import Probe, Progress, output_errors
from qgraph.plan import QuantPlan
from qgraph.planning import make_plan
from qgraph.recipe import FLOAT, Recipe
from qgraph.run_notes import stored_bytes
from qgraph.shared_weights import weight_keys
from qgraph.sites import Site
from qgraph.stages import Stage

PROBED_TOKENS = 256
"""Tokens on which the loss of each weight alone is measured."""
RULED_OUT = 1e9
"""The loss of an option that cannot be made."""
FAR = 4.0
"""Losses that are scaled up by more are measured, once a plan wants them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """A plan that keeps the budget, if its loss is as predicted.

    options: of each unit. loss: predicted, corrected by what was measured so far.
    nbytes: of the file, as far as known. bits: a weight, over quantized linears.
    gap: how much better another choice could be at most by the same losses, relative.
    """

    plan: QuantPlan
    options: tuple[int, ...]
    loss: float
    nbytes: int
    bits: float
    gap: float


class BitBudget:
    """The choice of formats for one graph, recipe and target.

    logits: the output whose divergence is the loss; None for the relative error of all outputs.
    factor: what whole plans lose, in units of the sum of their weights' losses.
    known: of each unit by its name, the losses that were measured, by option.
    """

    def __init__(
        self,
        graph: Graph,
        sites: Sequence[Site],
        recipe: Recipe,
        capabilities: Capabilities,
        logits: str | None,
    ) -> None:
        self.graph, self.sites, self.recipe = graph, sites, recipe
        self.capabilities = capabilities
        self.probe = Probe(graph, sites, logits)
        self.plans = self._plans()
        self.units = units_of(self.plans, weight_keys(sites), frozenset(self.probe.sites))
        self.factor = 1.0
        self.known: dict[str, dict[int, float]] = {}
        self.data: Calibration
        self.problem: Problem

    def _plans(self) -> list[QuantPlan]:
        """The recipe's own plan, and one for each candidate."""
        base = make_plan(self.sites, self.recipe, self.capabilities)
        mine = [s.name for s in self.sites if s.name in self.probe.sites and base[s.name].quantized]
        asked = (dict.fromkeys(mine, spelled) for spelled in self.recipe.candidates)
        plans = (
            make_plan(self.sites, self.recipe, self.capabilities, chosen=each) for each in asked
        )
        return [base, *plans]

    def measure(self, data: Calibration, cut: bool, progress: Progress | None = None) -> None:
        """Find the loss of every option.

        cut: whether the model takes samples that are shorter than those of `data`.
        """
        self.data = fewer(data, PROBED_TOKENS, cut=cut)
        errors = _Errors(self.units)
        tried = [(unit, at) for unit in self.units for at in _measured(unit, self.probe)]
        variants = [unit.variant(at) for unit, at in tried]
        found = self.probe.measure(variants, self.data, errors.look, progress)
        for (unit, at), loss in zip(tried, found, strict=True):
            self.known.setdefault(unit.name, {})[at] = float(loss)
        losses = [_losses(unit, self.known[unit.name], errors) for unit in self.units]
        self.problem = self._problem(losses)

    def refine(self, options: Sequence[int]) -> bool:
        """Measure the losses of options that were scaled up far; whether there are any."""
        units = zip(self.units, self.problem.losses, options, strict=True)
        tried = [
            (number, at)
            for number, (unit, losses, at) in enumerate(units)
            if at not in self.known[unit.name]
            and losses[at] > FAR * max(self.known[unit.name].values())
        ]
        variants = [self.units[number].variant(at) for number, at in tried]
        found: list[float] = self.probe.measure(variants, self.data).tolist() if tried else []
        losses = [each.copy() for each in self.problem.losses]
        for (number, at), loss in zip(tried, found, strict=True):
            self.known[self.units[number].name][at] = losses[number][at] = loss
        self.problem = dataclasses.replace(self.problem, losses=tuple(losses))
        return bool(tried)

    def _problem(self, losses: Sequence[Doubles]) -> Problem:
        base = self.plans[0]
        mine = {site for unit in self.units for site in unit.sites}
        fixed = [
            item
            for item in base.decisions
            if item.quantized and item.site not in mine and item.shared_with is None
        ]
        linears = [item for item in fixed if item.role != "embedding"]
        roots = {
            site.weight.root.name: site.weight.tensor.nbytes
            for site in self.sites
            if site.weight is not None and site.state == "float" and base[site.name].quantized
        }
        other = stored_bytes(self.graph.model) - sum(roots.values())
        return Problem(
            tuple(self.units),
            tuple(losses),
            sum(item.packed_bytes for item in linears),
            sum(item.n * item.k for item in linears),
            other + sum(item.packed_bytes for item in fixed),
        )

    def forbid(self, proposal: Proposal, made: QuantPlan) -> bool:
        """Rule out the options that came to nothing: weights that stayed in float after all."""
        losses = [each.copy() for each in self.problem.losses]
        found = False
        for unit, each, at in zip(self.units, losses, proposal.options, strict=True):
            if at in unit.rounded and not all(made[site].quantized for site in unit.sites):
                each[at], found = RULED_OUT, True
        self.problem = dataclasses.replace(self.problem, losses=tuple(losses))
        return found

    def propose(self, limit: float | None = None) -> Proposal | None:
        """The best plan within the recipe's bits or bytes, or the smallest within a sum of losses.

        None where no plan has so little loss.

        Raises:
            InputError: no plan is small enough.
        """
        recipe, problem = self.recipe, self.problem
        if recipe.target_bits is not None:
            picked = problem.within_bits(recipe.target_bits)
        elif recipe.max_size is not None:
            picked = problem.within_bytes(recipe.max_size)
        else:
            assert limit is not None
            picked = problem.within_loss(limit)
        if picked is None or problem.loss(picked.options) >= RULED_OUT:
            self._refuse_size()
            return None
        return self._proposal(picked.options, picked.gap)

    def least(self) -> Proposal:
        """The plan of least loss that quantizes all it can, whatever it takes."""
        options = (
            unit.rounded[int(losses[unit.rounded].argmin())]
            for unit, losses in zip(self.units, self.problem.losses, strict=True)
        )
        return self._proposal(tuple(options), 0.0)

    def _proposal(self, options: tuple[int, ...], gap: float) -> Proposal:
        chosen = self.problem.formats(options)
        plan = make_plan(self.sites, self.recipe, self.capabilities, chosen=chosen)
        details = self.problem.details(options, self.factor)
        decisions = [
            dataclasses.replace(item, remark=_joined(item.remark, details[item.site]))
            if item.site in details
            else item
            for item in plan.decisions
        ]
        return Proposal(
            dataclasses.replace(plan, decisions=tuple(decisions)),
            options,
            self.factor * self.problem.loss(options),
            self.problem.nbytes(options),
            self.problem.bits(options),
            gap,
        )

    def _refuse_size(self) -> None:
        """Say what the smallest plan is, where the recipe asks for less."""
        problem, recipe = self.problem, self.recipe
        smallest = [
            int(np.where(losses < RULED_OUT, size, np.inf).argmin())
            for size, losses in zip(problem.sizes, problem.losses, strict=True)
        ]
        if recipe.target_bits is not None:
            raise InputError(
                f"--target-bits {recipe.target_bits:g}: the candidates take at least "
                f"{problem.bits(smallest):.2f} bits a weight ({problem.summary(smallest)}); allow "
                "more, or add a smaller candidate"
            )
        if recipe.max_size is not None:
            raise InputError(
                f"--max-size {recipe.max_size / 1e6:.4g} MB: the candidates take at least "
                f"{problem.nbytes(smallest) / 1e6:.4g} MB ({problem.summary(smallest)}); allow "
                "more, or add a smaller candidate"
            )

    def reserve(self, nbytes: int) -> None:
        """Count so many more bytes of the file as taken."""
        other = self.problem.other_bytes + nbytes
        self.problem = dataclasses.replace(self.problem, other_bytes=other)

    def loss_of(self, proposal: Proposal, data: Calibration) -> float:
        """What all weights together lose on `data`, rounded as proposed."""
        variant: dict[str, str] = {}
        for unit, option in zip(self.units, proposal.options, strict=True):
            variant |= unit.variant(option)
        return float(self.probe.measure([variant], data)[0])

    def summary(self, proposal: Proposal) -> str:
        """How many weights got each format."""
        return self.problem.summary(proposal.options)

    def corrected(self, proposal: Proposal, measured: float) -> None:
        """Scale all losses so that those of a plan add up to what it was found to lose."""
        added = self.problem.loss(proposal.options)
        if added > 0 and measured > 0:
            self.factor = measured / added


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def _measured(unit: Unit, probe: Probe) -> list[int]:
    """The options whose loss is measured: the recipe's own; of embeddings all."""
    roles = {probe.sites[site].role for site in unit.sites}
    return unit.rounded if "embedding" in roles else unit.rounded[:1]


def _losses(unit: Unit, known: dict[int, float], errors: _Errors) -> Doubles:
    """The loss of each option: measured, or scaled by the error of the unit's own output."""
    found = np.zeros(len(unit.options))
    ((reference, loss), *_) = known.items()
    for at, option in enumerate(unit.options):
        if FLOAT in option.formats:
            continue
        found[at] = known[at] if at in known else loss * errors.ratio(unit, option, reference)
    return np.maximum(found, 0.0)


class _Errors:
    """E‖(W − Ŵ) x‖² of each unit's linears, in every format that it may have."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = {site: unit for unit in units for site in unit.sites}
        self.found: dict[tuple[str, str], float] = {}

    def look(self, stage: Stage, x: Array) -> None:
        """Take the errors of a stage's linears."""
        for site in stage.sites:
            unit = self.units.get(site.name)
            if unit is None:
                continue
            at = unit.sites.index(site.name)
            formats = list(dict.fromkeys(option.formats[at] for option in unit.options))
            formats = [spelled for spelled in formats if spelled != FLOAT]
            for spelled, error in output_errors(site, formats, x).items():
                self.found[site.name, spelled] = error

    def ratio(self, unit: Unit, option: Option, reference: int) -> float:
        """The error of an option in units of that of the one whose loss was measured."""
        first = self._sum(unit, unit.options[reference])
        return self._sum(unit, option) / first if first > 0 else 0.0

    def _sum(self, unit: Unit, option: Option) -> float:
        pairs = zip(unit.sites, option.formats, strict=True)
        return sum(self.found.get(pair, 0.0) for pair in pairs)
