"""How long work reports its progress: a protocol, and the silent version of it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One line per stage; a bar where a stage lasts (the command line draws it)."""

    def stage(self, title: str, total: int = 0) -> None:
        """Start a stage of `total` units (0: unknown); ends the one before."""

    def advance(self, done: int) -> None:
        """`done` units of the stage are finished."""

    def finish(self, summary: str = "") -> None:
        """End the stage with one line of what it found."""


class Silent:
    """Progress for callers that want none."""

    def stage(self, title: str, total: int = 0) -> None:
        """Ignore."""

    def advance(self, done: int) -> None:
        """Ignore."""

    def finish(self, summary: str = "") -> None:
        """Ignore."""
