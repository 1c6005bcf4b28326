"""What a run of `optimize` leaves: the model's metadata, and its report with notes and totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph.decoder_head import logits_notes
from qgraph.expert_sites import GATHERED
from qgraph.fused_ops import fusion_rows, summary, to_metadata
from qgraph.graph import Graph
from qgraph.idle_options import idle_notes
from qgraph.model_metadata import read_metadata, site_entries, write_metadata
from qgraph.outcomes import (
    INPUTS_SCALED,
    ROWS_ORDERED,
    ROWS_SCALED,
    Result,
    as_solved,
    carry,
    merged_sites,
    metadata,
)
from qgraph.plan import QuantPlan
from qgraph.run_notes import (
    plan_totals,
    stored_bytes,
    thin_data_notes,
    version_notes,
    write_report,
)
from qgraph.runtime_needs import needs_for
from qgraph.site import PACKED

if TYPE_CHECKING:
    from qgraph.lowering import Lowering
    from qgraph.making import Made
    from qgraph.preparing import Preparation


def note_decisions(
    model: ir.Model, plan: QuantPlan, errors: Mapping[str, float | None], lowering: Lowering
) -> None:
    """Write the decisions into the metadata of a lowered model.

    errors: by site, ‖W − Ŵ‖/‖W‖ of the weight as written.
    """
    found, request = lowering.findings, lowering.request
    plan = as_solved(plan, found.solved)
    marks = {
        ROWS_ORDERED: found.permuted,
        ROWS_SCALED: found.rows_scaled,
        INPUTS_SCALED: found.inputs_scaled,
    }
    merged = found.merged
    errors = {**errors, **{each: errors.get(name) for name in merged for each in merged[name]}}
    content = metadata(plan, request.recipe, errors, marks) | dict(request.origin)
    carry(content["sites"], site_entries(read_metadata(model)))
    content["sites"] |= merged_sites(plan, errors, merged)
    if fusions := fusion_rows(lowering.report.steps):
        content["fusions"] = to_metadata(fusions)
    if found.cache is not None:
        content["kv_cache"] = found.cache.to_json()
    if lowering.calibration is not None:
        content["calibration"] = list(lowering.calibration.sources)
    write_metadata(model, content)


def result(
    made: Made,
    prepared: Preparation,
    lowering: Lowering,
    *,
    before: int,
    seconds: Mapping[str, float],
    report: Path | None,
) -> Result:
    """The result of a run, its report completed and written to `report`.

    before: bytes of the model as it came. seconds: by stage.
    """
    request, found = lowering.request, lowering.findings
    plan = made.plan if request.dry_run else as_solved(made.plan, found.solved)
    model, files = made.graph.model, made.files
    after = sum(path.stat().st_size for path in files) or stored_bytes(model)
    predicted = prepared.prediction.to_json() if prepared.prediction is not None else None
    told = _told(model, prepared, lowering)
    times = {"times": [dataclasses.asdict(each) for each in prepared.times]}
    timed = times if prepared.times else {}
    notes = lowering.report.notes
    if prepared.graph.gathers_experts and _experts_are_packed(made.graph):
        notes[:] = [each for each in notes if each != GATHERED]
    lowering.report.notes.extend(thin_data_notes(found.statistics, made.plan))
    lowering.report.notes.extend(version_notes(prepared.graph.model, model))
    lowering.report.notes.extend(idle_notes(request, made.plan, lowering.report.steps))
    lowering.report.totals = {
        **plan_totals(plan, files),
        "bytes_before": before,
        "bytes_after": after,
        "seconds": dict(seconds),
        **told,
        "predicted": predicted,
        **timed,
    }
    if report is not None:
        fused = {"fusions": told["fusions"]} if told["fusions"] else {}
        content = {**plan.to_json(), "predicted": predicted, **fused, **timed}
        write_report(report, content if request.dry_run else lowering.report.to_json(), files)
    line = plan.coverage.line("quantized" if files else "would quantize", (before, after))
    return Result(
        made.graph, plan, lowering.report, files, line, prepared.prediction, prepared.lacks,
        prepared.times,
    )  # fmt: skip


def _experts_are_packed(graph: Graph) -> bool:
    """Whether a graph gathers no experts as floats any more."""
    return all(site.state in PACKED for site in graph.sites() if site.role == "experts")


def _told(model: ir.Model, prepared: Preparation, lowering: Lowering) -> dict[str, Any]:
    """Totals that the report's notes also tell, each in a line."""
    found, request = lowering.findings, lowering.request
    notes = lowering.report.notes
    totals: dict[str, Any] = {}
    if (needs := needs_for(request.target, model)) is not None:
        totals["oldest_runtime"] = needs.to_json()
        notes.append(needs.line)
    fusions = fusion_rows(lowering.report.steps)
    totals["fusions"] = to_metadata(fusions)
    notes.extend(filter(None, [summary(fusions, request.dry_run)]))
    if lowering.calibration is not None:
        totals["calibration"], more = lowering.calibration.seen(found.statistics)
        notes.extend(more)
    if found.cache is not None:
        totals["kv_cache"] = found.cache.to_json()
        notes.append(found.cache.line)
    if request.recipe.last_logits:
        notes.extend(logits_notes(model))
    if prepared.judge is not None:
        totals["budget"] = prepared.judge.to_json()
        notes.append(prepared.judge.line)
    return totals
