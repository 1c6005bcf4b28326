"""What is given in place of a model: every command says what it found there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

KINDS = {
    "missing.onnx": "missing.onnx: no such file; the folder holds ",
    "folder": "folder is a folder, with no .onnx file in it",
    "empty.onnx": "empty.onnx is empty; wanted an ONNX model",
    "text.onnx": "text.onnx is no ONNX model: found 11 bytes that begin with b'hello te'",
    "page.onnx": "page.onnx is no ONNX model: it is an HTML or XML page",
}
COMMANDS = [
    ("optimize", "MODEL"),
    ("explain", "MODEL"),
    ("capture", "MODEL", "-o", "OUT"),
    ("export", "MODEL", "--layout", "gptq", "-o", "OUT"),
    ("generate", "MODEL", "--prompt", "x"),
    ("bench", "MODEL"),
    ("bench", "MODEL", "--decode"),
    ("bench", "GOOD", "--against", "MODEL"),
    ("compare", "MODEL", "GOOD", "--data", "DATA"),
    ("compare", "GOOD", "MODEL", "--data", "DATA"),
]


@pytest.fixture
def places(model: Path) -> dict[str, Path]:
    folder = model.parent
    (folder / "folder").mkdir()
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "text.onnx").write_bytes(b"hello text\n")
    (folder / "page.onnx").write_bytes(b"<html></html>")
    (folder / "data.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    return {"GOOD": model, "DATA": folder / "data.jsonl", "OUT": folder / "out"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_model_is_named(
    qgraph: Command, places: dict[str, Path], command: tuple[str, ...], kind: str
) -> None:
    given = places | {"MODEL": places["GOOD"].with_name(kind)}
    ran = qgraph(*(given.get(word, word) for word in command))
    assert ran.status == 2
    assert KINDS[kind] in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    "command", [("inspect",), ("import", "-o", "OUT"), ("quantize", "-o", "OUT")]
)
def test_a_checkpoint_that_is_missing_says_what_is_one(
    qgraph: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    out = {"OUT": tmp_path / "out"}
    ran = qgraph(*(out.get(word, word) for word in command), tmp_path / "missing")
    assert ran.status == 2
    assert "missing is no file and no folder: wanted a checkpoint" in ran.err
