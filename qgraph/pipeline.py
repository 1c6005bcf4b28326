"""The Python API: capture, optimize, explain, open. Only this file and the CLI see every room."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph import registry
from qgraph._version import __version__
from qgraph.calibration import Calibration, CalibrationData
from qgraph.capabilities import Capabilities, Query
from qgraph.errors import CoverageError, InputError, MissingExtra, NumericError
from qgraph.graph import Graph
from qgraph.kernel_choice import PORTABLE, query_of
from qgraph.passes.base import Context, Pass
from qgraph.plan import (
    Decision,
    QuantPlan,
    make_plan,
    require_known_options,
)
from qgraph.progress import Progress, Silent
from qgraph.recipe import Override, Recipe
from qgraph.report import SCHEMA, Report, Step
from qgraph.run_notes import (
    check_paths,
    elsewhere,
    entry,
    peak_rss,
    plan_notes,
    stored_bytes,
    write_report,
)
from qgraph.samples import Data

if TYPE_CHECKING:
    from qgraph.check import SiteCheck
    from qgraph.explanation import Explanation
    from qgraph.runtimes.base import Runtime, Session
    from qgraph.writer import DataFile, Save

Source = str | os.PathLike[str] | ir.Model | Graph
METADATA_KEY = "qgraph"
LOST = 0.9
"""A relative weight error above this: nothing of the weight is left (2 bits leave 0.3 to 0.7)."""
_LOWERINGS: dict[str, tuple[str, ...]] = {
    "ort-cpu": ("lower_matmul_nbits", "lower_gather_block_quantized"),
    "ort-cuda": ("lower_matmul_nbits", "lower_gather_block_quantized"),
    "qdq": ("lower_qdq",),
}


@dataclasses.dataclass
class Result:
    """What `optimize` made.

    graph: the rewritten graph; its packed weights are computed when they are read.
    summary: the coverage line. files: what was written, the .onnx first.
    """

    graph: Graph
    plan: QuantPlan
    report: Report
    files: list[Path]
    summary: str


def capture(source: Source) -> Graph:
    """Bring a model into canonical form; its weights stay in their files.

    Raises:
        InputError: no readable model, data files missing or outside the model's folder, or a
            graph that cannot be represented.
    """
    from qgraph.frontends.canonical import canonicalize
    from qgraph.frontends.onnx_file import load
    from qgraph.trusted import trusted

    if isinstance(source, Graph):
        return source
    path = None if isinstance(source, ir.Model) else Path(os.path.abspath(os.fspath(source)))
    model = source.clone() if isinstance(source, ir.Model) else load(path or "")
    try:
        notes = canonicalize(model, trusted)
    except (IndexError, TypeError, AssertionError, KeyError, AttributeError) as error:
        raise InputError(
            f"the graph is malformed ({type(error).__name__}: {error}): check it with "
            "onnx.checker, and export it again"
        ) from error
    overridden = frozenset(note.name for note in notes if note.code == "OVERRIDABLE_INPUT")
    graph = Graph(model, path, [note.message for note in notes], overridden)
    graph.verify()
    return graph


def open(model: Source, target: str = "ort-cpu") -> Session:  # noqa: A001
    """A session that runs a model: `session.run(feeds) -> outputs`, both by name.

    A graph that was not saved is loaded from memory (up to 1 GB); a file of any size by its path.

    Raises:
        InputError: the runtime refuses the model; the message says at which node.
        MissingExtra: the runtime is not installed.
    """
    runtime: Runtime = registry.load("target", target)
    if isinstance(model, Graph):
        return runtime.open(model.model)
    return runtime.open(model if isinstance(model, ir.Model) else Path(model))


def optimize(
    model: Source,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002
    group: int | str | None = None,
    solver: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    overrides: Sequence[Override | str] = (),
    options: Mapping[str, str] | None = None,
    embedding: str | None = None,
    accuracy_level: str | int | None = None,
    min_elements: int | None = None,
    calibrate: Data | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    samples: int = 64,
    sequence: int = 512,
    unfused: str | None = None,
    target: str = "ort-cpu",
    check: bool = True,
    strict: bool = False,
    dry_run: bool = False,
    min_coverage: float = 0.0,
    single_file: bool = False,
    force: bool = False,
    report: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Quantize a model's linears and embeddings, and fuse them for a target.

    Args:
        model: a path, a graph or an `ir.Model`; never changed.
        output: the .onnx to write; None writes nothing (the graph of the result can be saved).
        recipe: what to do, or a recipe file; the keywords after it change single fields of it.
            group: a number or "row"; overrides: `Override`s, or texts as `--set` takes them.
        calibrate: data for solvers that need it (`gptq`): a text file with its `tokenizer`, a
            .npz or .jsonl file, token ids `[samples, T]`, or an iterable of feeds; at most
            `samples` of them, text in blocks of `sequence` tokens.
        target: what will run the model: `ort-cpu`, `ort-cuda` or `qdq`.
        check: run each kernel in use on the written bytes before the model is called good.
        strict: a kernel outside its bound is an error; otherwise the next kernel is taken.
        dry_run: stop after the plan.
        min_coverage: the least share (0 to 1) of the linears' weight bytes to be quantized.
        report: where to write all steps as JSON; with `dry_run` the plan.

    Raises:
        InputError: wrong model, recipe or output; nothing was written.
        CoverageError: nothing, or less than `min_coverage`, can be quantized.
        NumericError: with `strict`, a kernel missed its error bound.
    """
    given: dict[str, Any] = {
        "format": format,
        "group": 0 if group == "row" else group,
        "solver": solver,
        "embedding": embedding,
        "accuracy_level": None if accuracy_level is None else str(accuracy_level),
        "min_elements": min_elements,
        "unfused": unfused,
        "include": _several(include) or None,
        "exclude": _several(exclude) or None,
        "overrides": tuple(Override.parse(o) if isinstance(o, str) else o for o in overrides)
        or None,
        "options": options,
    }
    if isinstance(recipe, str | os.PathLike):
        recipe = Recipe.from_toml(Path(recipe))
    asked = dataclasses.replace(
        recipe or Recipe(), **{key: value for key, value in given.items() if value is not None}
    )
    data = None
    if calibrate is not None:
        path = Path(tokenizer) if tokenizer is not None else None
        data = CalibrationData(calibrate, path, samples, sequence)
    elif tokenizer is not None:
        raise InputError("a tokenizer goes with a calibration text: give --calibrate FILE too")
    run = _Run(asked, target, progress or Silent(), strict, min_coverage, check, dry_run, data)
    with _quiet_collector():
        return run.optimize(
            model,
            Path(output) if output is not None and not dry_run else None,
            single_file=single_file,
            force=force,
            report=Path(report) if report is not None else None,
        )


