"""A run that keeps a bound: formats are chosen, the model is made and measured, and again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import onnx_ir as ir

from qgraph.calibration import Calibration
from qgraph.capabilities import Capabilities
from qgraph.comparing import compare
from qgraph.comparison import WAYS_TO_LESS
from qgraph.constants import FLOATS
from qgraph.errors import InputError, NumericError
from qgraph.feeding import Feeder
from qgraph.graph import Graph
from qgraph.held_out import beginnings, fewer, samples_of, split
from qgraph.paired import find_logits
from qgraph.passes.bit_budget import BitBudget, Proposal
from qgraph.passes.sensitivity import Progress
from qgraph.plan import QuantPlan
from qgraph.recipe import Recipe
from qgraph.run_notes import write_report
from qgraph.sites import Site
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

ROUNDS = 3
"""How many models are made and measured to keep a bound."""
SETTLING = 4
"""How many plans are tried on rounded weights before a model is made."""
ENOUGH = 0.95
"""A loss of this share of the bound, or more, is as near as is worth another round."""
BELOW = 0.98
"""The share of the bound that is aimed at after a measurement."""
SETTLED_TOKENS = 2048
"""Tokens, of those held out, on which weights are rounded all together."""
SITE_BYTES = 1400
"""What a site takes in the file besides its weight: where its parts lie, and what the metadata say
of it. Measured, as is the next one."""
VALUE_BYTES = 64
"""What the file says of a node's output."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A model that was made: as proposed, and as measured."""

    proposal: Proposal
    loss: float
    nbytes: int


