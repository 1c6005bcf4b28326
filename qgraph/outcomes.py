"""What a run leaves behind: the plan as it was solved, the steps' errors, the model's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qgraph._version import __version__
from qgraph.adopted import ADOPTED
from qgraph.graph import Graph
from qgraph.model_metadata import SECOND
from qgraph.plan import KEPT, UNSOLVED, Decision, Many, QuantPlan
from qgraph.prediction import Prediction
from qgraph.recipe import Recipe
from qgraph.report import SCHEMA, Report, Step
from qgraph.row_branches import MANY
from qgraph.sites import Site
from qgraph.size_times import SizeTimes

ROWS_ORDERED = "rows_ordered_for"
"""What the metadata of a site names where its rows lie in the order of that other site."""
ROWS_SCALED = "rows_scaled_for"
"""What it names where its rows are divided by the factors of that other site's inputs."""
INPUTS_SCALED = "inputs_scaled"
"""Where its inputs are divided by such factors: by a `norm`, a `linear` or a `mul`."""
_NAMED = ("weight", ROWS_ORDERED, ROWS_SCALED, INPUTS_SCALED)
"""What a run that leaves a site as it is cannot say of it anew."""


@dataclasses.dataclass
class Result:
    """What `optimize` made.

    graph: the rewritten graph; its packed weights are computed when they are read.
    summary: the coverage line. files: what was written, the .onnx first.
    prediction: of time and memory; None where no solver is calibrated.
    lacks: why a plan cannot be carried out with what was given; the run itself would refuse.
    times: that decided formats, by size of linear; the report holds them all, its notes the best.
    """

    graph: Graph
    plan: QuantPlan
    report: Report
    files: list[Path]
    summary: str
    prediction: Prediction | None = None
    lacks: str = ""
    times: tuple[SizeTimes, ...] = ()


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
            remark = found.detail if found.reason and not item.detail else item.remark
            item = dataclasses.replace(item, solver=found.solver, reason=reason, remark=remark)
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
    marks: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The decisions as the model carries them: deterministic, no times, no paths.

    recipe: what was asked. marks: what else is said of some sites: key → site → text, such as
    ROWS_ORDERED → site → the reader for whose order its rows were permuted.
    """
    sites = {item.site: _entry(item, errors.get(item.site)) for item in plan.decisions}
    for key, found in marks.items():
        for name, text in found.items():
            sites[name][key] = text
    return {
        "schema": SCHEMA,
        "version": __version__,
        "target": plan.target,
        "recipe": recipe.to_json(),
        "sites": sites,
    }


def _entry(item: Decision, error: float | None) -> dict[str, Any]:
    """What the model's metadata says of one site."""
    found: dict[str, Any] = {
        "weight": item.weight,
        "role": item.role,
        "op": item.op,
        "module": item.module,
        "n": item.n,
        "k": item.k,
        "format": item.format,
        "solver": item.solver,
        "kernel": item.kernel,
        "activations": item.activations,
        "outliers": item.outliers or None,
        "many": _second(item),
        "reason": item.reason,
        "detail": item.detail,
        "shared_with": item.shared_with,
        "error": None if error is None else float(f"{error:.4g}"),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


def _second(item: Decision) -> dict[str, Any] | None:
    """What it says of the weight for many rows, under the keys of the first one's."""
    if item.many is None:
        return None
    found = {name: getattr(item.many, name) for name in SECOND}
    return {key: value for key, value in found.items() if value not in (None, 0)}


def carry(sites: dict[str, dict[str, Any]], before: Mapping[str, dict[str, Any]]) -> None:
    """Let sites be told as they were: their modules; of those that came packed what they hold.

    sites: what is to be said of them. before: what the metadata that the model came with says;
        files do not hold modules, and names of packed constants are made up: nothing else tells.
    """
    for name, item in list(sites.items()):
        old = before.get(name, {})
        if "module" in old:
            item.setdefault("module", old["module"])
        if item.get("solver") not in (KEPT, ADOPTED):
            continue
        item.update((key, old[key]) for key in _NAMED if key in old)
        if "error" in old:
            item.setdefault("error", old["error"])
        held = old.get("holds")
        if isinstance(held, list) and all(isinstance(e, str) and e in before for e in held):
            item["holds"] = held
            sites.update((each, before[each]) for each in held if each not in sites)


def merged_sites(
    plan: QuantPlan, errors: Mapping[str, float | None], merged: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """What the metadata says of sites that hold the rows of others, one behind the other.

    merged: such a site → those, in place of which it stands; a copy for many rows is told with it.
    """
    found = {}
    for name, held in merged.items():
        if name.endswith(MANY) and name.removesuffix(MANY) in merged:
            continue
        items = [item for site in held if (item := plan.of(site)) is not None]
        one = dataclasses.replace(
            items[0],
            n=sum(item.n for item in items),
            many=_every(items),
            weight=" + ".join(item.weight for item in items),
            module=" + ".join(item.module for item in items if item.module),
        )
        found[name] = {**_entry(one, errors.get(name)), "holds": list(held)}
    return found


def _every(items: Sequence[Decision]) -> Many | None:
    """The first one's second weight, with what all of their second weights add."""
    first = items[0].many
    if first is None:
        return None
    total = sum(item.many.packed_bytes for item in items if item.many is not None)
    return dataclasses.replace(first, packed_bytes=total)


def told_apart(sites: Sequence[Site], merged: Mapping[str, Sequence[str]]) -> list[Site]:
    """`sites`, and each that holds others' rows once for each of those, under its name."""
    held = [
        dataclasses.replace(site, name=name) for site in sites for name in merged.get(site.name, ())
    ]
    return [*sites, *held]
