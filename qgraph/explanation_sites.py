"""The sites of an `Explanation`: as a table, and one by one with all that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console

from qgraph.console import escape, megabytes, print_line, print_table
from qgraph.explanation import Explanation, SiteRow
from qgraph.kernel_choice import read_kernel
from qgraph.op_inputs import bare_name
from qgraph.report import REASONS, Step

SITES_SHOWN = 20
"""Rows of the table, where not all are asked for."""


class _Column(NamedTuple):
    """A column of the table of sites; `width`: the narrowest terminal that shows it."""

    title: str
    side: str
    width: int
    cell: Callable[[Explanation, SiteRow], str]


def _time(explanation: Explanation, row: SiteRow) -> str:
    time = explanation.profile.times.get(row.name)
    return "" if time is None else f"{time:.1f}"


def _against(explanation: Explanation, row: SiteRow) -> str:
    time = explanation.profile.against_times.get(row.name)
    return "" if time is None else f"{time:.1f}"


def _share(explanation: Explanation, row: SiteRow) -> str:
    share = explanation.profile.share(row.name)
    return "" if share is None else f"{100 * share:.1f} %"


def _provider(explanation: Explanation, row: SiteRow) -> str:
    ran = explanation.profile.providers.get(row.name)
    if ran:
        return f"{ran} (ran)"
    return known(row.provider, row.origin) if row.kernel else ""


def known(provider: str | None, origin: str) -> str:
    """The provider of a kernel, and whether it ran, is installed or predicted."""
    return f"{provider} ({origin})" if provider else origin


def _ran_many(explanation: Explanation, row: SiteRow) -> bool:
    return bool(row.many_kernel) and row.name in explanation.profile.ran_many


def _first(cell: Callable[[SiteRow], str]) -> Callable[[Explanation, SiteRow], str]:
    """A cell that speaks of a site's first weight: empty where the other one ran."""
    return lambda explanation, row: "" if _ran_many(explanation, row) else cell(row)


def _of_format(explanation: Explanation, row: SiteRow) -> str:
    if _ran_many(explanation, row):
        return row.many_format or ""
    return row.format or "float"


def _now(explanation: Explanation, row: SiteRow) -> str:
    """The op that the site has; of two that it has, the one that ran."""
    if row.many_kernel and _ran_many(explanation, row):
        return f"{read_kernel(row.many_kernel).op} (from {row.from_rows} rows)"
    return bare_name(row.op_now or row.op)


def _block(row: SiteRow) -> str:
    """The kernel's block; of a row's one scale, which each block repeats."""
    return f"row, in {row.block}" if row.group == 0 and row.block else _number(row.block)


def _error(row: SiteRow) -> str:
    return "" if row.error is None else f"{row.error:.4f}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


_COLUMNS = (
    _Column("site", "l", 0, lambda _, row: row.name),
    _Column("module", "l", 60, lambda _, row: row.module),
    _Column("weight", "l", 200, lambda _, row: row.weight),
    _Column("role", "l", 120, lambda _, row: row.role),
    _Column("N×K", "r", 100, lambda _, row: f"{row.n}×{row.k}"),
    _Column("was", "l", 140, lambda _, row: row.op),
    _Column("now", "l", 100, lambda explanation, row: _now(explanation, row)),
    _Column("state", "l", 60, lambda _, row: row.state),
    _Column("format", "l", 60, _of_format),
    _Column("block", "r", 140, _first(_block)),
    _Column("level", "r", 120, _first(lambda row: _number(row.level))),
    _Column("provider", "l", 160, _provider),
    _Column("µs", "r", 60, _time),
    _Column("share", "r", 100, _share),
    _Column("beside", "r", 100, _against),
    _Column("error", "r", 140, _first(_error)),
    _Column("reason", "l", 0, lambda _, row: row.reason or ""),
)


def render_table(explanation: Explanation, console: Console, every: bool) -> None:
    """The table of sites; of many the slowest, or those with a reason and then the largest."""
    count = len(explanation.sites)
    if every or count <= SITES_SHOWN:
        heading(console, f"sites ({count})")
        _sites_table(explanation, explanation.sites, console)
        return
    times = explanation.profile.times

    def rank(row: SiteRow) -> tuple[float, bool, int]:
        return -times.get(row.name, 0.0), row.reason is None, -row.float_bytes

    order = "the slowest" if times else "those with a reason, then the largest"
    heading(console, f"sites ({SITES_SHOWN} of {count}: {order}; --all shows every one)")
    _sites_table(explanation, sorted(explanation.sites, key=rank)[:SITES_SHOWN], console)


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
    yield "holds", ", ".join(row.holds)
    yield "module", row.module
    yield "weight", f"{row.weight} [{row.n}, {row.k}] ({row.role})"
    yield "was", row.op
    yield "now", f"{row.op_now} ({row.state})" if row.op_now else row.state
    yield "format", _format(row)
    yield "kernel", row.kernel or ""
    both = ""
    if row.many_kernel:
        second = f"{row.many_format}: " if row.many_format else ""
        yield f"from {row.from_rows} rows", f"{second}{row.many_kernel}"
        both = " with both weights"
    yield "provider", _provider(explanation, row)
    yield "size", f"{megabytes(row.float_bytes)} → {megabytes(row.packed_bytes)}{both}"
    yield "time", _spent(explanation, row)
    yield "error", "" if row.error is None else f"{row.error:.5f} (‖W − Ŵ‖/‖W‖)"
    yield "shared", row.shared_with or ""
    if reason:
        yield "reason", f"{reason.code}: {reason.meaning}"
        yield "way out", reason.hint
    yield "detail", row.detail


def _spent(explanation: Explanation, row: SiteRow) -> str:
    """`12.3 µs, 4.5 %: 1 Scan 9.0 µs, …; 8.1 µs in FLOAT.onnx`; of shared nodes its share."""
    profile = explanation.profile
    if row.name not in profile.times:
        return ""
    found = profile.parts(row.name)
    parts = [f"{p.count} {bare_name(p.op)} {p.microseconds:.1f} µs" for p in found]
    words = f"{_time(explanation, row)} µs, {_share(explanation, row)}: {', '.join(parts)}"
    if profile.run is not None and row.name in profile.against_times:
        words += f"; {_against(explanation, row)} µs in {profile.run.against}"
    return words


def _format(row: SiteRow) -> str:
    if row.format is None:
        return "float"
    parts = [row.format, f"{row.bits} bits" if row.bits else ""]
    parts += [f"block {_block(row)}" if row.block else ""]
    parts += [f"solver {row.solver}" if row.solver else ""]
    parts += [f"accuracy level {row.level}" if row.level is not None else ""]
    return ", ".join(filter(None, parts))


def spell_step(step: Step) -> str:
    """One step on one line."""
    why = f" {step.reason}" if step.reason else ""
    detail = f": {step.detail}" if step.detail else ""
    return f"{step.pass_name}/{step.rule} {step.outcome}{why}{detail}"


def heading(console: Console, text: str) -> None:
    """Print a heading, after an empty line."""
    print_line(console, "")
    print_line(console, escape(text), style="bold")
