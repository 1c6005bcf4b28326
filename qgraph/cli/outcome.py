"""What `optimize` prints: what was asked, what came of it, what was written, what to do next."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qgraph._version import __version__
from qgraph.console import megabytes, print_line, print_written
from qgraph.explanation_plan import from_plan
from qgraph.explanation_view import print_hint, print_names, render_kernels, render_reasons
from qgraph.kernel_choice import spell_many
from qgraph.report import REASONS, Step

if TYPE_CHECKING:
    from qgraph.explanation import Explanation
    from qgraph.pipeline import Result
    from qgraph.plan import QuantPlan
    from qgraph.recipe import Override, Recipe


def print_configuration(
    console: Console,
    model: Path,
    output: Path | None,
    recipe: Recipe,
    target: str,
    check: bool,
    given: Sequence[str] = (),
) -> None:
    """Print what decides the result: the usual options, and all that differ from their defaults.

    given: what else was given, in words: a recipe file, calibration data.
    """
    goal = str(output) if output else "a plan (--dry-run)"
    print_line(console, f"qgraph {__version__}: {model} → {goal}", style="bold")
    words = {
        "format": recipe.format,
        "group": {None: "by format", 0: "row"}.get(recipe.group, str(recipe.group)),
        "solver": recipe.solver,
        "embedding": recipe.embedding,
        "accuracy level": recipe.accuracy_level,
        **_unusual(recipe),
        **_budget(recipe),
        "target": target,
        "check": "on" if check else "off",
    }
    print_line(console, "  " + " · ".join(f"{key} {value}" for key, value in words.items()))
    sets = [spell_override(each) for each in recipe.overrides]
    options = [f"{key}={value}" for key, value in recipe.options.items()]
    lists = {"include": recipe.include, "exclude": recipe.exclude, "set": sets, "option": options}
    for key, values in lists.items():
        if values:
            print_line(console, f"  {key} {', '.join(values)}")
    for text in given:
        print_line(console, f"  {text}")


def spell_override(item: Override) -> str:
    """`*.down=int8 gptq activations=int8-row`: the selector and what it gets."""
    rounded = f"activations={item.activations}" if item.activations else None
    return f"{item.selector}={' '.join(filter(None, (item.format, item.solver, rounded)))}"


_TOLD = frozenset(
    "format group solver embedding accuracy_level include exclude overrides options target_bits "
    "max_size max_kl candidates".split()
)
"""Fields of a recipe that have words of their own; the others are told where they are unusual."""


def _unusual(recipe: Recipe) -> dict[str, str]:
    """What differs from the defaults, by its name on the command line."""
    usual = type(recipe)()
    found = {}
    for field in (each.name for each in dataclasses.fields(recipe) if each.name not in _TOLD):
        value = getattr(recipe, field)
        if value != getattr(usual, field):
            words = "for" if field == "purpose" else field.replace("_", " ")
            found[words] = {True: "yes", False: "no"}.get(value, str(value))
    return found


def _budget(recipe: Recipe) -> dict[str, str]:
    """The bounds that were asked for."""
    size = None if recipe.max_size is None else megabytes(recipe.max_size)
    bounds = {"target bits": recipe.target_bits, "max size": size, "max KL": recipe.max_kl}
    found = {
        name: f"{value:g}" if isinstance(value, float | int) else value
        for name, value in bounds.items()
        if value is not None
    }
    return found | ({"candidates": ", ".join(recipe.candidates)} if recipe.budgeted else {})


def print_result(console: Console, result: Result, quiet: bool, source: Path | None = None) -> None:
    """Print coverage, kernels, refusals, files and the next step of a finished run.

    source: the float .onnx that it was made from, whose time may stand beside.
    """
    if quiet:
        print_line(console, result.summary)
        return
    totals = result.report.totals
    _kernels(console, result.plan)
    said = _surprises(console, result.report.steps)
    found = dataclasses.replace(from_plan(result.plan, ""), source="file")
    render_reasons(_without(found, said), console)
    for note in result.report.notes:
        print_line(console, f"note: {note}")
    print_line(console, "")
    print_line(console, result.summary, style="bold")
    print_written(console, result.files)
    cost = _cost(totals)
    if cost:
        print_line(console, f"took {cost}")
    if result.files:
        beside = f" --against {source}" if source is not None else ""
        print_line(console, f"next: qgraph explain {result.files[0]} --profile{beside}")


def print_plan(console: Console, result: Result, report: Path | None, quiet: bool) -> None:
    """Print a dry run's coverage, kernels and prediction, and where the plan was written."""
    if not quiet:
        explanation = from_plan(result.plan, "plan")
        render_kernels(explanation, console)
        render_reasons(explanation, console)
        for note in result.report.notes:
            print_line(console, f"note: {note}")
        if result.prediction is not None:
            print_line(console, f"prediction: {result.prediction.line}")
    print_line(console, result.summary, style="bold")
    if report is not None:
        print_written(console, [report])
        print_line(console, f"next: qgraph explain {report}")


def _kernels(console: Console, plan: QuantPlan) -> None:
    found = Counter((item.format, item.kernel) for item in plan.decisions if item.kernel)
    for (spelled, kernel), count in found.most_common():
        print_line(console, f"{count:>5} × {spelled} → {kernel}")
    many = Counter(
        (item.many.format, spell_many(item.many.from_rows, str(item.many.kernel)))
        for item in plan.decisions
        if item.many is not None
    )
    for (spelled, kernel), count in many.most_common():
        print_line(console, f"{count:>5} × {spelled} → {kernel}")


def _without(explanation: Explanation, said: Collection[tuple[str, str | None]]) -> Explanation:
    """An explanation without the remarks that were printed already: sites and their reasons."""
    rows = [row for found in explanation.remarks.values() for row in found]
    known = {row.name for row in rows if (row.name, row.reason) in said}
    return dataclasses.replace(
        explanation,
        sites=tuple(
            dataclasses.replace(row, reason=None) if row.name in known else row
            for row in explanation.sites
        ),
    )


def _surprises(console: Console, steps: Sequence[Step]) -> set[tuple[str, str | None]]:
    """Print the sites that were done otherwise than planned, by reason; each, and its reason."""
    last = {step.site: step for step in steps if step.outcome in ("changed", "failed")}
    by_reason: dict[str, list[Step]] = {}
    for step in last.values():
        by_reason.setdefault(step.reason or "", []).append(step)
    for code, found in by_reason.items():
        meaning = f"{code}: {REASONS[code].meaning}" if code else "see the report"
        print_line(console, "")
        print_line(console, f"{len(found)} × otherwise than planned, {meaning}", style="yellow")
        if code:
            print_hint(console, code)
        print_names(console, [(step.site, step.detail) for step in found])
    return {(step.site, step.reason) for step in last.values()}


def _cost(totals: Mapping[str, Any]) -> str:
    seconds = totals.get("seconds", {})
    words = [f"{sum(seconds.values()):.1f} s"] if seconds else []
    if totals.get("peak_rss_bytes"):
        words.append(f"{megabytes(totals['peak_rss_bytes'])} of memory at the peak")
    return ", ".join(words)
