"""Graphs opened from memory whose weights lie in the data files of a model on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime, Session


def open_graph(
    runtime: Runtime,
    graph: ir.Model,
    source: Path | ir.Model,
    *,
    spinning: bool = False,
    threads: int = 0,
) -> Session:
    """A session on `graph`, which was made from `source` and shares its weights.

    For a file the graph is written beside it under a dot-name for the time of loading, so that
    references to data files hold and no weight is copied; where its folder cannot be written,
    the graph is opened as `Runtime.open` opens any (with a copy of the weights, up to 1 GB).
    Unless `spinning`, threads do not wait for work in a busy loop: for many short runs, with work
    between.

    Raises:
        InputError: the runtime refuses the graph.
    """
    if not isinstance(source, Path):
        return runtime.open(graph, spinning=spinning, threads=threads)
    try:
        copy = write_beside(source, ir.serde.serialize_model(graph).SerializeToString())
    except OSError:
        return runtime.open(graph, spinning=spinning, threads=threads)
    try:
        return runtime.open(copy, spinning=spinning, threads=threads)
    finally:
        copy.unlink(missing_ok=True)


def write_beside(path: Path, content: bytes) -> Path:
    """A new file under a dot-name in the folder of `path`; the caller removes it.

    Raises:
        OSError: the folder cannot be written; nothing is left there.
    """
    name = None
    try:
        folder = path.absolute().parent
        handle, name = tempfile.mkstemp(suffix=".onnx", prefix=".qgraph-", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise
    return Path(name)