class Judge:
    """Holds samples out, chooses formats within a budget, and judges what is made with them.

    calibration: the samples that are not held out.
    rounded: of plans, what their weights lose, rounded all together and read by float kernels.
    ratio: what a model that was made lost, in units of that: solvers, kernels, other samples.
    report: where to write the best plan, where none is good enough.

    Raises:
        InputError: one sample only; or a bound on the divergence of a model without logits.
    """

    def __init__(
        self,
        graph: Graph,
        recipe: Recipe,
        runtime: Runtime,
        data: Calibration,
        report: Path | None,
    ) -> None:
        self.graph, self.recipe, self.runtime, self.report = graph, recipe, runtime, report
        self.calibration, self.held_out = split(data)
        self.source = graph.origin
        self.feeder = feeder = Feeder(runtime, self.source, runtime.inputs(self.source))
        self.logits = _logits_of(graph.model) if feeder.tokens is not None else None
        self.cut = feeder.tokens is not None and _is_open(graph.model, feeder.tokens)
        if recipe.max_kl is not None and self.logits is None:
            raise InputError(
                "the model gives no logits of a vocabulary: --max-kl has no meaning; leave it out "
                "(--target-bits and --max-size go by the outputs' error)"
            )
        self.budget: BitBudget | None = None
        self.proposal: Proposal | None = None
        self.trials: list[Trial] = []
        self.rounded: dict[tuple[int, ...], float] = {}
        self.ratio = 1.0
        self.measured: float | None = None
        self._last = False

    def choose(
        self, sites: Sequence[Site], capabilities: Capabilities, progress: Progress
    ) -> QuantPlan:
        """The plan that is predicted to keep the budget.

        Raises:
            InputError: no candidate, or no plan, is small enough.
            NumericError: no plan has so little loss.
        """
        budget = BitBudget(self.graph, sites, self.recipe, capabilities, self.logits)
        self.budget = budget
        if not budget.units:
            raise InputError(
                "no weight has a choice of formats: the target has a kernel for one candidate at "
                "most, or --set and --embedding say what each is; add a --candidate"
            )
        budget.measure(self.calibration, self.cut, progress)
        budget.reserve(_structure(self.graph.model) + SITE_BYTES * len(sites))
        for _ in range(ROUNDS):
            first = budget.propose(BELOW * self.recipe.max_kl if self.recipe.max_kl else None)
            if first is None or not budget.refine(first.options):
                break
        self.proposal = self._settled(budget)
        return self.proposal.plan

    def _settled(self, budget: BitBudget) -> Proposal:
        """The best proposal, its weights rounded all together on what is held out.

        Losses do not quite add: with a bound, the sum that just keeps it is searched for.
        """
        bound = None
        if self.recipe.mixed and self.recipe.max_kl is not None:
            bound = BELOW * self.recipe.max_kl / self.ratio
        limit = None if bound is None else bound / budget.factor
        low, high = 0.0, math.inf
        tried: dict[tuple[int, ...], Proposal] = {}
        while len(tried) < SETTLING:
            proposal = self._proposed(budget, limit)
            if proposal.options in tried:
                break
            loss = self._rounded(budget, proposal)
            tried[proposal.options] = dataclasses.replace(proposal, loss=loss)
            if bound is None or limit is None or ENOUGH * bound <= loss <= bound:
                break
            low, high = (limit, high) if loss <= bound else (low, limit)
            limit *= bound / loss if loss > 0 else 2.0
            limit = limit if low < limit < high else (low + high) / 2
        good = [each for each in tried.values() if bound is None or each.loss <= bound]
        best = min(good or tried.values(), key=lambda each: each.nbytes if good else each.loss)
        return dataclasses.replace(best, loss=self.ratio * best.loss)

    def _rounded(self, budget: BitBudget, proposal: Proposal) -> float:
        """What all weights of a proposal together lose, rounded to nearest."""
        if proposal.options not in self.rounded:
            data = fewer(self.held_out, SETTLED_TOKENS, cut=self.cut)
            self.rounded[proposal.options] = budget.loss_of(proposal, data)
        loss = self.rounded[proposal.options]
        budget.corrected(proposal, loss)
        return loss

    def _proposed(self, budget: BitBudget, limit: float | None) -> Proposal:
        found = budget.propose(limit)
        nothing = found is None or not any(item.quantized for item in found.plan.decisions)
        if nothing and not self.recipe.mixed:
            raise InputError(
                f"{_asked(self.recipe)}: all weights may stay floats, and nothing would be "
                "quantized; allow less, or name the formats to choose from (--candidate)"
            )
        if found is None or nothing:
            least = budget.least()
            self._refuse(
                f"no plan that quantizes anything has a KL divergence of at most "
                f"{self.recipe.max_kl:g}: the best ({budget.summary(least)}; "
                f"{least.nbytes / 1e6:.4g} MB) is predicted to have {least.loss:.2g}",
                least.plan,
            )
        return found

    def _refuse(self, words: str, plan: QuantPlan) -> NoReturn:
        """Say that the bound cannot be kept, and show the best plan."""
        where = "add --report plan.json, and `qgraph explain plan.json` shows that plan"
        if self.report is not None:
            write_report(self.report, plan.to_json())
            where = f"`qgraph explain {self.report}` shows that plan"
        raise NumericError(f"{words}; nothing was written; {where}; {WAYS_TO_LESS}")

    def verdict(self, made: QuantPlan, candidate: Path | ir.Model, nbytes: int) -> QuantPlan | None:
        """Measure a model that was made; None where it is good, else the plan of the next one.

        made: its plan, with weights in float that checks did not let be quantized as proposed.

        Raises:
            NumericError: the loss is above the bound, and no other plan is left to try.
        """
        budget, proposal = self.budget, self.proposal
        if budget is not None and proposal is not None and budget.forbid(proposal, made):
            self.proposal = self._settled(budget)
            return self.proposal.plan
        loss = self.measured = self._measure(candidate)
        if self.budget is None or self.proposal is None or self._last:
            self._gate(loss)
            return None
        self.trials.append(Trial(self.proposal, loss, nbytes))
        if self.recipe.max_size is not None and nbytes > self.recipe.max_size:
            return self._smaller(nbytes)
        if self.recipe.mixed:
            return self._nearer(loss)
        self._gate(loss)
        return None

    def _smaller(self, nbytes: int) -> QuantPlan | None:
        """The next plan after one whose file is too large: weights are not all of a file."""
        assert self.budget is not None and self.recipe.max_size is not None
        over = nbytes - self.recipe.max_size
        if len(self.trials) == ROUNDS:
            raise InputError(
                f"--max-size {self.recipe.max_size}: the smallest file of {ROUNDS} that were made "
                f"has {nbytes} bytes; allow more, or add a smaller candidate"
            )
        self.budget.reserve(over)
        return self._next(or_refuse=True)

    def _nearer(self, loss: float) -> QuantPlan | None:
        """The next plan on the way to the smallest file within the bound on the loss."""
        assert self.budget is not None and self.recipe.max_kl is not None
        bound = self.recipe.max_kl
        good = [trial for trial in self.trials if trial.loss <= bound]
        predicted = self.trials[-1].proposal.loss
        self.ratio *= loss / predicted if loss > 0 and predicted > 0 else 1.0
        near = ENOUGH * bound <= loss <= bound
        if len(self.trials) < ROUNDS and not near:
            again = self._next(or_refuse=not good)
            if again is not None:
                return again
        if not good:
            best = min(self.trials, key=lambda trial: trial.loss)
            made = counted(len(self.trials), "model that was", "models that were")
            made = made if len(self.trials) == 1 else f"all {made}"
            self._refuse(
                f"the KL divergence is above {bound:g} in {made} "
                f"made: the best ({self.budget.summary(best.proposal)}; "
                f"{best.nbytes / 1e6:.4g} MB) has {best.loss:.4g}",
                best.proposal.plan,
            )
        smallest = min(good, key=lambda trial: trial.nbytes)
        if smallest is self.trials[-1]:
            return None
        self._last, self.proposal = True, smallest.proposal
        return smallest.proposal.plan

    def _next(self, *, or_refuse: bool) -> QuantPlan | None:
        """The plan that is predicted to be best now; None where it was made already, or is none."""
        assert self.budget is not None
        try:
            proposal = self._settled(self.budget)
        except NumericError:
            if or_refuse:
                raise
            return None
        if any(proposal.options == trial.proposal.options for trial in self.trials):
            return None
        self.proposal = proposal
        return proposal.plan

    def _gate(self, loss: float) -> None:
        bound = self.recipe.max_kl
        if bound is not None and not loss <= bound:
            raise NumericError(
                f"the KL divergence is {loss:.4g} nats on {self._held} that were held out, more "
                f"than the {bound:g} that are allowed; nothing was written; {WAYS_TO_LESS}"
            )

    @property
    def _held(self) -> str:
        count = sum(1 for _ in samples_of(self.held_out))
        return f"{counted(count, 'sample')} ({counted(self.held_out.tokens, 'token')})"

    @property
    def chosen(self) -> str:
        """What was chosen, and what it is to cost; "" where nothing is."""
        if self.proposal is None or self.budget is None:
            return ""
        return "; ".join(
            [
                self.budget.summary(self.proposal),
                f"{self.proposal.bits:.2f} bits a weight of linears",
                f"{self._kind} {self.proposal.loss:.3g} predicted",
                _within(self.proposal.gap),
            ]
        )

    @property
    def found(self) -> str:
        """What it costs, measured; "" before that."""
        if self.measured is None:
            return ""
        return f"{self._kind} {self.measured:.3g} measured on {self._held} held out"

    @property
    def line(self) -> str:
        """What was chosen and what it costs, predicted and measured."""
        chosen = f"bit budget: {self.chosen}" if self.chosen else ""
        return "; ".join(filter(None, (chosen, self.found)))

    @property
    def _kind(self) -> str:
        return "KL divergence" if self.logits is not None else "relative output error"

    def to_json(self) -> dict[str, Any]:
        """For the report's totals."""
        found: dict[str, Any] = {"measured": self.measured, "held_out_tokens": self.held_out.tokens}
        if self.proposal is not None:
            fields = ("loss", "nbytes", "bits", "gap")
            found |= {name: getattr(self.proposal, name) for name in fields}
            found["trials"] = [
                {"predicted": each.proposal.loss, "measured": each.loss, "bytes": each.nbytes}
                for each in self.trials
            ]
        return found

    def _measure(self, candidate: Path | ir.Model) -> float:
        """The KL divergence, or the mean of the outputs' relative errors, of a model."""
        samples = list(samples_of(self.held_out))
        if self.recipe.last_logits and self.cut:
            samples = [each for sample in samples for each in beginnings(sample, self.feeder)]
        found = compare(
            self.source, candidate, samples, samples=len(samples), sites=False,
            target=self.runtime.target,
        )  # fmt: skip
        if found.divergence is not None:
            return found.divergence.mean
        return sum(row.error**2 for row in found.outputs) / len(found.outputs)


def _asked(recipe: Recipe) -> str:
    """A budget of size, as it is given."""
    if recipe.target_bits is not None:
        return f"--target-bits {recipe.target_bits:g}"
    return f"--max-size {(recipe.max_size or 0) / 1e6:.4g} MB"


def _within(gap: float) -> str:
    """How good a choice is, by the losses that it was made with."""
    exact = gap < 1e-6
    return "the best choice" if exact else f"within {gap:.1%} of the best choice"


def _logits_of(model: ir.Model) -> str | None:
    """The output that holds logits."""
    floats = [
        (value.name or "", tuple(value.shape or ()))
        for value in model.graph.outputs
        if value.dtype in FLOATS
    ]
    return find_logits(floats, model)


def _structure(model: ir.Model) -> int:
    """Bytes that the nodes of a model take in a file."""
    return sum(
        len(ir.serde.serialize_node(node).SerializeToString()) + VALUE_BYTES for node in model.graph
    )


def _is_open(model: ir.Model, tokens: str) -> bool:
    """Whether an input takes samples of any length."""
    value = next(value for value in model.graph.inputs if value.name == tokens)
    shape = tuple(value.shape or ())
    return len(shape) == 2 and not isinstance(shape[1], int)
