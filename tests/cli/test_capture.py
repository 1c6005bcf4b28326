"""`qgraph capture` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

import qgraph
from qgraph.cli import run

torch = pytest.importorskip("torch")

from tests.frontends.torch_modules import MODULES  # noqa: E402  (needs torch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    module, args, dynamic = MODULES["mlp"]()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(module, args, dynamic_shapes=dynamic), path)
    return path


def test_a_pt2_becomes_an_onnx_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", str(source)]) == 0
    printed = capsys.readouterr()
    target = source.with_suffix(".onnx")
    first, *_, last = printed.out.splitlines()
    assert first.startswith(f"wrote {target} (")
    assert last == f"next: qgraph optimize {target} --int4-groups 128"
    assert "2 sites" in printed.err
    assert [site.node.meta["qgraph.module"] for site in qgraph.capture(target).sites()] == [
        "up",
        "down",
    ]
    # What it wrote it may replace, and the same again is the same file.
    before = target.read_bytes()
    assert run(["capture", str(source), "-o", str(target), "-q"]) == 0
    assert target.read_bytes() == before
    assert capsys.readouterr() == ("", "")


def test_a_stranger_s_file_and_the_source_are_kept(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = source.with_name("other.onnx")
    other.write_bytes(b"something else")
    assert run(["capture", str(source), "-o", str(other)]) == 2
    assert "was not written by qgraph" in capsys.readouterr().err
    assert other.read_bytes() == b"something else"
    data = source.read_bytes()
    assert run(["capture", str(source), "-o", str(source), "--force"]) == 2
    assert "is a file of the input" in capsys.readouterr().err
    assert source.read_bytes() == data
    assert run(["capture", str(source), "-o", str(other), "--force", "--single-file"]) == 0
    assert sorted(path.name for path in source.parent.iterdir()) == ["model.pt2", "other.onnx"]


def test_an_older_opset_is_written_where_it_is_asked_for(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = source.with_suffix(".onnx")
    for asked, written in (("21", 21), ("99", 23)):
        assert run(["capture", str(source), "--opset", asked, "-q"]) == 0
        assert qgraph.capture(target).model.opset_imports[""] == written
    result = qgraph.optimize(source, min_runtime="1.20", group=32)
    assert result.report.totals["oldest_runtime"]["oldest"] == "1.20"
    capsys.readouterr()
    assert run(["capture", str(source), "--opset", "17"]) == 2
    assert "opset 17: torch exports opset 18 to 23" in capsys.readouterr().err
    assert run(["capture", str(target), "-o", "x.onnx", "--opset", "21"]) == 2
    assert "and keeps the opset it has" in capsys.readouterr().err


def test_what_is_no_source_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"PK\x03\x04 but no archive")
    assert run(["capture", str(path)]) == 2
    assert "error: " in (err := capsys.readouterr().err)
    assert "is no .pt2: a zip archive that breaks off" in err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt2"]
    assert run(["capture", str(tmp_path / "gone")]) == 2
    assert "no such file" in capsys.readouterr().err
