"""One run of `optimize`: plan, rewrite, write, check, and again where a check fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgraph.calibration import CalibrationData
from qgraph.capturing import Source, capture
from qgraph.checkpoint_source import CheckpointSource
from qgraph.gate import (
    capabilities_of,
    check_cache,
    check_head,
    check_names,
    check_opset,
    runtime_notes,
)
from qgraph.graph import Graph
from qgraph.lowering import Lowering
from qgraph.ort_versions import newest_opset
from qgraph.outcomes import Result
from qgraph.preparing import Preparation
from qgraph.progress import Progress
from qgraph.recipe import Recipe
from qgraph.report import Report, Step
from qgraph.run_notes import check_paths, stored_bytes
from qgraph.run_request import BLOCKS, Destination, Request
from qgraph.run_results import result
from qgraph.run_stages import RunStages
from qgraph.runtime_needs import require_runtime
from qgraph.wording import counted


class Run:
    """One run of `optimize`: plan, rewrite, write, check, and again where a check fails.

    The arguments are those of `Request`.
    """

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
        blocks: tuple[int, int] = BLOCKS,
        imported: Mapping[str, CheckpointSource] | None = None,
        tune: bool = False,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.request = Request(
            recipe, target, progress, strict, min_coverage, check, dry_run, data, blocks, imported,
            tune, origin or {},
        )  # fmt: skip
        self.report = Report({"target": target, "recipe": recipe.to_json(), "check": check})
        self.stages = RunStages(progress)

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
        from qgraph.making import Maker

        request, stages = self.request, self.stages
        destination = Destination(output, single_file, force, report, resume)
        graph = self._captured(model, destination)
        # Those of the checkpoint are among the files of a graph with imported weights.
        files = graph.files if request.imported is None else []
        before = sum(path.stat().st_size for path in files) or stored_bytes(graph.model)
        stages.progress.finish(f"{counted(len(graph.model.graph), 'node')}, {before / 1e6:.1f} MB")
        sites = graph.sites()
        changed = [
            Step("capture", "constant", site.name, "changed", "OVERRIDABLE_INPUT", site.weight_name)
            for site in sites
            if site.weight_name in graph.overridden
        ]
        about = request.runtime, request.target, request.recipe
        capabilities = capabilities_of(*about, checked=output is not None and request.check)
        notes = self.report.notes
        notes += runtime_notes(*about)
        prepared = Preparation(request, destination, stages, graph, capabilities, notes)
        plan = prepared.plan(sites)
        lowering = Lowering(
            request, capabilities, self.report, changed, prepared.calibration, prepared.work
        )
        maker = Maker(request, graph, lowering, prepared.judge, stages)
        made = maker.make(plan, destination)
        stages.finish()
        return result(
            made, prepared, lowering, before=before, seconds=stages.seconds, report=report
        )

    def _captured(self, model: Source, destination: Destination) -> Graph:
        """The model in canonical form, once it is clear that it can be what is asked for."""
        request, place = self.request, destination
        if isinstance(model, str | os.PathLike) and os.path.exists(model):
            check_paths([Path(model)], place.output, place.report, place.force)  # before any work
        self.stages.start("capture")
        graph = capture(model, opset=newest_opset(request.recipe.min_runtime))
        check_paths(graph.files, place.output, place.report, place.force)
        check_cache(graph, request.recipe)
        check_head(graph, request.recipe)
        check_names(graph, request.recipe)
        require_runtime(graph.model, request.recipe, graph.title)
        runs = request.check or request.data is not None
        check_opset(graph, request.runtime, runs=runs)
        self.report.notes.extend(graph.notes)
        return graph
