"""An `Explanation` as tables: summary first, then every site, then what is not fused and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from qgraph.console import print_line, print_table
from qgraph.explanation import Explanation, SiteRow
from qgraph.explanation_sites import heading, known, render_table
from qgraph.op_inputs import bare_name
from qgraph.report import REASONS

_SOURCES = {
    "plan": "planned; nothing was written",
    "file": "as the file is; --profile runs it and measures",
    "run": "measured",
}
# Sites of one reason and detail that are named; the table of sites, and JSON, have them all.
_NAMES_SHOWN = 6
_OTHERS_SHOWN = 10


def render(
    explanation: Explanation, console: Console, *, sites: bool = True, every: bool = False
) -> None:
    """Print the whole explanation, or without its tables of sites and other operators.

    every: all sites in the graph's order, however many; else the worst of them.
    """
    print_line(
        console,
        f"{explanation.model} · target {explanation.target} ({explanation.runtime}) · "
        f"{_SOURCES[explanation.source]}{_ran_on(explanation)}",
        style="bold",
    )
    print_line(console, explanation.summary)
    render_kernels(explanation, console)
    if sites:
        render_table(explanation, console, every)
        _others(explanation, console, every)
    _fusions(explanation, console)
    _proofs(explanation, console)
    render_reasons(explanation, console)
    if explanation.needs is not None:
        print_line(console, explanation.needs.line)
    for note in explanation.notes:
        print_line(console, f"note: {note}")


def _ran_on(explanation: Explanation) -> str:
    """What a run was of, and its whole time, beside that of another model."""
    run, total = explanation.profile.run, explanation.profile.total / 1000
    if run is None:
        return ""
    words = f" on {run.line}: {total:.2f} ms"
    if run.against_us is not None:
        words += f", {run.against} beside {run.against_us / 1000:.2f} ms"
    return words


def render_kernels(explanation: Explanation, console: Console) -> None:
    """Print which kernels take how many sites, and with a profile all operators' time."""
    profile = explanation.profile
    timed, beside = bool(profile), bool(profile.against_times)
    header = ["sites", "kernel", "provider", *(["ms", "share"] if timed else [])]
    header += ["beside ms"] if beside else []
    rows = []
    for row in explanation.kernels:
        cells = [str(row.sites), row.kernel, known(row.provider, row.origin)]
        if timed:
            cells += _milliseconds(row.microseconds or 0.0, profile.total)
        if beside:
            cells.append("" if row.against_us is None else f"{row.against_us / 1000:.2f}")
        rows.append(cells)
    if timed and rows and explanation.other_ops:
        others = sum(row.microseconds or 0.0 for row in explanation.other_ops)
        cells = _milliseconds(others, profile.total)
        rows.append(["", "other operators", "", *cells, *([""] if beside else [])])
    if rows:
        heading(console, "kernels")
        print_table(console, header, rows, "rll" + "r" * (len(header) - 3))
    for row in explanation.kernels:
        if row.by_rows:
            print_line(console, f"{row.kernel}, by rows of the activation: {row.by_rows}")


def _milliseconds(microseconds: float, total: float) -> list[str]:
    return [f"{microseconds / 1000:.2f}", f"{100 * microseconds / total:.1f} %" if total else ""]


def _fusions(explanation: Explanation, console: Console) -> None:
    if explanation.fusions:
        heading(console, "fused ops around the linears, and what stayed as it was")
        for row in explanation.fusions:
            print_line(console, row.line)


def _others(explanation: Explanation, console: Console, every: bool) -> None:
    rows = explanation.other_ops
    if not rows:
        return
    heading(console, "other operators")
    if explanation.profile:
        rest = () if every else rows[_OTHERS_SHOWN:]
        rows = rows[: len(rows) - len(rest)]
        cells = [
            [
                str(r.count),
                bare_name(r.op),
                r.provider,
                *_milliseconds(r.microseconds or 0.0, explanation.profile.total),
            ]
            for r in rows
        ]
        if rest:
            time = sum(row.microseconds or 0.0 for row in rest)
            spent = _milliseconds(time, explanation.profile.total)
            cells.append([str(sum(row.count for row in rest)), "of other kinds", "", *spent])
        print_table(console, ["count", "op", "provider", "ms", "share"], cells, "rllrr")
    else:
        print_line(console, ", ".join(f"{row.count} {bare_name(row.op)}" for row in rows))


def _proofs(explanation: Explanation, console: Console) -> None:
    if not explanation.proofs:
        return
    heading(console, "int8 compute (accuracy level 4), by the difference to level 0")
    rows = [
        [
            str(proof.sites),
            str(proof.bits),
            str(proof.block),
            f"{proof.difference:.2e}",
            "yes" if proof.int8_compute else "no: level 4 changes nothing",
        ]
        for proof in explanation.proofs
    ]
    header = ["sites", "bits", "block", "‖y₄ − y₀‖/‖y₀‖", "int8 compute"]
    print_table(console, header, rows, "rrrrl")


def render_reasons(explanation: Explanation, console: Console) -> None:
    """Print what is not fused and why, then what is worth knowing of the others."""
    if explanation.unfused:
        heading(console, "not fused, and why")
        for code, rows in explanation.unfused.items():
            _reason(console, code, rows)
    elif explanation.sites:
        verb = "would be" if explanation.source == "plan" else "is"
        print_line(console, f"every site {verb} quantized", style="green")
    if explanation.remarks:
        heading(console, "worth knowing")
        for code, rows in explanation.remarks.items():
            _reason(console, code, rows)


def _reason(console: Console, code: str, rows: Sequence[SiteRow]) -> None:
    reason = REASONS.get(code)
    if reason is None:
        print_line(console, f"{len(rows)} × not quantized; `qgraph optimize` quantizes a model")
    else:
        print_line(console, f"{len(rows)} × {code}: {reason.meaning}", style="bold")
        print_hint(console, code)
    print_names(console, [(row.name, row.detail if reason else "") for row in rows])


def print_hint(console: Console, code: str) -> None:
    """Print the way out of a reason, where there is anything to do."""
    hint = REASONS[code].hint
    if hint != "nothing to do":
        print_line(console, f"    way out: {hint}")


def print_names(console: Console, sites: Iterable[tuple[str, str]]) -> None:
    """Print (site, detail) pairs: one line for each detail, whatever the number of its sites."""
    by_detail: dict[str, list[str]] = {}
    for name, detail in sites:
        by_detail.setdefault(detail, []).append(name)
    for detail, names in by_detail.items():
        more = len(names) - _NAMES_SHOWN
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        print_line(console, f"    {shown}{f': {detail}' if detail else ''}")
