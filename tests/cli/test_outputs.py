"""Where a command is to write is looked at before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qgraph import exporting, importing, optimizing, quantizing

Command = Callable[..., Any]
PROC = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder of Linux")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No input may be opened."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the input was read")

    for module in (optimizing, importing, exporting):
        monkeypatch.setattr(module, "capture", fail)
    monkeypatch.setattr(importing, "_opened", fail)
    monkeypatch.setattr(quantizing, "open_checkpoint", fail)


WRITES = {
    "optimize": ("optimize", "MODEL"),
    "import": ("import", "MODEL", "MODEL"),
    "export": ("export", "MODEL", "--layout", "gguf"),
    "quantize": ("quantize", "MODEL", "--layout", "gguf"),
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("command", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "output,words",
    [
        ("no/where/out.onnx", "there is no folder"),
        pytest.param("/proc/out.onnx", "cannot write in /proc: ", marks=PROC),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(
    qgraph: Command, model: Path, command: tuple[str, ...], output: str, words: str
) -> None:
    before = sorted(model.parent.iterdir())
    place = output if output.startswith("/") else model.parent / output
    ran = qgraph(*(model if word == "MODEL" else word for word in command), "-o", place)
    assert ran.status == 2
    last = ran.err.splitlines()[-1]
    assert words in last
    assert last.endswith("choose another output")
    assert sorted(model.parent.iterdir()) == before


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("command", ["export", "quantize"])
def test_folders_above_a_new_checkpoint_are_made_where_they_can_be(
    qgraph: Command, model: Path, command: str
) -> None:
    (model.parent / "file").write_text("")
    ran = qgraph(command, model, "--layout", "gptq", "-o", model.parent / "file" / "a" / "b")
    assert ran.status == 2
    assert f"cannot write in {model.parent}/file: Not a directory" in ran.err


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("command", ["optimize", "import"])
def test_a_report_and_a_file_of_another_are_refused_first(
    qgraph: Command, model: Path, command: str
) -> None:
    words = WRITES[command]
    given = [model if word == "MODEL" else word for word in words]
    out = model.with_name("out.onnx")
    ran = qgraph(*given, "-o", out, "--report", model.parent / "no" / "r.json")
    assert (ran.status, "No such file or directory: choose a path" in ran.err) == (2, True)
    out.write_bytes(b"mine")
    ran = qgraph(*given, "-o", out)
    assert (ran.status, "was not written by qgraph" in ran.err) == (2, True)
    ran = qgraph(*given, "-o", model)
    assert (ran.status, "is a file of the input, which would be lost" in ran.err) == (2, True)
    assert out.read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(qgraph: Command, model: Path) -> None:
    folder = model.parent / "kept"
    folder.mkdir(mode=0o500)
    ran = qgraph("optimize", model, "-o", folder / "out.onnx")
    assert (ran.status, "Permission denied; choose another output" in ran.err) == (2, True)
