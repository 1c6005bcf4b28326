"""A `DecodeBench` as text: for each side its speeds, its ratios and its memory."""

from __future__ import annotations

from rich.console import Console

from qgraph.bench_view import milliseconds, print_sides, spell_ratio
from qgraph.console import print_line, print_table
from qgraph.decode_result import DecodeBench, DecodeSide
from qgraph.wording import counted


def render(bench: DecodeBench, console: Console) -> None:
    """Print a table of all sides."""
    print_sides(console, [side.name for side in bench.sides], bench)
    print_line(
        console,
        f"a prompt of {counted(bench.prompt_tokens, 'token')}, then "
        f"{counted(bench.new_tokens, 'token')} one by one",
    )
    print_line(console, "")
    header = ("side", "prompt t/s", "×", "first token ms", "decode t/s", "×", "peak MB", "cache")
    print_table(console, header, [_row(bench, side) for side in bench.sides], "lrlrrlrl")
    if not bench.memory:
        print_line(console, "peak memory was left out (--no-memory)")


def _row(bench: DecodeBench, side: DecodeSide) -> list[str]:
    first = bench.sides[0]
    itself = side is first
    kind = "shared buffer" if side.shared else "present to past"
    return [
        side.name,
        f"{bench.prompt_tokens / side.prompt.median:.1f}",
        "" if itself else spell_ratio(side.prompt.over(first.prompt)),
        milliseconds(side.prompt.median),
        f"{1 / side.step.median:.1f}",
        "" if itself else spell_ratio(side.step.over(first.step)),
        "" if side.memory is None else f"{side.memory.end:.0f}",
        kind if side.cached else "none: the text is read anew",
    ]
