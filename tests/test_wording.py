"""Counts in words: one thing is no plural, in the helper and in what runs say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import qgraph
from qgraph.wording import counted, plural

MANY_FOR_ONE = re.compile(
    r"\b1 ((?!is\b|was\b|has\b|us\b)[a-z]+s\b|[a-z]+ (are|were|have|stay|lie|give|become|keep)\b)"
)


def test_counts() -> None:
    assert [counted(n, "site") for n in (0, 1, 2)] == ["0 sites", "1 site", "2 sites"]
    assert counted(1, "linear has", "linears have") == "1 linear has"
    assert counted(3, "linear has", "linears have") == "3 linears have"
    assert (plural(1, "its", "their"), plural(2, "its", "their")) == ("its", "their")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[M, 96] x) => (float[M, 64] y) { y = MatMul(x, w) }"""
    )
    weight = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    "options",
    [
        {"purpose": "both"},
        {"dequantize_at_load": True},
        {"solver": "gptq", "calibrate": [{"x": np.ones((3, 96), np.float32)}]},
        {"target": "qdq"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_notes_of_one_linear(model: Path, options: dict[str, object]) -> None:
    done = qgraph.optimize(model, model.with_name("o.onnx"), min_elements=1, **options)
    again = qgraph.optimize(
        model.with_name("o.onnx"), None, min_elements=1, check=False, format="int8",
        target=str(options.get("target", "ort-cpu")),
    )  # fmt: skip
    notes = [*done.report.notes, *again.report.notes]
    assert any(re.search(r"\b1 (linear|site)\b", note) for note in notes)
    assert [note for note in notes if MANY_FOR_ONE.search(note)] == []
