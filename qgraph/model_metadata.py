"""What `optimize` wrote of its run into the model it left: written as JSON, read from anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from qgraph.report import SCHEMA
from qgraph.saved_file import METADATA_KEY


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
