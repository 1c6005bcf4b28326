"""A `Bench` as text: for each number of rows every side, its time, its ratio and a bar."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from qgraph.bench_result import Bench, Row
from qgraph.comparison_view import bar
from qgraph.console import print_line, print_table
from qgraph.decode_result import DecodeBench
from qgraph.timing import Ratio
from qgraph.wording import counted

_BAR = 24


def render(bench: Bench, console: Console) -> None:
    """Print the models as a whole, then each kind of linear."""
    print_sides(console, (bench.model, *bench.against), bench)
    _heading(console, f"whole model, rows = {_AXES[bench.axis]}")
    _table(console, bench.whole, kernels=False)
    for site in bench.sites:
        _heading(console, f"{site.n}×{site.k}, {counted(site.count, 'linear')} as {site.name}")
        _table(console, site.rows, kernels=True)
    for note in bench.notes:
        print_line(console, f"note: {note}")


def print_sides(console: Console, names: Sequence[str], bench: Bench | DecodeBench) -> None:
    """Print what was measured beside what, on what, and how; the model itself comes first."""
    first, *others = names
    against = f" against {' · '.join(others)}" if others else ""
    print_line(console, f"{first}{against}", style="bold")
    threads = counted(bench.threads, "thread") if bench.threads else "threads by default"
    print_line(
        console,
        f"{bench.cpu} · {bench.runtime} · {threads} · {counted(bench.rounds, 'round')}, sides turn "
        "by turn · × is the side's time over the model's, with the range over the rounds",
    )


_AXES = {
    "tokens": "tokens of one prompt, no cache",
    "samples": "samples of a batch",
    "fixed": "as its inputs say",
}


def _heading(console: Console, text: str) -> None:
    print_line(console, "")
    print_line(console, text, style="bold")


def _table(console: Console, rows: Sequence[Row], *, kernels: bool) -> None:
    cells = []
    for row in rows:
        slowest = max(side.timing.median for side in row.sides)
        for at, side in enumerate(row.sides):
            spread = spell_ratio(row.ratio(side)) if at else ""
            drawn = bar(side.timing.median, slowest, _BAR, fine=console.is_terminal)
            cells.append(
                [
                    "" if at or row.rows is None else str(row.rows),
                    side.name,
                    *([side.kernel] if kernels else []),
                    milliseconds(side.timing.median),
                    spread,
                    drawn,
                ]
            )
    header = ["rows", "side", *(["kernel"] if kernels else []), "ms", "×", ""]
    print_table(console, header, cells, f"rl{'l' * kernels}rll")


def milliseconds(seconds: float) -> str:
    """Three digits that matter: `0.0124`, `9.81`, `483`."""
    value = 1e3 * seconds
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def spell_ratio(ratio: Ratio) -> str:
    """`1.25 (1.20…1.31)`: of the medians, and its range over the rounds."""
    return f"{ratio.value:.2f} ({ratio.low:.2f}…{ratio.high:.2f})"
