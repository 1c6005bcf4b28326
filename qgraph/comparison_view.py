"""A `Comparison` as text: what it cost, then a bar for each site, worst first."""

from __future__ import annotations

import math

from rich.console import Console

from qgraph.comparison import Comparison
from qgraph.console import print_line, print_table
from qgraph.divergence import Divergence

_SHOWN = 20
_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"


def render(comparison: Comparison, console: Console, *, every: bool = False) -> None:
    """Print the whole comparison: of many sites the worst, or with `every` all of them."""
    print_line(console, f"{comparison.reference} ‖ {comparison.candidate}", style="bold")
    print_line(console, _measured_on(comparison))
    print_line(console, "")
    if comparison.divergence is not None:
        _divergence(comparison.divergence, console)
    else:
        _outputs(comparison, console)
    if comparison.sites:
        _sites(comparison, console, every)
    for note in comparison.notes:
        print_line(console, f"note: {note}")


def bar(value: float, largest: float, width: int = _BAR, *, fine: bool = True) -> str:
    """`value` as a bar of `width` cells where `largest` fills all.

    fine: drawn in eighths of a cell, for terminals; else whole cells of "#".
    """
    if math.isnan(value) or largest <= 0:
        return ""
    share = 1.0 if math.isinf(largest) and math.isinf(value) else min(1.0, value / largest)
    if not fine:
        return "#" * round(share * width)
    whole, part = divmod(round(share * width * 8), 8)
    return "█" * whole + _EIGHTHS[part].strip()


def _measured_on(comparison: Comparison) -> str:
    words = [f"{comparison.samples} samples"]
    if comparison.tokens:
        words.append(f"{comparison.tokens:,} tokens")
    if comparison.divergence is not None:
        scored = f"{comparison.divergence.positions:,} positions scored"
        half = " (the second half of each block)" if comparison.second_half else ""
        words.append(scored + half)
    return " · ".join([*words, f"target {comparison.target}"])


def _divergence(found: Divergence, console: Console) -> None:
    rows = [
        ["KL divergence, mean", _nats(found.mean), "nats a token"],
        ["  median", _nats(found.median), ""],
        ["  99th percentile", _nats(found.p99), ""],
        ["  maximum", _nats(found.maximum), ""],
        ["top-1 agreement", f"{100 * found.top1:.2f} %", ""],
    ]
    if found.predictions:
        change = found.candidate_perplexity / found.reference_perplexity - 1
        perplexity = f"{found.reference_perplexity:.4f} → {found.candidate_perplexity:.4f}"
        more = f"{100 * change:+.2f} %, {found.predictions:,} predictions"
        rows.append(["perplexity", perplexity, more])
    print_table(console, ["", "value", ""], rows, "lrl")


def _nats(value: float) -> str:
    """Six decimals; rounding may leave a divergence of zero a little below it."""
    return f"{round(value, 6) + 0.0:.6f}"


def _error(value: float) -> str:
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _optional(value: float | None) -> str:
    return "" if value is None else _error(value)


def _outputs(comparison: Comparison, console: Console) -> None:
    rows = [
        [row.name, f"{row.error:.6f}", f"{row.cosine:.6f}", f"{row.worst_cosine:.6f}"]
        for row in comparison.outputs
    ]
    header = ["output", "‖y_c − y_r‖/‖y_r‖", "cosine, mean", "lowest"]
    print_table(console, header, rows, "lrrr")


def _sites(comparison: Comparison, console: Console, every: bool) -> None:
    drawn = console.is_terminal
    shown = comparison.sites if every else comparison.sites[:_SHOWN]
    largest = max((r.error for r in comparison.sites if not math.isnan(r.error)), default=0.0)
    tokens = f", {comparison.site_tokens:,} tokens" if comparison.site_tokens else ""
    print_line(console, "")
    print_line(
        console,
        f"error of each site's output, ‖y_c − y_r‖/‖y_r‖, worst first "
        f"({comparison.site_samples} samples{tokens})",
        style="bold",
    )
    bounded = any(row.own_error is not None for row in comparison.sites)
    # Three columns beside the bar, or five, numbers 6 wide, and what the table puts between them.
    names, formats = (row.name for row in shown), (row.format or "float" for row in shown)
    taken = (
        max(map(len, ("site", *names)))
        + max(map(len, ("format", *formats)))
        + (33 if bounded else 17)
    )
    width = min(_BAR, max(8, console.width - taken)) if drawn else _BAR
    rows = [
        [
            row.name,
            row.format or "float",
            _error(row.error),
            *([_optional(row.own_error), _optional(row.bound)] if bounded else []),
            bar(row.error, largest, width, fine=drawn),
        ]
        for row in shown
    ]
    own = ["own", "bound"] if bounded else []
    print_table(console, ["site", "format", "error", *own, ""], rows, f"llr{'r' * len(own)}l")
    if len(shown) < len(comparison.sites):
        more = len(comparison.sites) - len(shown)
        print_line(console, f"… and {more} more (--all shows them, as does --format json)")
