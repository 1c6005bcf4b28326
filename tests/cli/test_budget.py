"""`qgraph optimize` with a budget, or a bound on the divergence: what it prints and its status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "ids.jsonl"
    lines = [json.dumps({"input_ids": [(3 * at + i) % 128 for i in range(8)]}) for at in range(8)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_budget_of_bits(qgraph: Command, tied: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    ran = qgraph("optimize", tied, "--target-bits", "6", "--calibrate", data, "-o", out)
    assert ran.status == 0, ran.err
    assert "target bits 6" in ran.out
    assert "bits a weight of linears" in ran.out
    assert "measured on 1 sample (8 tokens) held out" in ran.out
    told = qgraph("explain", out, "--node", "fc")
    assert "bit budget: " in told.out


def test_a_dry_run_says_what_would_be_lost(qgraph: Command, tied: Path, data: Path) -> None:
    ran = qgraph("optimize", tied, "--max-size", "60kB", "--calibrate", data, "--dry-run")
    assert ran.status == 0, ran.err
    assert "predicted" in ran.out
    assert "measured on" not in ran.out


def test_a_bound_that_is_missed_is_4(
    qgraph: Command, tied: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.onnx"
    for options in (["--max-kl", "1e-7"], ["--mixed", "--max-kl", "1e-12"]):
        ran = qgraph("optimize", tied, *options, "--calibrate", data, "-o", out)
        assert ran.status == 4
        assert "nothing was written" in ran.err
        assert not out.exists()


@pytest.mark.parametrize(
    "options,words",
    [
        (["--target-bits", "4", "--mixed", "--max-kl", "1"], "three budgets"),
        (["--mixed"], "add --max-kl X"),
        (["--target-bits", "4"], "take calibration data"),
        (["--max-size", "many"], "as in 90MB"),
        (["--candidate", "int8"], "what a budget chooses from"),
    ],
)
def test_wrong_usage_is_2(qgraph: Command, tied: Path, options: list[str], words: str) -> None:
    ran = qgraph("optimize", tied, *options)
    assert ran.status == 2
    assert words in ran.err
