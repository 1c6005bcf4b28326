"""The making of a plan's model: rewritten, written, checked, judged, and again if need be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.check import SiteCheck, check_model
from qgraph.fusion_gain import gain_notes
from qgraph.graph import Graph
from qgraph.lost_weights import IN_FLOAT32, coarse_notes
from qgraph.outcomes import with_errors
from qgraph.plan import UNSOLVED, QuantPlan
from qgraph.run_notes import stored_bytes
from qgraph.run_request import Destination, Request
from qgraph.run_results import note_decisions
from qgraph.run_stages import RunStages
from qgraph.wording import counted
from qgraph.writer import DataFile, Save

if TYPE_CHECKING:
    from qgraph.budgeting import Judge
    from qgraph.lowering import Lowering


@dataclasses.dataclass(frozen=True)
class Made:
    """A model that was made. files: what was written, the .onnx first."""

    graph: Graph
    plan: QuantPlan
    files: list[Path]


class Maker:
    """Makes models of `graph`.

    judge: measures each, and may want another; None where there is neither budget nor bound.
    """

    def __init__(
        self,
        request: Request,
        graph: Graph,
        lowering: Lowering,
        judge: Judge | None,
        stages: RunStages,
    ) -> None:
        self.request, self.graph, self.lowering = request, graph, lowering
        self.judge, self.stages = judge, stages

    def make(self, plan: QuantPlan, destination: Destination) -> Made:
        """The model: written where that is asked for, else in memory; of a dry run, as it would be.

        Raises:
            InputError: it cannot be written there.
            CoverageError: too little can be quantized after all.
            NumericError: a weight does not read back; with `strict`, a kernel is wrong; or no
                model keeps the bound.
        """
        if self.request.dry_run:
            # Refusals of the lowering show with any codes; solvers have no data here.
            lowered, checked = self.lowering.lower(self.graph, plan.solved_by("rtn"))
            return Made(lowered, checked.with_solvers_of(plan), [])
        if destination.output is None:
            return self._in_memory(plan)
        try:
            return self._written(plan, destination.output, destination)
        except BaseException as error:  # Ctrl-C, a full disk: what was finished is not lost
            work = self.lowering.work
            if work is not None and work.way_on:
                error.add_note(work.way_on)
            raise

    def _in_memory(self, plan: QuantPlan) -> Made:
        """The model, its weights computed when they are read."""
        while True:
            lowered, made = self.lowering.lower(self.graph, plan)
            again = self._verdict(made, lowered.model, stored_bytes(lowered.model))
            if again is None:
                return Made(lowered, made, [])
            plan = again

    def _written(self, plan: QuantPlan, output: Path, destination: Destination) -> Made:
        """The model as `output`; checked, loaded and measured before it has that name."""
        while True:
            lowered, plan = self._rewritten(plan)
            with self._save(lowered.model, output, destination) as save:
                data = save.write_data()
                checks = self._checked(lowered.model, data) if self.request.check else []
                if self.lowering.bans.take(lowered, checks, self.lowering.findings):
                    continue
                self._tell_errors(lowered.model, plan, checks)
                self._load(save)
                again = self._tried(plan, data, save)
                if again is not None:
                    plan = again
                    continue
                files = save.commit()
            self._tell(lowered, checks, files)
            return Made(lowered, plan, files)

    def _rewritten(self, plan: QuantPlan) -> tuple[Graph, QuantPlan]:
        waiting = any(item.solver not in UNSOLVED for item in plan.decisions)
        waiting = waiting and not self.lowering.findings.solved
        self.stages.start("solve" if waiting else "rewrite", total=1000 * waiting)
        lowered, plan = self.lowering.lower(self.graph, plan)
        note_decisions(lowered.model, plan, {}, self.lowering)
        return lowered, plan

    def _save(self, model: ir.Model, output: Path, destination: Destination) -> Save:
        self.stages.start("write", total=1000)
        advance = self.stages.progress.advance
        return Save(
            model,
            output,
            single_file=destination.single_file,
            force=destination.force,
            protect=self.graph.files,
            progress=lambda done, total: advance(1000 * done // max(1, total)),
        )

    def _checked(self, model: ir.Model, data: DataFile) -> list[SiteCheck]:
        self.stages.start("check")
        runtime, progress = self.request.runtime, self.stages.progress
        run = runtime.run_or_none()
        found = check_model(model, data, run, progress)
        what = "" if run is not None else f", stored bytes only: no {runtime.provider} here"
        progress.finish(f"{counted(len(found), 'site')} packed in this run{what}")
        return found

    def _tell_errors(self, model: ir.Model, plan: QuantPlan, checks: list[SiteCheck]) -> None:
        """The errors of the weights as written, in the metadata and in the report's steps."""
        errors = {item.site: item.weight_error for item in checks}
        note_decisions(model, plan, errors, self.lowering)
        steps = self.lowering.report.steps
        steps[:] = with_errors(steps, errors)

    def _load(self, save: Save) -> None:
        """Load the model in the runtime before it is called done."""
        if self.request.check and self.request.runtime.available():
            self.stages.start("load")
            save.trial(self.request.runtime.load)

    def _tried(self, plan: QuantPlan, data: DataFile, save: Save) -> QuantPlan | None:
        """What `_verdict` says of the files, before they get their names."""
        if self.judge is None:
            return None
        plans: list[QuantPlan | None] = []

        def judge(path: Path) -> None:
            plans.append(self._verdict(plan, path, data.size + path.stat().st_size))

        save.trial(judge)
        return plans[0]

    def _verdict(
        self, plan: QuantPlan, candidate: Path | ir.Model, nbytes: int
    ) -> QuantPlan | None:
        """Measure what was made on samples that were held out; a plan where it is to be another."""
        if self.judge is None:
            return None
        self.stages.start("compare")
        again = self.judge.verdict(plan, candidate, nbytes)
        self.stages.progress.finish(self.judge.found)
        if again is not None:
            self.lowering.start_anew()
        return again

    def _tell(self, lowered: Graph, checks: list[SiteCheck], files: list[Path]) -> None:
        """What is to be told of a model that was written; its unfinished results are not needed."""
        request, work, notes = self.request, self.lowering.work, self.lowering.report.notes
        coarse = (item.coarse for item in checks if item.coarse is not None)
        notes += coarse_notes(coarse, IN_FLOAT32)
        if work is not None:
            notes += work.notes
            work.remove()
        if request.check:
            notes += gain_notes(self.graph, lowered, files, request.runtime, request.recipe)
