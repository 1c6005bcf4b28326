"""What a run leaves behind: the plan as it was solved, the steps' errors, the model's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qgraph._version import __version__
from qgraph.graph import Graph
from qgraph.plan import UNSOLVED, QuantPlan
from qgraph.prediction import Prediction
from qgraph.recipe import Recipe
from qgraph.report import SCHEMA, Report, Step
from qgraph.run_notes import entry


@dataclasses.dataclass
class Result:
    """What `optimize` made.

    graph: the rewritten graph; its packed weights are computed when they are read.
    summary: the coverage line. files: what was written, the .onnx first.
    prediction: of time and memory; None where no solver is calibrated.
    """

    graph: Graph
    plan: QuantPlan
    report: Report
    files: list[Path]
    summary: str
    prediction: Prediction | None = None


class Solved(Protocol):
    """What a solver found for one weight, as far as reports tell it."""

    @property
    def solver(self) -> str:
        """What was really used."""

    @property
    def detail(self) -> str:
        """How it was found."""

    @property
    def reason(self) -> str | None:
        """A reason code where that is not what was asked."""


def as_solved(plan: QuantPlan, solved: Mapping[str, Solved]) -> QuantPlan:
    """The plan with the solver that was really used at each site; `solved` is by owner."""
    decisions = []
    for item in plan.decisions:
        found = solved.get(item.shared_with or item.site)
        if found is not None and item.quantized and item.solver not in UNSOLVED:
            reason = item.reason or found.reason
            detail = item.detail or (found.detail if found.reason else "")
            item = dataclasses.replace(item, solver=found.solver, reason=reason, detail=detail)
        decisions.append(item)
    return dataclasses.replace(plan, decisions=tuple(decisions))


def with_errors(steps: Sequence[Step], errors: Mapping[str, float | None]) -> list[Step]:
    """The steps that quantized a weight with its error, by site."""
    return [
        dataclasses.replace(step, error=errors[step.site])
        if step.site in errors and step.pass_name in ("solve", "quantize_rtn")
        else step
        for step in steps
    ]


def metadata(
    plan: QuantPlan,
    recipe: Recipe,
    errors: Mapping[str, float | None],
    permuted: Mapping[str, str],
) -> dict[str, Any]:
    """The decisions as the model carries them: deterministic, no times, no paths.

    recipe: what was asked. permuted: site → the reader for whose order its rows were permuted.
    """
    sites = {item.site: entry(item, errors.get(item.site)) for item in plan.decisions}
    for name, reader in permuted.items():
        sites[name]["rows_ordered_for"] = reader
    return {
        "schema": SCHEMA,
        "version": __version__,
        "target": plan.target,
        "recipe": recipe.to_json(),
        "sites": sites,
    }