def _several(selectors: str | Sequence[str]) -> tuple[str, ...]:
    return (selectors,) if isinstance(selectors, str) else tuple(selectors)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A graph is tens of thousands of objects that live to the end of the run; going through them
    again and again took a third of the time, and kept the writing threads waiting.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def explain(
    model: Source,
    *,
    target: str | None = None,
    profile: bool = False,
    progress: Progress | None = None,
) -> Explanation:
    """What became of every site of a model, and which kernel runs it.

    Args:
        model: a path or a graph: as exported, or as `optimize` wrote it.
        target: None for the one that the model was made for, else `ort-cpu`.
        profile: run the model on inputs of its own making, and report what really ran.

    Raises:
        InputError: no readable model, or the runtime refuses it.
    """
    from qgraph.describe import describe, measured

    steps = progress or Silent()
    steps.stage("reading the model")
    graph = capture(model)
    metadata = read_metadata(graph.model)
    noted = metadata.get("target")
    wanted = target or (noted if noted in registry.names("target") else "ort-cpu")
    runtime: Runtime = registry.load("target", wanted)
    explanation = describe(graph, runtime.capabilities(), metadata)
    if profile:
        steps.stage("running the model")
        source = graph.source if graph.source is not None else graph.model
        explanation = measured(explanation, runtime, source)
    steps.finish()
    return explanation


def read_metadata(model: ir.Model) -> dict[str, Any]:
    """What `optimize` wrote into a model; empty where it did not, or where it is damaged."""
    try:
        found = json.loads(model.metadata_props.get(METADATA_KEY, "{}"))
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


