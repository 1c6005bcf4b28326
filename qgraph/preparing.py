"""What a run of `optimize` settles before it rewrites: its plan, and what that plan needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qgraph.calibration import Calibration
from qgraph.capabilities import Capabilities
from qgraph.errors import InputError
from qgraph.gate import require_coverage
from qgraph.graph import Graph
from qgraph.lowering import Lowering, pass_of
from qgraph.plan import QuantPlan
from qgraph.planning import make_plan
from qgraph.report import Report
from qgraph.run_notes import elsewhere, lacking, plan_notes
from qgraph.run_request import Destination, Request
from qgraph.run_stages import RunStages
from qgraph.sites import Site
from qgraph.size_times import SizeTimes
from qgraph.wording import counted
from qgraph.work_folder import WorkFolder

if TYPE_CHECKING:
    from qgraph.budgeting import Judge
    from qgraph.prediction import Prediction


class Preparation:
    """Plans, and makes ready what solvers and budgets work with.

    notes: get what is to be told of it. After `plan`:

    lacks: why the plan cannot be carried out with what was given; "" where it can.
    work: where solvers keep their results. prediction: what they will take.
    calibration: the data they measure; with a judge, the samples that it does not hold out.
    judge: measures what is made, where there is a budget or a bound.
    times: those that decided formats, where the model is for a purpose.
    """

    def __init__(
        self,
        request: Request,
        destination: Destination,
        stages: RunStages,
        graph: Graph,
        capabilities: Capabilities,
        notes: list[str],
    ) -> None:
        self.request, self.destination, self.stages = request, destination, stages
        self.graph, self.capabilities, self.notes = graph, capabilities, notes
        self.lacks = ""
        self.work: WorkFolder | None = None
        self.prediction: Prediction | None = None
        self.calibration: Calibration | None = None
        self.judge: Judge | None = None
        self.times: tuple[SizeTimes, ...] = ()

    def plan(self, sites: Sequence[Site]) -> QuantPlan:
        """The plan for the graph's sites, all that it needs being there.

        Raises:
            InputError: a solver has no data; or an unfinished run is in the way of this one.
            CoverageError: the plan quantizes too little.
            NumericError: no plan keeps the bound.
        """
        request, progress = self.request, self.stages.progress
        if request.data is not None and (request.recipe.judged or not request.dry_run):
            self.notes += request.data.check_tokenizer(request.runtime, self.graph.origin)
        self.stages.start("plan")
        plan = self._planned(sites)
        progress.finish(plan.coverage.line("to quantize"))
        self.notes += [*plan_notes(plan), *elsewhere(self.graph, sites)]
        self._require_coverage(plan)
        self.lacks = lacking(plan) if request.data is None else ""
        if self.lacks and not request.dry_run:
            raise InputError(self.lacks)
        recipe = request.recipe
        late = bool(recipe.kv_cache) or recipe.add_cache or recipe.last_logits
        if late and request.data is not None and not request.dry_run:
            self._rehearse(plan)
        if request.recipe.judged:
            if not self.destination.resume:  # what is in the way is told before the long work
                self._open_work(plan)
            plan = self._judged(sites, plan)
        self._open_work(plan)
        self._predict(sites, plan)
        if request.data is not None and not request.dry_run and self.calibration is None:
            self.calibration = self._calibrate()
        return plan

    def _planned(self, sites: Sequence[Site]) -> QuantPlan:
        request = self.request
        if not request.recipe.purpose:
            return make_plan(sites, request.recipe, self.capabilities, request.imported)
        from qgraph.tuning import plan_by_purpose

        found = plan_by_purpose(
            self.graph, sites, request.recipe, self.capabilities, request.runtime,
            tune=request.tune, progress=self.stages.progress,
        )  # fmt: skip
        self.times = found.times
        self.notes += [*found.notes, *map(str, found.times)]
        return found.plan

    def _require_coverage(self, plan: QuantPlan) -> None:
        request = self.request
        least, report = request.min_coverage, self.destination.report
        require_coverage(plan, request.recipe, request.target, least, report)

    def _open_work(self, plan: QuantPlan) -> None:
        """Look for what an earlier run left, whatever this one is: it would be lost or stale."""
        from qgraph.passes.solve_results import open_folder

        request, place = self.request, self.destination
        solve: Any = pass_of("solve", request.recipe)
        self.work = open_folder(
            place.output, plan, solve, self.capabilities.target, request.data is not None,
            resume=place.resume, force=place.force,
        )  # fmt: skip
        if self.work is not None and place.resume:
            self.stages.start("resume")
            self.stages.progress.finish(self.work.found)

    def _rehearse(self, plan: QuantPlan) -> None:
        """Go through the passes once without data, which takes long: what they refuse is told now.

        Raises:
            InputError: the graph cannot have the cache that is asked for.
        """
        self.stages.start("rehearsal")
        request = dataclasses.replace(self.request, dry_run=True)
        trial = Lowering(request, self.capabilities, Report({}))
        trial.lower(self.graph, plan.solved_by("rtn"))
        cache = request.recipe.kv_cache
        self.stages.progress.finish(f"can keep its cache in {cache}" if cache else "")

    def _judged(self, sites: Sequence[Site], plan: QuantPlan) -> QuantPlan:
        """Hold samples out, and choose a format for each weight where there is a budget."""
        from qgraph.budgeting import Judge

        request, progress = self.request, self.stages.progress
        data = self._calibrate()
        judge = Judge(self.graph, request.recipe, request.runtime, data, self.destination.report)
        self.judge = judge
        self.calibration = None if request.dry_run else judge.calibration
        if not request.recipe.budgeted:
            return plan
        self.stages.start("bit budget", total=1000)
        plan = judge.choose(sites, self.capabilities, progress.advance)
        progress.finish(judge.chosen)
        self._require_coverage(plan)
        return plan

    def _predict(self, sites: Sequence[Site], plan: QuantPlan) -> None:
        """Say what a calibrated run will take before it begins; a dry run prints it later."""
        from qgraph.prediction import is_calibrated, predict

        request = self.request
        given = request.data is not None
        if not (given or request.dry_run) or not is_calibrated(plan, given):
            return
        self.stages.start("prediction")
        samples, sequence = request.blocks
        if request.data is not None:
            sequence = max(1, request.data.longest)
        found = predict(self.graph, sites, plan, samples=samples, sequence=sequence)
        self.prediction = found
        self.stages.progress.finish("" if request.dry_run else found.line)

    def _calibrate(self) -> Calibration:
        """Read the calibration data."""
        request = self.request
        assert request.data is not None
        self.stages.start("calibration data")
        found = request.data.load(request.runtime, self.graph.origin, self.stages.progress)
        self.notes += found.notes
        self.stages.progress.finish(counted(found.tokens, "token"))
        return found
