"""Bringing a model into canonical form, and reading what `optimize` wrote into it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.report import SCHEMA

Source = str | os.PathLike[str] | ir.Model | Graph
METADATA_KEY = "qgraph"


def capture(source: Source) -> Graph:
    """Bring a model into canonical form; its weights stay in their files.

    Raises:
        InputError: no readable model, data files missing or outside the model's folder, or a
            graph that cannot be represented.
    """
    from qgraph.frontends.canonical import canonicalize
    from qgraph.frontends.onnx_file import load
    from qgraph.trusted import trusted

    if isinstance(source, Graph):
        return source
    path = None if isinstance(source, ir.Model) else Path(os.path.abspath(os.fspath(source)))
    model = source.clone() if isinstance(source, ir.Model) else load(path or "")
    try:
        notes = canonicalize(model, trusted)
    except (IndexError, TypeError, AssertionError, KeyError, AttributeError) as error:
        raise InputError(
            f"the graph is malformed ({type(error).__name__}: {error}): check it with "
            "onnx.checker, and export it again"
        ) from error
    overridden = frozenset(note.name for note in notes if note.code == "OVERRIDABLE_INPUT")
    graph = Graph(model, path, [note.message for note in notes], overridden)
    graph.verify()
    return graph


def read_metadata(model: ir.Model) -> dict[str, Any]:
    """What `optimize` wrote into a model; empty where it did not, or where it is damaged."""
    try:
        found = json.loads(model.metadata_props.get(METADATA_KEY, "{}"))
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}
