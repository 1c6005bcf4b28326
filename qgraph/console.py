"""What the command line prints: text without markup, plain tables in pipes, progress by stage.

Names come out of files and are data: they are shown as `rich.text.Text`, never as markup, and
their control characters are escaped.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

_BAR_WIDTH = 40
_NARROW = 60
"""Terminals of fewer columns get the time left without the time gone."""
_SPEED_SECONDS = 86_400.0
"""Time left follows from the mean speed of a stage so far: its steps may lie minutes apart."""

# Control, format (bidirectional overrides), surrogates, line and paragraph separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def escape(text: str) -> str:
    r"""`text` on one line, with every character that steers a terminal written as `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    shown = (_spelled(c) if unicodedata.category(c) in _UNSAFE else c for c in text)
    return "".join(shown)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line end quietly; rich would exit with status 1."""
        raise BrokenPipeError


def output() -> Console:
    """The console for what a command answers."""
    return _Console()


def messages() -> Console:
    """The console for progress and notes, on stderr, so that answers can be piped."""
    return _Console(stderr=True)


def megabytes(count: int) -> str:
    """Bytes as MB of 10⁶ bytes: `95.3 MB`; small counts in kB or bytes."""
    if count >= 99_950:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e3:.1f} kB" if count >= 1000 else f"{count} bytes"


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print one line as it is: no markup, no highlighting, no wrapping in pipes."""
    shown = Text(escape(text), style=style)
    console.print(shown, soft_wrap=not console.is_terminal, highlight=False)


def print_written(console: Console, files: Iterable[Path]) -> None:
    """Print the path and the size of each file that a command wrote."""
    for path in files:
        print_line(console, f"wrote {path} ({megabytes(path.stat().st_size)})")


def print_table(
    console: Console, header: Sequence[str], rows: Iterable[Sequence[str]], right: str = ""
) -> None:
    """A table: drawn on a terminal; in a pipe one line a row, aligned, nothing cut off.

    right: one character a column; "r" aligns to the right.
    """
    cells = [[escape(cell) for cell in row] for row in rows]
    sides = right.ljust(len(header), "l")[: len(header)]
    if console.is_terminal:
        console.print(_drawn(header, cells, sides))
        return
    widths = [max(map(cell_len, column)) for column in zip(header, *cells, strict=True)]
    for row in (header, *cells):
        line = "  ".join(_pad(*cell) for cell in zip(row, widths, sides, strict=True))
        print_line(console, line.rstrip())


def _pad(text: str, width: int, side: str) -> str:
    space = " " * (width - cell_len(text))
    return space + text if side == "r" else text + space


def _drawn(header: Sequence[str], rows: list[list[str]], sides: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title, side in zip(header, sides, strict=True):
        right = side == "r"
        table.add_column(
            title, justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def error_text(message: str) -> str:
    """What stderr gets of an error: its first line behind the word, the others below it."""
    first, *rest = message.split("\n")
    lines = [f"error: {escape(first)}", *(f"  {escape(line)}" for line in rest)]
    return "\n".join(lines) + "\n"


class Stages:
    """Progress of a command: a bar on a terminal, one plain line for each finished stage."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._title = ""
        self._since = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        self._stop()

    def stage(self, title: str, total: int = 0) -> None:
        """Start a stage of `total` units (0: unknown); ends the one before."""
        self.finish()
        self._title, self._since = title, time.monotonic()
        if self._quiet or not self._console.is_terminal:
            return
        self._bar = Progress(
            *_columns(bool(total), self._console.width >= _NARROW),
            console=self._console,
            transient=True,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._bar.add_task(escape(title), total=total or None)
        self._bar.start()

    def advance(self, done: int) -> None:
        """`done` units of the stage are finished."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def finish(self, summary: str = "") -> None:
        """End the stage with one line of what it found."""
        self._stop()
        if self._title and not self._quiet:
            seconds = time.monotonic() - self._since
            tail = f": {summary}" if summary else ""
            print_line(self._console, f"{self._title}{tail} ({seconds:.1f} s)", style="dim")
        self._title = ""

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _columns(known: bool, wide: bool) -> list[ProgressColumn]:
    """A spinner, the title and the time; where the total is known a bar and the time left too."""
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
    ]
    if not known:
        return [*columns, TimeElapsedColumn()]
    bar = BarColumn(bar_width=None, table_column=Column(max_width=_BAR_WIDTH))
    columns += [bar, TextColumn("{task.percentage:>3.0f} %")]
    columns += [TimeElapsedColumn(), TextColumn("·")] if wide else []
    return [*columns, TimeRemainingColumn(), TextColumn("left")]
