"""Counts of things in words."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 site`, `2 sites`; `many` is the plural where that is not `one` and an s."""
    return f"{count} {plural(count, one, many)}"


def plural(count: int, one: str, many: str = "") -> str:
    """The word for so many things: `site` for one, else `sites`, or `many`."""
    return one if count == 1 else many or f"{one}s"
