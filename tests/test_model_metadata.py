"""What a run wrote into a model, read from models that say anything."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir
import pytest

from qgraph.model_metadata import read_metadata, site_entries, write_metadata
from qgraph.report import SCHEMA
from qgraph.saved_file import METADATA_KEY


def model(text: str | None = None) -> ir.Model:
    made = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    if text is not None:
        made.metadata_props[METADATA_KEY] = text
    return made


def test_what_is_written_is_read() -> None:
    content = {"schema": SCHEMA, "sites": {"fc": {"format": "int4:group=32"}}}
    made = model()
    write_metadata(made, content)
    assert read_metadata(made) == content
    assert site_entries(read_metadata(made)) == content["sites"]


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "[]", "null", "1", "{}", json.dumps({"schema": SCHEMA + 1})]
)
def test_damaged_or_foreign_metadata_says_nothing(text: str) -> None:
    assert read_metadata(model(text)) == {}


@pytest.mark.parametrize("sites", [None, [], "fc", {"fc": None}, {"fc": ["format"]}])
def test_sites_of_another_kind_are_left_out(sites: Any) -> None:
    assert site_entries({"schema": SCHEMA, "sites": sites}) == {}
