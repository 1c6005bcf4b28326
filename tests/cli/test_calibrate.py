"""`qgraph optimize --calibrate`: several sources, weights, and errors that say the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers import models as kinds

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of token ids, a text, a folder without data; run beside them."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b@2.jsonl"):
        lines = [json.dumps({"input_ids": [at % 128] * 8}) for at in range(20)]
        Path(name).write_text("\n".join(lines), encoding="utf-8")
    np.savez("c.npz", input_ids=np.ones((20, 8), np.int64))
    Path("text.txt").write_text("a b c")
    Path("empty").mkdir()
    Tokenizer(kinds.WordLevel({"a": 0}, unk_token="a")).save("tokenizer.json")


def test_options_repeat_and_have_weights(qgraph: Command, tied: Path) -> None:
    ran = qgraph(
        "optimize", tied, "--solver", "gptq", "--embedding", "float", "--samples", "8",
        "--calibrate", "a.jsonl@2", "--calibrate", "b@2.jsonl", "--calibrate", "c.npz@1.0",
        "--report", "report.json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "calibration data: 64 tokens" in ran.err
    steps = json.loads(Path("report.json").read_text())["steps"]
    assert any("gptq" in step["pass_name"] + step["detail"] for step in steps)


def test_what_was_left_out_is_a_note(qgraph: Command, tied: Path) -> None:
    Path("f").mkdir()
    Path("a.jsonl").rename("f/a.jsonl")
    Path("f/LICENSE").write_text("mine")
    ran = qgraph(
        "optimize", tied, "--solver", "gptq", "--calibrate", "f", "--report", "r.json",
        "--embedding", "float",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    notes = json.loads(Path("r.json").read_text())["notes"]
    assert any("left out of the calibration folder f: LICENSE" in note for note in notes)
    assert any("a.jsonl gives 20 calibration samples, not 64" in note for note in notes)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--calibrate", "none.txt"], "'none.txt' is no file and no folder: wanted a text"),
        (["--calibrate", "a.jsonl", "--calibrate", "a.jsonl@x"], "number behind the last @"),
        (["--calibrate", "a.jsonl@0"], "wanted a positive number"),
        (["--calibrate", "empty"], "folder empty is empty: wanted .txt"),
        (["--calibrate", "text.txt"], "needs the model's tokenizer: add --tokenizer"),
        (["--calibrate", "a.jsonl", "--tokenizer", "tokenizer.json"], "there is none"),
        (["--tokenizer", "tokenizer.json"], "give --calibrate FILE too"),
        (["--calibrate", "text.txt", "--tokenizer", "tokenizer.json"], "smaller --sequence"),
        (["--calibrate", "self"], "no causal language model"),
        (["--calibrate", "self", "--calibrate", "self@2"], "self stands twice"),
    ],
)
def test_wrong_usage_is_2_and_writes_nothing(
    qgraph: Command, model: Path, arguments: list[str], words: str
) -> None:
    before = set(model.parent.iterdir())
    ran = qgraph("optimize", model, "--solver", "gptq", *arguments)
    assert ran.status == 2
    assert words in ran.err
    assert set(model.parent.iterdir()) == before
