"""Graphs opened from memory whose weights lie in the data files of a model on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.model_tensors import all_tensors
from qgraph.onnx_file import load

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
    references to data files hold and no weight is copied; where that cannot be, or its data lies
    in another folder, the graph is opened as `Runtime.open` opens any.
    Unless `spinning`, threads do not wait for work in a busy loop: for many short runs, with work
    between.

    Raises:
        InputError: the runtime refuses the graph.
    """
    if not isinstance(source, Path) or data_lies_elsewhere(source, graph):
        return runtime.open(graph, spinning=spinning, threads=threads)
    try:
        copy = write_beside(source, ir.serde.serialize_model(graph).SerializeToString())
    except OSError:
        return runtime.open(graph, spinning=spinning, threads=threads)
    try:
        return runtime.open(copy, spinning=spinning, threads=threads)
    finally:
        copy.unlink(missing_ok=True)


def graph_at(path: Path) -> ir.Model:
    """The graph of a file; its weights stay where they are.

    Raises:
        InputError: the file is a link, and what it leads to is no model with its data.
        OSError, DecodeError: no readable ONNX file.
    """
    return load(path) if _leads_elsewhere(path) else ir.load(path.absolute())


def data_lies_elsewhere(path: Path, graph: ir.Model) -> bool:
    """Whether a file beside the model at `path` could not name its data: runtimes do not read it.

    A download cache keeps model and data as links into one folder of blobs: runtimes follow those
    of the model's own folder, or of the folder that the model itself is a link into.

    graph: that model, or one that shares its weights.
    """
    return _leads_elsewhere(path) and any(
        isinstance(tensor, ir.ExternalTensor) for tensor in all_tensors(graph)
    )


def _leads_elsewhere(path: Path) -> bool:
    """Whether it is a link into another folder."""
    folder = os.path.dirname(os.path.realpath(path))
    return folder != os.path.realpath(path.absolute().parent)


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
