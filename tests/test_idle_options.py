"""Options that nothing in a run reads are named, and why; those that something reads are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_matmul import MATMUL, save, weight

import qgraph

DATA = [{"x": np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)}]
DAMPING = {"quantize_gptq.damping": "0.02"}


def note(tmp_path: Path, **options: Any) -> str:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    result = qgraph.optimize(source, tmp_path / "o.onnx", **options)
    return "".join(each for each in result.report.notes if each.startswith("without effect"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": DAMPING}, "quantize_gptq.damping (no weight is solved by gptq)"),
        ({"options": {"solve.damping": "0.02"}}, "solve.damping (solve had nothing to do)"),
        ({"options": {"fuse_transformer.positions": "7"}}, "fuse_transformer had nothing to do"),
        ({"calibration": "parallel"}, "parallel (no solver works on calibration data)"),
        ({"embedding": "int8"}, "--embedding int8 (the model has no embedding)"),
        ({"format": "nf4", "accuracy_level": "4"}, "--accuracy-level 4 (no kernel here has"),
        ({"samples": 3}, "--samples, --sequence (they cut calibration data"),
        ({"calibrate": DATA, "target": "qdq"}, "--calibrate (nothing that was asked for looks"),
    ],
)
def test_an_option_that_nothing_reads_is_named(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    assert words in note(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": 3, "dry_run": True},  # what the prediction goes by
        {"calibrate": DATA},  # level 4 is checked on it
        {"accuracy_level": "0"},
        {"accuracy_level": "0", "target": "qdq"},  # has a note of its own
        {"options": {"lower_matmul_nbits.accuracy_level": "0"}},
        {"solver": "gptq", "calibration": "parallel", "calibrate": DATA, "options": DAMPING},
        {"solver": "auto", "calibrate": DATA, "options": DAMPING},
        {"solver": "gptq", "calibrate": DATA, "dry_run": True, "options": {"solve.damping": "0.1"}},
    ],
)
def test_an_option_that_something_reads_is_not(tmp_path: Path, options: dict[str, Any]) -> None:
    assert note(tmp_path, **options) == ""