class _Run:
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
    ) -> None:
        require_known_options(recipe)
        self.recipe, self.target, self.progress = recipe, target, progress
        self.strict, self.min_coverage, self.check = strict, min_coverage, check
        self.dry_run, self.data = dry_run, data
        self.runtime: Runtime = registry.load("target", target)
        self.report = Report({"target": target, "recipe": recipe.to_json(), "check": check})
        self.seconds: dict[str, float] = {}
        self.banned: frozenset[Query] = frozenset()
        self.changed: list[Step] = []
        self.forced: dict[str, tuple[str, str]] = {}
        self.calibration: Calibration | None = None
        self.solved: dict[str, Any] = {}
        self._stage = ("", time.perf_counter())

    def optimize(
        self,
        model: Source,
        output: Path | None,
        *,
        single_file: bool,
        force: bool,
        report: Path | None,
    ) -> Result:
        """See the function of this name."""
        self._start("capture")
        graph = capture(model)
        check_paths(graph, output, report, force)
        self.report.notes.extend(graph.notes)
        before = sum(path.stat().st_size for path in graph.files) or stored_bytes(graph.model)
        self.progress.finish(f"{len(graph.model.graph)} nodes, {before / 1e6:.1f} MB")
        sites = graph.sites()
        self.changed += [
            Step("capture", "constant", site.name, "changed", "OVERRIDABLE_INPUT", site.weight_name)
            for site in sites
            if site.weight_name in graph.overridden
        ]
        capabilities = self._capabilities(output)
        self._start("plan")
        plan = make_plan(sites, self.recipe, capabilities)
        self.progress.finish(plan.coverage.line("to quantize"))
        self.report.notes.extend(plan_notes(plan))
        self.report.notes.extend(elsewhere(graph, sites))
        self._gate(plan, report)
        if self.data is not None and not self.dry_run:
            self._calibrate(graph)
        if self.dry_run:
            # Refusals of the lowering show with any codes; solvers have no data here.
            lowered, checked = self._lower(graph, plan.solved_by("rtn"), capabilities)
            return self._result(lowered, checked.with_solvers_of(plan), [], before, report)
        if output is None:
            lowered, plan = self._lower(graph, plan, capabilities)
            return self._result(lowered, plan, [], before, report)
        return self._write(graph, plan, capabilities, output, single_file, force, before, report)

    def _calibrate(self, graph: Graph) -> None:
        assert self.data is not None
        self._start("calibration data")
        model = graph.source if graph.source is not None else graph.model
        self.calibration = self.data.load(self.runtime, model)
        self.progress.finish(f"{self.calibration.tokens} tokens")

    def _capabilities(self, output: Path | None) -> Capabilities:
        capabilities = self.runtime.capabilities()
        predicted = all(rule.origin == "predicted" for rule in capabilities.rules)
        if predicted:
            self.report.notes.append(
                f"{capabilities.provider} is not installed here: its kernels are predicted"
            )
        if output is not None and self.check and not self.runtime.installed():
            raise MissingExtra(
                "onnxruntime", "cpu", "checking the result", "Or skip the check with --no-check."
            )
        return capabilities

    def _gate(self, plan: QuantPlan, report: Path | None = None) -> None:
        """Refuse too little; the plan, with the reason of every site, goes to `report`."""
        coverage = plan.coverage
        nothing = not coverage.linears_quantized and not coverage.embeddings_quantized
        if not nothing and coverage.share >= self.min_coverage:
            return
        where = "add --report plan.json, and `qgraph explain plan.json` says why, site by site"
        if report is not None:
            write_report(report, plan.to_json())
            where = f"`qgraph explain {report}` says why, site by site"
        line = coverage.line("would quantize")
        if nothing:
            raise CoverageError(f"nothing was quantized: {line}; {where}")
        raise CoverageError(f"{line}: below --min-coverage {self.min_coverage:.0%}; {where}")

    def _lower(
        self, graph: Graph, plan: QuantPlan, capabilities: Capabilities
    ) -> tuple[Graph, QuantPlan]:
        """The rewritten graph; sites that no kernel takes after all go back to float."""
        lowerings = list(_LOWERINGS[self.target])
        if self.recipe.unfused == PORTABLE and self.target != "qdq":
            lowerings.append("lower_portable")
        plan = plan.refusing({k: v for k, v in self.forced.items() if plan.of(k)})
        while True:
            names = ["adopt_qdq", *_solvers(plan), *lowerings, "cleanup"]
            self.report.steps[:] = self.changed
            lowered = graph.clone()
            context = Context(
                plan,
                capabilities,
                self.banned,
                progress=self.progress.advance,
                calibration=self.calibration,
                solved=self.solved,
            )
            lowered.verify()
            for name in names:
                steps = _pass(name, self.recipe).run(lowered, context)
                self.report.extend(steps)
                if steps or name == "cleanup":  # no step, no change
                    lowered.verify()
            # A later pass may have taken what an earlier one refused.
            last = {step.site: step for step in self.report.steps}
            refused = {
                site: (step.reason or "NO_FUSED_KERNEL", step.detail)
                for site, step in last.items()
                if step.outcome == "refused" and (plan.of(site) or _NOTHING).quantized
            }
            if not refused:
                break
            plan = plan.refusing(refused)
        self._gate(plan)
        failed = {
            step.site: (step.reason or "", step.detail)
            for step in self.changed
            if step.pass_name == "check"
        }
        return lowered, plan.running(lowered.sites(), failed)

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
            self._start("rewrite")
            lowered, plan = self._lower(graph, plan, capabilities)
            self._describe(lowered.model, plan, {})
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
                self._describe(lowered.model, plan, errors)
                self._add_errors(errors)
                self._load(lowered.model, data, save)
                files = save.commit()
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
        lost = [item for item in checks if item.ok and item.weight_error > LOST]
        if lost and self.strict:
            raise NumericError(f"{lost[0].site}: {_lost(lost[0])}; nothing was written")
        self.forced.update({item.site: ("WEIGHT_LOST", _lost(item)) for item in lost})
        if not wrong:
            return bool(lost)
        first = wrong[0]
        words = f"{first.site}: {first.code}: {first.detail}"
        if self.strict or first.code == "BYTES":
            raise NumericError(f"{words}; nothing was written")
        sites = {site.name: site for site in lowered.sites()}
        before = self.banned
        for item in wrong:
            site = sites[item.site]
            query = query_of(site) if site.state == "fused" else None
            if query is None or query in before:  # there is no next kernel
                self.forced[item.site] = (str(item.code), item.detail)
            else:
                self.banned |= {query}
        self.changed += [
            Step("check", "next kernel", item.site, "changed", item.code, item.detail)
            for item in wrong
        ]
        return True

    def _load(self, model: ir.Model, data: DataFile, save: Save) -> None:
        """Load the model in the runtime before it is called done."""
        if self.check and self.runtime.available():
            self._start("load")
            save.trial(self.runtime.load)

    def _describe(
        self, model: ir.Model, plan: QuantPlan, errors: Mapping[str, float | None]
    ) -> None:
        """Write the decisions into the model's metadata: deterministic, no times, no paths."""
        sites = {item.site: entry(item, errors.get(item.site)) for item in plan.decisions}
        content = {
            "schema": SCHEMA,
            "version": __version__,
            "target": plan.target,
            "recipe": self.recipe.to_json(),
            "sites": sites,
        }
        model.metadata_props[METADATA_KEY] = json.dumps(content, separators=(",", ":"))

    def _add_errors(self, errors: Mapping[str, float | None]) -> None:
        self.report.steps[:] = [
            dataclasses.replace(step, error=errors[step.site])
            if step.site in errors and step.pass_name.startswith("quantize_")
            else step
            for step in self.report.steps
        ]

    def _result(
        self, lowered: Graph, plan: QuantPlan, files: list[Path], before: int, report: Path | None
    ) -> Result:
        self._start("")
        after = sum(path.stat().st_size for path in files) or stored_bytes(lowered.model)
        coverage = plan.coverage
        kernels: dict[str, int] = {}
        for item in plan.decisions:
            if item.kernel is not None:
                kernels[item.kernel] = kernels.get(item.kernel, 0) + 1
        self.report.totals = {
            **{k: v for k, v in dataclasses.asdict(coverage).items() if k != "refused"},
            "bytes_before": before,
            "bytes_after": after,
            "seconds": self.seconds,
            "peak_rss_bytes": peak_rss(),
            "kernels": kernels,
            "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
        }
        if report is not None:
            write_report(report, plan.to_json() if self.dry_run else self.report.to_json())
        verb = "quantized" if files else "would quantize"
        return Result(lowered, plan, self.report, files, coverage.line(verb, (before, after)))

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


def _lost(item: SiteCheck) -> str:
    return f"the quantized weight is {item.weight_error:.0%} off: its scales underflow"


def _solvers(plan: QuantPlan) -> list[str]:
    """The passes that the plan's solvers are; rounding, which needs nothing, last."""
    wanted = {item.solver for item in plan.decisions if item.quantized}
    known = [name for name in registry.names("solver") if name in wanted or name == "rtn"]
    return [f"quantize_{name}" for name in sorted(known, key=lambda name: name == "rtn")]


_NOTHING = Decision("", "", "", "", 0, 0)


def _pass(name: str, recipe: Recipe) -> Pass:
    """The pass with the fields that `--option PASS.FIELD=VALUE` sets."""
    kind = registry.load("pass", name)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, text in recipe.options.items():
        owner, _, field = key.partition(".")
        if owner == name:
            values[field] = _converted(key, text, fields[field].default)
    found: Pass = kind(**values)
    return found


def _converted(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise InputError(f"--option {key}={text}: wanted true or false")
        return words[text.lower()]
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(f"--option {key}={text}: wanted {type(default).__name__}") from None


__all__ = ["Result", "capture", "explain", "open", "optimize"]
