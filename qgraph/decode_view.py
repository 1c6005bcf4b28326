"""A `DecodeBench` as text: for each side its speeds, its ratios and its memory."""

from __future__ import annotations

from rich.console import Console

from qgraph.bench_view import milliseconds
from qgraph.console import print_line, print_table
from qgraph.decode_result import DecodeBench, DecodeSide
from qgraph.timing import Ratio


def render(bench: DecodeBench, console: Console) -> None:
    """Print a table of all sides."""
    others = " · ".join(side.name for side in bench.sides[1:])
    against = f" against {others}" if others else ""
    print_line(console, f"{bench.sides[0].name}{against}", style="bold")
    threads = f"{bench.threads} threads" if bench.threads else "threads by default"
    print_line(
        console,
        f"{bench.cpu} · {bench.runtime} · {threads} · {bench.rounds} rounds, sides turn by turn · "
        "× is the side's time over the model's, with the range over the rounds",
    )
    print_line(
        console,
        f"a prompt of {bench.prompt_tokens} tokens, then {bench.new_tokens} tokens one by one",
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
        "" if itself else _ratio(side.prompt.over(first.prompt)),
        milliseconds(side.prompt.median),
        f"{1 / side.step.median:.1f}",
        "" if itself else _ratio(side.step.over(first.step)),
        "" if side.memory is None else f"{side.memory.end:.0f}",
        kind if side.cached else "none: the text is read anew",
    ]


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}…{ratio.high:.2f})"
