"""Where qgraph keeps what it may make again: downloads, built models, measured times."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """QGRAPH_CACHE, or qgraph in the user's cache folder; it may not be there yet."""
    chosen = os.environ.get("QGRAPH_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qgraph"
