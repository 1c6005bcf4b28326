"""The stages of a run of `optimize`: told as they begin, and timed."""

from __future__ import annotations

import time

from qgraph.progress import Progress


class RunStages:
    """Tells `progress` of each stage, and how long each took.

    seconds: by stage, once it ended; a stage that comes again adds to what it took before.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self._current = ""
        self._since = 0.0

    def start(self, name: str, total: int = 0) -> None:
        """Begin a stage of `total` units (0: unknown); ends the one before."""
        self._end()
        self._current, self._since = name, time.perf_counter()
        self.progress.stage(name, total)

    def finish(self) -> None:
        """End the last stage."""
        self._end()
        self.progress.finish()

    def _end(self) -> None:
        name, self._current = self._current, ""
        if name:
            took = time.perf_counter() - self._since
            self.seconds[name] = self.seconds.get(name, 0.0) + took
