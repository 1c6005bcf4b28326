"""The rewriting of a run of `optimize`: its passes, and what they found so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgraph import registry
from qgraph.bans import Bans
from qgraph.calibration import Calibration
from qgraph.capabilities import Capabilities
from qgraph.fused_ops import PASS as FUSING
from qgraph.gate import require_coverage
from qgraph.graph import Graph
from qgraph.outcomes import told_apart
from qgraph.pass_names import pass_names
from qgraph.passes.base import Context, Findings, Pass
from qgraph.passes.one_kernel import agree
from qgraph.plan import QuantPlan
from qgraph.recipe import Recipe
from qgraph.report import Report, Step
from qgraph.run_request import Request
from qgraph.runtime_needs import require_runtime
from qgraph.work_folder import WorkFolder

if TYPE_CHECKING:
    from qgraph.runtimes.base import Arrays, Feeds


def pass_of(name: str, recipe: Recipe) -> Pass:
    """The pass with the fields that `--option PASS.FIELD=VALUE` sets."""
    kind: type[Pass] = registry.load("pass", name)
    return recipe.configured(name, kind)


class Lowering:
    """Rewrites a graph by a plan, as often as a run asks for; what was found stays meanwhile.

    report: gets the steps of the last rewriting. captured: the steps before it.
    calibration, work: what passes may know and write to, see `Context`.
    findings: what the passes found. bans: what checks of the result found, which passes heed.
    """

    def __init__(
        self,
        request: Request,
        capabilities: Capabilities,
        report: Report,
        captured: Sequence[Step] = (),
        calibration: Calibration | None = None,
        work: WorkFolder | None = None,
    ) -> None:
        self.request, self.capabilities, self.report = request, capabilities, report
        self.captured, self.calibration, self.work = captured, calibration, work
        self.findings = Findings(imported=request.imported or {})
        self.bans = Bans(request.strict)

    def lower(self, graph: Graph, plan: QuantPlan) -> tuple[Graph, QuantPlan]:
        """The rewritten graph; sites that no kernel takes after all go back to float.

        Raises:
            CoverageError: too little is left quantized.
            InputError: the oldest runtime that is asked for cannot run the result.
        """
        request = self.request
        plan = self.bans.applied(plan)
        while True:
            lowered = self._rewritten(graph, plan)
            refused = self._refused(plan)
            if not agree(self.findings, plan) and not refused:
                break
            plan = plan.refusing(refused)
        require_coverage(plan, request.recipe, request.target, request.min_coverage)
        require_runtime(lowered.model, request.recipe, "the result")
        return lowered, self._as_lowered(plan, lowered)

    def start_anew(self) -> None:
        """Forget what was found with one plan, for another one."""
        self.findings = Findings(imported=self.findings.imported)
        self.bans.start_anew()

    def _rewritten(self, graph: Graph, plan: QuantPlan) -> Graph:
        """A copy of `graph` after all passes; their steps are the report's."""
        request = self.request
        self.report.steps[:] = [*self.captured, *self.bans.steps]
        lowered = graph.clone()
        context = Context(
            plan,
            self.capabilities,
            self.bans.kernels,
            progress=request.progress.advance,
            calibration=self.calibration,
            findings=self.findings,
            work=self.work,
            evaluate=self._evaluate if request.runtime.available() else None,
        )
        lowered.verify()
        for name in pass_names(request.target, request.recipe):
            steps = pass_of(name, request.recipe).run(lowered, context)
            self.report.extend(steps)
            if steps or name == "cleanup":  # no step, no change
                lowered.verify()
        return lowered

    def _evaluate(self, model: bytes | Path, feeds: Sequence[Feeds]) -> list[Arrays]:
        """Run a small model, or a file, as it is written: what proves a fusion."""
        session = self.request.runtime.open(model, reference=True, threads=1)
        return [session.run(each) for each in feeds]

    def _refused(self, plan: QuantPlan) -> dict[str, tuple[str, str]]:
        """By site that the plan quantizes and no pass took: reason code and detail."""
        # A later pass may have taken what an earlier one refused.
        last = {step.site: step for step in self.report.steps if step.pass_name != FUSING}
        return {
            site: self._why(step)
            for site, step in last.items()
            if step.outcome == "refused" and (item := plan.of(site)) is not None and item.quantized
        }

    def _why(self, step: Step) -> tuple[str, str]:
        """Reason code and detail of a refusal; after a check that failed, what that check found."""
        found = [each for each in self.findings.level_steps if each.site == step.site]
        if found and step.reason == "KERNEL_FAILED_CHECK" and step.site not in self.bans.failed:
            return "LEVEL_FAILED_CHECK", found[-1].detail
        return step.reason or "NO_FUSED_KERNEL", self.bans.why(step)

    def _as_lowered(self, plan: QuantPlan, lowered: Graph) -> QuantPlan:
        """The plan with the kernels that run, and the scales of inputs that were found."""
        found = self.findings
        failed = self.bans.failed | {
            step.site: ("LEVEL_FAILED_CHECK", step.detail) for step in found.level_steps
        }
        sites = told_apart(lowered.sites(), found.merged)
        plan = plan.running(sites, failed)
        members = [found.merged.get(name, (name,)) for name in found.widened]
        plan = plan.widened(sites, {each for names in members for each in names})
        if self.request.dry_run and self.request.data is not None:  # which would choose the scales
            return plan
        return plan.scaled(sites, {name: each.detail for name, each in found.scales.items()})
