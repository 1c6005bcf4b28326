"""`--help` with the names of options whole, however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text
from typer import rich_utils

_CELLS = 6
"""What typer has in a row of options, behind a mark where one is required: the names, long and
short, those of its opposite, its type and its help."""


class OptionTable(Table):
    """typer's table of options: `--no-x` stands below `--x`, and neither is cut."""

    def add_row(self, *cells: Any, **kwargs: Any) -> None:
        """A row of options, or of anything else as it is."""
        if len(cells) not in (_CELLS, _CELLS + 1):
            super().add_row(*cells, **kwargs)
            return
        *mark, long, short, no_long, no_short, kind, words = cells
        super().add_row(*mark, _below(long, no_long), _below(short, no_short), kind, words)
        self.columns[len(mark)].no_wrap = True


def _below(first: Text, second: Text) -> Text:
    return Text("\n").join(each for each in (first, second) if each.plain)


def keep_names_whole() -> None:
    """Have typer print its options so, from now on."""
    rich_utils.Table = OptionTable  # type: ignore[attr-defined]
