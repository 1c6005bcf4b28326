"""What `optimize` wrote of its run into the model it left: written as JSON, read from anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from qgraph.report import SCHEMA
from qgraph.saved_file import METADATA_KEY

SECOND = ("format", "kernel", "activations", "outliers")
"""What an entry says of a site's weight for many rows, in its `many`, as of the first one."""


def write_metadata(model: ir.Model, content: Mapping[str, Any]) -> None:
    """Keep `content`, which names its schema, in the model in place of what was there."""
    model.metadata_props[METADATA_KEY] = json.dumps(content, separators=(",", ":"))


def read_metadata(model: ir.Model) -> dict[str, Any]:
    """What `optimize` wrote into a model; empty where it did not, or where it is damaged."""
    try:
        found = json.loads(model.metadata_props.get(METADATA_KEY, "{}"))
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


def site_entries(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `metadata` tells of each site, by name; whatever others made of it is left out."""
    found = metadata.get("sites")
    entries = found.items() if isinstance(found, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, dict)}


def tell_second(model: ir.Model) -> None:
    """Let a model that has only the weights for many rows tell of those, in place of the first."""
    content = read_metadata(model)
    for entry in site_entries(content).values():
        second = entry.pop("many", None)
        if isinstance(second, dict):
            for name in (*SECOND, "solver", "error"):
                entry.pop(name, None)
            entry.update((name, second[name]) for name in SECOND if name in second)
    if content:
        write_metadata(model, content)
