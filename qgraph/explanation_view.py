"""An `Explanation` as tables: summary first, then every site, then what is not fused and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console

from qgraph.console import escape, megabytes, print_line, print_table
from qgraph.explanation import Explanation, SiteRow
from qgraph.report import REASONS, Step

_SOURCES = {
    "plan": "planned; nothing was written",
    "file": "as the file is; --profile runs it and measures",
    "run": "measured in a run",
}
# Sites of one reason and detail that are named; the table of sites, and JSON, have them all.
_NAMES_SHOWN = 6


class _Column(NamedTuple):
    """A column of the table of sites; `width`: the narrowest terminal that shows it."""

    title: str
    side: str
    width: int
    cell: Callable[[Explanation, SiteRow], str]


def _time(explanation: Explanation, row: SiteRow) -> str:
    time = explanation.times.get(row.name)
    return "" if time is None else f"{time:.1f}"


def _share(explanation: Explanation, row: SiteRow) -> str:
    time = explanation.times.get(row.name)
    if time is None or not explanation.total_time:
        return ""
    return f"{100 * time / explanation.total_time:.1f} %"


def _provider(explanation: Explanation, row: SiteRow) -> str:
    ran = [r.provider for r in explanation.profile if r.node == row.name]
    known = _known(row.provider, row.origin) if row.kernel else ""
    return f"{ran[0]} (ran)" if ran else known


def _known(provider: str | None, origin: str) -> str:
    return f"{provider} ({origin})" if provider else origin


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


_COLUMNS = (
    _Column("site", "l", 0, lambda _, row: row.name),
    _Column("module", "l", 60, lambda _, row: row.module),
    _Column("weight", "l", 200, lambda _, row: row.weight),
    _Column("role", "l", 120, lambda _, row: row.role),
    _Column("N×K", "r", 100, lambda _, row: f"{row.n}×{row.k}"),
    _Column("was", "l", 140, lambda _, row: row.op),
    _Column("now", "l", 100, lambda _, row: short(row.op_now or row.op)),
    _Column("state", "l", 60, lambda _, row: row.state),
    _Column("format", "l", 60, lambda _, row: row.format or "float"),
    _Column("block", "r", 140, lambda _, row: _number(row.block)),
    _Column("level", "r", 120, lambda _, row: _number(row.level)),
    _Column("provider", "l", 160, _provider),
    _Column("µs", "r", 60, _time),
    _Column("share", "r", 100, _share),
    _Column("error", "r", 140, lambda _, row: "" if row.error is None else f"{row.error:.4f}"),
    _Column("reason", "l", 0, lambda _, row: row.reason or ""),
)


def short(op: str) -> str:
    """`com.microsoft::MatMulNBits` as `MatMulNBits`."""
    return op.rpartition("::")[2]


def render(explanation: Explanation, console: Console, *, sites: bool = True) -> None:
    """Print the whole explanation, or without its tables of sites and other operators."""
    print_line(
        console,
        f"{explanation.model} · target {explanation.target} ({explanation.runtime}) · "
        f"{_SOURCES[explanation.source]}",
        style="bold",
    )
    print_line(console, explanation.summary)
    render_kernels(explanation, console)
    if sites:
        _heading(console, f"sites ({len(explanation.sites)})")
        _sites_table(explanation, explanation.sites, console)
        _others(explanation, console)
    _proofs(explanation, console)
    render_reasons(explanation, console)
    for note in explanation.notes:
        print_line(console, f"note: {note}")


def render_kernels(explanation: Explanation, console: Console) -> None:
    """Print which kernels take how many sites, and with a profile all operators' time."""
    timed = bool(explanation.profile)
    header = ["sites", "kernel", "provider", *(["ms", "share"] if timed else [])]
    rows = []
    for row in explanation.kernels:
        cells = [str(row.sites), row.kernel, _known(row.provider, row.origin)]
        if timed:
            cells += _milliseconds(row.microseconds or 0.0, explanation.total_time)
        rows.append(cells)
    if timed and rows and explanation.other_ops:
        others = sum(row.microseconds or 0.0 for row in explanation.other_ops)
        cells = _milliseconds(others, explanation.total_time)
        rows.append(["", "other operators", "", *cells])
    if rows:
        _heading(console, "kernels")
        print_table(console, header, rows, "rllrr")
    for row in explanation.kernels:
        if row.by_rows:
            print_line(console, f"{row.kernel}, by rows of the activation: {row.by_rows}")


def _milliseconds(microseconds: float, total: float) -> list[str]:
    return [f"{microseconds / 1000:.2f}", f"{100 * microseconds / total:.1f} %" if total else ""]


def _sites_table(explanation: Explanation, sites: Sequence[SiteRow], console: Console) -> None:
    fits = [c for c in _COLUMNS if not console.is_terminal or console.width >= c.width]
    cells = {c: [c.cell(explanation, row) for row in sites] for c in fits}
    columns = [c for c in fits if any(cells[c])]
    rows = zip(*(cells[c] for c in columns), strict=True)
    print_table(console, [c.title for c in columns], rows, "".join(c.side for c in columns))
    _left_out([c for c in _COLUMNS if c not in fits], explanation, sites, console)


