"""Linears that would become one, and differ in kernels alone, get one that all of them pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from qgraph.capabilities import Query
from qgraph.passes.base import Findings
from qgraph.passes.packed_linear import Linear
from qgraph.plan import QuantPlan
from qgraph.report import Step


def note_differing(linears: Sequence[Linear], findings: Findings) -> None:
    """Keep in mind linears of one activation whose kernels differ by what a check found."""
    names = tuple(each.name for each in linears)
    failed = any(name in findings.banned_at for name in names)
    if failed and len({each.kind for each in linears}) > 1 and _are_alike(linears):
        findings.differing.setdefault(names, True)


def _are_alike(linears: Sequence[Linear]) -> bool:
    """Whether they are of one op, of as many bits, and read one activation."""
    found = {
        (each.product.op_type, each.activation, each.product.attributes.get_int("bits", 0))
        for each in linears
    }
    return len(found) == 1


def waiting(findings: Findings) -> bool:
    """Whether there are some that do not agree yet: the graph will be lowered again."""
    return any(findings.differing.values())


def agree(findings: Findings, plan: QuantPlan) -> bool:
    """Ban for each what one of them failed, where few rows change; whether to lower again.

    That is where one changes, or where a cache waits to be measured (see `waiting`).
    What follows a kernel that failed rounds activations in smaller blocks, or not at all: who
    passed the first passes that too. At prompts it takes longer, and that costs more than one
    product gains over three where most rows would change for a few.
    """
    found = [names for names, waits in findings.differing.items() if waits]
    again = bool(found and plan.recipe.kv_cache)
    for names in found:
        findings.differing[names] = False
        if any(plan.of(name) is None for name in names):
            continue
        wanted = _together(names, findings, plan)
        changed = [name for name in names if findings.banned_at.get(name) != wanted[name]]
        rows = sum(plan[name].n for name in changed), sum(plan[name].n for name in names)
        if len({plan[name].format for name in names}) == 1 and 2 * rows[0] <= rows[1]:
            _follow(changed, names, wanted, findings)
            again = True
    return again


def _together(
    names: Sequence[str], findings: Findings, plan: QuantPlan
) -> dict[str, frozenset[Query]]:
    """By linear, the kernels that one of them failed."""
    failed = {query for name in names for query in findings.banned_at.get(name, ())}
    return {
        name: frozenset(dataclasses.replace(query, n=plan[name].n) for query in failed)
        for name in names
    }


def _follow(
    changed: Sequence[str],
    names: Sequence[str],
    wanted: Mapping[str, frozenset[Query]],
    findings: Findings,
) -> None:
    first = next((name for name in names if name not in changed), names[0])
    for name in changed:
        findings.banned_at[name] = wanted[name]
        detail = (
            f"{first} fails the check of int8 activations on calibration data; with the kernel "
            "that it gets this becomes one linear with it"
        )
        findings.level_steps.append(
            Step("solve", "one kernel", name, "changed", "LEVEL_FAILED_CHECK", detail)
        )
