"""One run of `optimize`: plan, rewrite, write, check, and again where a check fails."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph import registry
from qgraph.calibration import Calibration, CalibrationData
from qgraph.capabilities import Capabilities, Query
from qgraph.capturing import METADATA_KEY, Source, capture
from qgraph.checkpoint_source import CheckpointSource
from qgraph.errors import InputError, NumericError
from qgraph.fused_ops import PASS as FUSING
from qgraph.fused_ops import fusion_rows, summary, to_metadata
from qgraph.gate import capabilities_of, check_cache, require_coverage, runtime_notes
from qgraph.graph import Graph
from qgraph.kernel_choice import query_of
from qgraph.outcomes import (
    INPUTS_SCALED,
    ROWS_ORDERED,
    ROWS_SCALED,
    Result,
    as_solved,
    merged_sites,
    metadata,
    with_errors,
)
from qgraph.pass_names import pass_names
from qgraph.passes.base import Context, Findings, Pass
from qgraph.plan import UNSOLVED, Decision, QuantPlan
from qgraph.planning import make_plan, require_known_options
from qgraph.progress import Progress
from qgraph.recipe import Recipe
from qgraph.report import Report, Step
from qgraph.row_branches import MANY
from qgraph.run_notes import (
    check_paths,
    elsewhere,
    lacking,
    plan_notes,
    plan_totals,
    stored_bytes,
    write_report,
)
from qgraph.work_folder import WorkFolder

if TYPE_CHECKING:
    from qgraph.budgeting import Judge
    from qgraph.check import SiteCheck
    from qgraph.prediction import Prediction
    from qgraph.runtimes.base import Arrays, Feeds, Runtime
    from qgraph.sites import Site
    from qgraph.writer import DataFile, Save


class Run:
    """One run of `optimize`: plan, rewrite, write, check, and again where a check fails."""

    def __init__(
        self,
        recipe: Recipe,
        target: str,
        progress: Progress,
        strict: bool,
        min_coverage: float,
        check: bool,
        dry_run: bool = False,
        data: CalibrationData | None = None,
        blocks: tuple[int, int] = (64, 512),
        imported: Mapping[str, CheckpointSource] | None = None,
        tune: bool = False,
    ) -> None:
        if tune and not recipe.purpose:
            raise InputError(
                "--tune measures what --for decides by: add --for decode, prefill or both"
            )
        require_known_options(recipe)
        self.recipe, self.target, self.progress = recipe, target, progress
        self.strict, self.min_coverage, self.check = strict, min_coverage, check
        self.dry_run, self.data, self.blocks = dry_run, data, blocks
        self.tune = tune
        self.runtime: Runtime = registry.load("target", target)
        self.report = Report({"target": target, "recipe": recipe.to_json(), "check": check})
        self.seconds: dict[str, float] = {}
        self.banned: frozenset[Query] = frozenset()
        self.changed: list[Step] = []
        self.forced: dict[str, tuple[str, str]] = {}
        self.calibration: Calibration | None = None
        self.imported = imported
        self.origin: dict[str, Any] = {}
        self.findings = Findings(imported=imported or {})
        self.work: WorkFolder | None = None
        self.lacks = ""
        self.prediction: Prediction | None = None
        self.judge: Judge | None = None
        self._stage = ("", time.perf_counter())
        if recipe.judged and data is None:
            raise InputError(
                "a budget, and --max-kl, take calibration data: --calibrate FILE (text with "
                "--tokenizer, .npz or .jsonl), or --calibrate self for a language model"
            )

    def optimize(
        self,
        model: Source,
        output: Path | None,
        *,
        single_file: bool,
        force: bool,
        report: Path | None,
        resume: bool = False,
    ) -> Result:
        """See the function of this name."""
        self._start("capture")
        graph = capture(model)
        check_paths(graph, output, report, force)
        check_cache(graph, self.recipe)
        self.report.notes.extend(graph.notes)
        files = graph.files if self.imported is None else []  # those of the checkpoint among them
        before = sum(path.stat().st_size for path in files) or stored_bytes(graph.model)
        self.progress.finish(f"{len(graph.model.graph)} nodes, {before / 1e6:.1f} MB")
        sites = graph.sites()
        self.changed += [
            Step("capture", "constant", site.name, "changed", "OVERRIDABLE_INPUT", site.weight_name)
            for site in sites
            if site.weight_name in graph.overridden
        ]
        to_check = output is not None and self.check
        capabilities = capabilities_of(self.runtime, self.target, self.recipe, checked=to_check)
        self.report.notes.extend(runtime_notes(self.runtime, self.target, self.recipe))
        self._start("plan")
        plan = self._plan(graph, sites, capabilities)
        self.progress.finish(plan.coverage.line("to quantize"))
        self.report.notes.extend(plan_notes(plan))
        self.report.notes.extend(elsewhere(graph, sites))
        require_coverage(plan, self.recipe, self.target, self.min_coverage, report)
        self.lacks = lacking(plan) if self.data is None else ""
        if self.lacks and not self.dry_run:
            raise InputError(self.lacks)
        if self.recipe.judged:
            if not resume:  # what is in the way is told before the long work
                self._open_work(output, plan, capabilities.target, resume, force)
            plan = self._budgeted(graph, sites, plan, capabilities, report)
        self._open_work(output, plan, capabilities.target, resume, force)
        self._predict(graph, sites, plan)
        if self.data is not None and not self.dry_run and self.calibration is None:
            self._calibrate(graph)
        if self.dry_run:
            # Refusals of the lowering show with any codes; solvers have no data here.
            lowered, checked = self._lower(graph, plan.solved_by("rtn"), capabilities)
            return self._result(lowered, checked.with_solvers_of(plan), [], before, report)
        if output is None:
            while True:
                lowered, made = self._lower(graph, plan, capabilities)
                again = self._judged(made, lowered.model, stored_bytes(lowered.model))
                if again is None:
                    return self._result(lowered, made, [], before, report)
                plan = again
        try:
            return self._write(
                graph, plan, capabilities, output, single_file, force, before, report
            )
        except BaseException as error:  # Ctrl-C, a full disk: what was finished is not lost
            if self.work is not None and self.work.way_on:
                error.add_note(self.work.way_on)
            raise

    def _plan(self, graph: Graph, sites: Sequence[Site], capabilities: Capabilities) -> QuantPlan:
        if not self.recipe.purpose:
            return make_plan(sites, self.recipe, capabilities, self.imported)
        from qgraph.tuning import plan_by_purpose

        plan, notes = plan_by_purpose(
            graph, sites, self.recipe, capabilities, self.runtime,
            tune=self.tune, progress=self.progress,
        )  # fmt: skip
        self.report.notes.extend(notes)
        return plan

    def _open_work(
        self, output: Path | None, plan: QuantPlan, target: str, resume: bool, force: bool
    ) -> None:
        """Look for what an earlier run left, whatever this one is: it would be lost or stale."""
        from qgraph.passes.solve_results import open_folder

        solve: Any = _pass("solve", self.recipe)
        given = self.data is not None
        self.work = open_folder(output, plan, solve, target, given, resume=resume, force=force)
        if self.work is not None and resume:
            self._start("resume")
            self.progress.finish(self.work.found)

    def _predict(self, graph: Graph, sites: Sequence[Site], plan: QuantPlan) -> None:
        """Say what a calibrated run will take before it begins; a dry run prints it later."""
        from qgraph.prediction import is_calibrated, predict

        given = self.data is not None
        if not (given or self.dry_run) or not is_calibrated(plan, given):
            return
        self._start("prediction")
        samples, sequence = self.blocks
        if self.data is not None:
            sequence = max(1, self.data.longest)
        self.prediction = predict(graph, sites, plan, samples=samples, sequence=sequence)
        self.progress.finish("" if self.dry_run else self.prediction.line)

    def _calibrate(self, graph: Graph) -> None:
        assert self.data is not None
        self._start("calibration data")
        model = graph.source if graph.source is not None else graph.model
        self.calibration = self.data.load(self.runtime, model, self.progress)
        self.report.notes.extend(self.calibration.notes)
        self.progress.finish(f"{self.calibration.tokens} tokens")

    def _budgeted(
        self,
        graph: Graph,
        sites: Sequence[Site],
        plan: QuantPlan,
        capabilities: Capabilities,
        report: Path | None,
    ) -> QuantPlan:
        """Hold samples out, and choose a format for each weight where there is a budget."""
        from qgraph.budgeting import Judge

        self._calibrate(graph)
        assert self.calibration is not None
        self.judge = Judge(graph, self.recipe, self.runtime, self.calibration, report)
        self.calibration = None if self.dry_run else self.judge.calibration
        if not self.recipe.budgeted:
            return plan
        self._start("bit budget", total=1000)
        plan = self.judge.choose(sites, capabilities, self.progress.advance)
        self.progress.finish(self.judge.chosen)
        require_coverage(plan, self.recipe, self.target, self.min_coverage, report)
        return plan

    def _judged(self, plan: QuantPlan, candidate: Path | ir.Model, nbytes: int) -> QuantPlan | None:
        """Measure what was made on samples that were held out; a plan where it is to be another."""
        if self.judge is None:
            return None
        self._start("compare")
        again = self.judge.verdict(plan, candidate, nbytes)
        self.progress.finish(self.judge.found)
        if again is not None:
            self.findings = Findings(imported=self.findings.imported)
            self.forced = {}
            self.changed = [step for step in self.changed if step.pass_name == "capture"]
        return again

    def _lower(
        self, graph: Graph, plan: QuantPlan, capabilities: Capabilities
    ) -> tuple[Graph, QuantPlan]:
        """The rewritten graph; sites that no kernel takes after all go back to float."""
        names = pass_names(self.target, self.recipe, dry_run=self.dry_run)
        plan = plan.refusing({k: v for k, v in self.forced.items() if plan.of(k)})
        while True:
            self.report.steps[:] = self.changed
            lowered = graph.clone()
            context = Context(
                plan,
                capabilities,
                self.banned,
                progress=self.progress.advance,
                calibration=self.calibration,
                findings=self.findings,
                work=self.work,
                evaluate=self._evaluate if self.runtime.available() else None,
            )
            lowered.verify()
            for name in names:
                steps = _pass(name, self.recipe).run(lowered, context)
                self.report.extend(steps)
                if steps or name == "cleanup":  # no step, no change
                    lowered.verify()
            # A later pass may have taken what an earlier one refused.
            last = {step.site: step for step in self.report.steps if step.pass_name != FUSING}
            refused = {
                site: (step.reason or "NO_FUSED_KERNEL", self._why(step))
                for site, step in last.items()
                if step.outcome == "refused" and (plan.of(site) or _NOTHING).quantized
            }
            if not refused:
                break
            plan = plan.refusing(refused)
        require_coverage(plan, self.recipe, self.target, self.min_coverage)
        failed = {
            step.site: (step.reason or "", step.detail)
            for step in self.changed
            if step.pass_name == "check"
        }
        failed |= {
            step.site: ("LEVEL_FAILED_CHECK", step.detail)
            for step in self.findings.level_steps
            if step.outcome == "changed"
        }
        sites = lowered.sites()
        plan = plan.running(sites, failed)
        if not (self.dry_run and self.data is not None):  # which would choose the scales
            plan = plan.scaled(sites, {k: v.detail for k, v in self.findings.scales.items()})
        return lowered, plan

    def _evaluate(self, model: bytes | Path, feeds: Sequence[Feeds]) -> list[Arrays]:
        """Run a small model, or a file, as it is written: what proves a fusion."""
        session = self.runtime.open(model, reference=True, threads=1)
        return [session.run(each) for each in feeds]

    def _why(self, step: Step) -> str:
        """Why a site is refused; after a check that failed, what that check found."""
        found = [s.detail for s in self.changed if s.pass_name == "check" and s.site == step.site]
        return found[-1] if found and step.reason == "KERNEL_FAILED_CHECK" else step.detail

    def _write(
        self,
        graph: Graph,
        plan: QuantPlan,
        capabilities: Capabilities,
        output: Path,
        single_file: bool,
        force: bool,
        before: int,
        report: Path | None,
    ) -> Result:
        from qgraph.writer import Save

        protect = graph.files
        while True:
            waiting = any(item.solver not in UNSOLVED for item in plan.decisions)
            waiting = waiting and not self.findings.solved
            self._start("solve" if waiting else "rewrite", total=1000 * waiting)
            lowered, plan = self._lower(graph, plan, capabilities)
            self._describe(lowered.model, as_solved(plan, self.findings.solved), {})
            self._start("write", total=1000)
            with Save(
                lowered.model,
                output,
                single_file=single_file,
                force=force,
                protect=protect,
                progress=lambda done, total: self.progress.advance(1000 * done // max(1, total)),
            ) as save:
                data = save.write_data()
                checks = self._checked(lowered, data) if self.check else []
                if self._ban(lowered, checks):
                    continue
                errors = {item.site: item.weight_error for item in checks}
                self._describe(lowered.model, as_solved(plan, self.findings.solved), errors)
                self.report.steps[:] = with_errors(self.report.steps, errors)
                self._load(lowered.model, data, save)
                again = self._tried(plan, data, save)
                if again is not None:
                    plan = again
                    continue
                files = save.commit()
            if self.work is not None:
                self.report.notes.extend(self.work.notes)
                self.work.remove()
            return self._result(lowered, plan, files, before, report)

    def _checked(self, lowered: Graph, data: DataFile) -> list[SiteCheck]:
        from qgraph.check import check_model

        self._start("check")
        run = self.runtime.run_or_none()
        found = check_model(lowered.model, data, run, self.progress)
        what = "" if run is not None else f", stored bytes only: no {self.runtime.provider} here"
        self.progress.finish(f"{len(found)} sites packed in this run{what}")
        return found

    def _ban(self, lowered: Graph, checks: Sequence[SiteCheck]) -> bool:
        """Ban the kernels that failed; whether there are any, so that all is done again."""
        wrong = [item for item in checks if not item.ok]
        lost = [item for item in checks if item.lost]
        if lost and self.strict:
            raise NumericError(f"{lost[0].site}: {lost[0].lost}; nothing was written")
        merged = self.findings.merged
        for item in lost:
            reason = ("WEIGHT_LOST", item.lost)
            self.forced.update(dict.fromkeys(merged.get(item.site, (item.site,)), reason))
        if not wrong:
            return bool(lost)
        first = wrong[0]
        words = f"{first.site}: {first.code}: {first.detail}"
        if self.strict or first.code == "BYTES":
            raise NumericError(f"{words}; nothing was written")
        sites = {each.name: each for site in lowered.sites() for each in (site, *site.copies)}
        before = self.banned
        for item in wrong:
            site = sites[item.site]
            query = query_of(site) if site.state == "fused" else None
            if item.site in self.findings.merged:  # each on its own has its own kernel again
                self.findings.apart.update(self.findings.merged[item.site])
                continue
            second = item.site.endswith(MANY)  # a site does without rather than with a slower one
            if query is None or query in before or second:  # there is no next kernel
                self.forced[item.site] = (str(item.code), item.detail)
            else:
                self.banned |= {query}
        self.changed += [
            Step("check", "next kernel", item.site, "changed", item.code, item.detail)
            for item in wrong
        ]
        return True

    def _tried(self, plan: QuantPlan, data: DataFile, save: Save) -> QuantPlan | None:
        """What `_judged` says of the files, before they get their names."""
        if self.judge is None:
            return None
        plans: list[QuantPlan | None] = []

        def judge(path: Path) -> None:
            plans.append(self._judged(plan, path, data.size + path.stat().st_size))

        save.trial(judge)
        return plans[0]

    def _load(self, model: ir.Model, data: DataFile, save: Save) -> None:
        """Load the model in the runtime before it is called done."""
        if self.check and self.runtime.available():
            self._start("load")
            save.trial(self.runtime.load)

    def _describe(
        self, model: ir.Model, plan: QuantPlan, errors: Mapping[str, float | None]
    ) -> None:
        """Write the decisions into the model's metadata."""
        found = self.findings
        marks = {
            ROWS_ORDERED: found.permuted,
            ROWS_SCALED: found.rows_scaled,
            INPUTS_SCALED: found.inputs_scaled,
        }
        merged = self.findings.merged
        errors = {**errors, **{each: errors.get(name) for name in merged for each in merged[name]}}
        content = metadata(plan, self.recipe, errors, marks) | self.origin
        content["sites"] |= merged_sites(plan, errors, merged)
        if fusions := fusion_rows(self.report.steps):
            content["fusions"] = to_metadata(fusions)
        if found.cache is not None:
            content["kv_cache"] = found.cache.to_json()
        if self.calibration is not None:
            content["calibration"] = list(self.calibration.sources)
        model.metadata_props[METADATA_KEY] = json.dumps(content, separators=(",", ":"))

    def _result(
        self, lowered: Graph, plan: QuantPlan, files: list[Path], before: int, report: Path | None
    ) -> Result:
        self._start("")
        plan = plan if self.dry_run else as_solved(plan, self.findings.solved)
        after = sum(path.stat().st_size for path in files) or stored_bytes(lowered.model)
        sizes = {"bytes_before": before, "bytes_after": after}
        self.report.totals = {**plan_totals(plan, files), **sizes, "seconds": self.seconds}
        fusions = fusion_rows(self.report.steps)
        self.report.totals["fusions"] = to_metadata(fusions)
        self.report.notes.extend(filter(None, [summary(fusions, self.dry_run)]))
        if self.calibration is not None:
            seen, notes = self.calibration.seen(self.findings.statistics)
            self.report.totals["calibration"] = seen
            self.report.notes.extend(notes)
        if self.findings.cache is not None:
            self.report.totals["kv_cache"] = self.findings.cache.to_json()
            self.report.notes.append(self.findings.cache.line)
        if self.judge is not None:
            self.report.totals["budget"] = self.judge.to_json()
            self.report.notes.append(self.judge.line)
        predicted = self.prediction.to_json() if self.prediction is not None else None
        self.report.totals["predicted"] = predicted
        if report is not None:
            fused = {"fusions": to_metadata(fusions)} if fusions else {}
            content = {**plan.to_json(), "predicted": predicted, **fused}
            write_report(report, content if self.dry_run else self.report.to_json(), files)
        line = plan.coverage.line("quantized" if files else "would quantize", (before, after))
        return Result(lowered, plan, self.report, files, line, self.prediction, self.lacks)

    def _start(self, name: str, total: int = 0) -> None:
        before, since = self._stage
        now = time.perf_counter()
        if before:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - since
        self._stage = (name, now)
        if name:
            self.progress.stage(name, total)
        else:
            self.progress.finish()


_NOTHING = Decision("", "", "", "", 0, 0)


def _pass(name: str, recipe: Recipe) -> Pass:
    """The pass with the fields that `--option PASS.FIELD=VALUE` sets."""
    kind: type[Pass] = registry.load("pass", name)
    return recipe.configured(name, kind)