def _left_out(
    columns: Sequence[_Column],
    explanation: Explanation,
    sites: Sequence[SiteRow],
    console: Console,
) -> None:
    """Name the columns that have something to say and no room."""
    columns = [c for c in columns if any(c.cell(explanation, row) for row in sites)]
    if columns:
        names = ", ".join(c.title for c in columns)
        width = max(c.width for c in columns)
        print_line(
            console,
            f"no room for {names}: --format json has them, as has a terminal of {width} columns",
            style="dim",
        )


def _others(explanation: Explanation, console: Console) -> None:
    rows = explanation.other_ops
    if not rows:
        return
    _heading(console, "other operators")
    if explanation.profile:
        cells = [
            [
                str(r.count),
                short(r.op),
                r.provider,
                *_milliseconds(r.microseconds or 0.0, explanation.total_time),
            ]
            for r in rows
        ]
        print_table(console, ["count", "op", "provider", "ms", "share"], cells, "rllrr")
    else:
        print_line(console, ", ".join(f"{row.count} {short(row.op)}" for row in rows))


def _proofs(explanation: Explanation, console: Console) -> None:
    if not explanation.proofs:
        return
    _heading(console, "int8 compute (accuracy level 4), by the difference to level 0")
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
        _heading(console, "not fused, and why")
        for code, rows in explanation.unfused.items():
            _reason(console, code, rows)
    elif explanation.sites:
        verb = "would be" if explanation.source == "plan" else "is"
        print_line(console, f"every site {verb} quantized", style="green")
    if explanation.remarks:
        _heading(console, "worth knowing")
        for code, rows in explanation.remarks.items():
            _reason(console, code, rows)


def _reason(console: Console, code: str, rows: Sequence[SiteRow]) -> None:
    reason = REASONS.get(code)
    if reason is None:
        print_line(console, f"{len(rows)} × not quantized; `qgraph optimize` quantizes a model")
    else:
        print_line(console, f"{len(rows)} × {code}: {reason.meaning}", style="bold")
        if reason.hint != "nothing to do":
            print_line(console, f"    way out: {reason.hint}")
    print_names(console, [(row.name, row.detail if reason else "") for row in rows])


def print_names(console: Console, sites: Iterable[tuple[str, str]]) -> None:
    """Print (site, detail) pairs: one line for each detail, whatever the number of its sites."""
    by_detail: dict[str, list[str]] = {}
    for name, detail in sites:
        by_detail.setdefault(detail, []).append(name)
    for detail, names in by_detail.items():
        more = len(names) - _NAMES_SHOWN
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        print_line(console, f"    {shown}{f': {detail}' if detail else ''}")


def render_sites(explanation: Explanation, sites: Iterable[SiteRow], console: Console) -> None:
    """Print all that is known of each of `sites`."""
    for row in sites:
        print_line(console, row.name, style="bold")
        for label, text in _details(explanation, row):
            if text:
                print_line(console, f"  {label:<10}{text}")
        for step in row.steps:
            print_line(console, f"  step      {spell_step(step)}")


def _details(explanation: Explanation, row: SiteRow) -> Iterable[tuple[str, str]]:
    reason = REASONS.get(row.reason or "")
    yield "module", row.module
    yield "weight", f"{row.weight} [{row.n}, {row.k}] ({row.role})"
    yield "was", row.op
    yield "now", f"{row.op_now} ({row.state})" if row.op_now else row.state
    yield "format", _format(row)
    yield "kernel", row.kernel or ""
    yield "provider", _provider(explanation, row)
    yield "size", f"{megabytes(row.float_bytes)} → {megabytes(row.packed_bytes)}"
    yield "time", " µs, ".join(filter(None, (_time(explanation, row), _share(explanation, row))))
    yield "error", "" if row.error is None else f"{row.error:.5f} (‖W − Ŵ‖/‖W‖)"
    yield "shared", row.shared_with or ""
    if reason:
        yield "reason", f"{reason.code}: {reason.meaning}"
        yield "way out", reason.hint
    yield "detail", row.detail


def _format(row: SiteRow) -> str:
    if row.format is None:
        return "float"
    parts = [row.format, f"{row.bits} bits" if row.bits else ""]
    parts += [f"block {row.block}" if row.block else "", f"solver {row.solver}" * bool(row.solver)]
    parts += [f"accuracy level {row.level}" if row.level is not None else ""]
    return ", ".join(filter(None, parts))


def spell_step(step: Step) -> str:
    """One step on one line."""
    why = f" {step.reason}" if step.reason else ""
    detail = f": {step.detail}" if step.detail else ""
    return f"{step.pass_name}/{step.rule} {step.outcome}{why}{detail}"


def _heading(console: Console, text: str) -> None:
    print_line(console, "")
    print_line(console, escape(text), style="bold")
