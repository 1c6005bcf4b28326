"""Paths of outputs and reports: checked before the work, and honest where writing fails."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import decoder
from one_matmul import MATMUL, save, weight

import qgraph
from qgraph.models import tiny
from qgraph.run_notes import check_report, output_file, plan_notes, write_report


def test_a_report_that_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    check_report(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_report_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("mine")
    os.utime(path, (1, 1))
    check_report(path)
    assert (path.read_text(), path.stat().st_mtime) == ("mine", 1)


def test_a_link_to_nowhere_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "r.json"
    link.symlink_to(tmp_path / "target.json")
    check_report(link)
    assert link.is_symlink()
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize(
    "name,words",
    [
        ("no/such/r.json", "No such file or directory"),
        (".", "Is a directory"),
        ("file/r.json", "Not a directory"),
        ("loop", "symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_report_that_cannot_be_written_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(qgraph.InputError, match=rf"report .*{words}.*choose a path"):
        check_report(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_report_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(qgraph.InputError, match="Permission denied"):
        check_report(tmp_path / "r.json")
    tmp_path.chmod(stat.S_IRWXU)


def test_a_pipe_gets_the_report_whole(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_report(pipe)  # opening it here would be the end of the file for the reader
    write_report(pipe, {"a": 1})
    reader.join(timeout=10)
    assert [json.loads(text) for text in read] == [{"a": 1}]


def test_a_report_replaces_another_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(qgraph.InputError, match=r"no space left in .*choose a path that can"):
            write_report(path, {"a": 1})
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("old", 2)
    write_report(link, {"a": 1})
    assert link.is_symlink()
    assert (json.loads(path.read_text()), len(list(tmp_path.iterdir()))) == ({"a": 1}, 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_where_only_the_report_fails_the_model_is_there_and_the_error_says_so(
    tmp_path: Path,
) -> None:
    model = tiny.build(tmp_path)
    output = tmp_path / "o.onnx"
    options: dict[str, Any] = {"report": "/dev/full", "check": False}
    with pytest.raises(qgraph.InputError) as caught:
        qgraph.optimize(model, output, **options)
    assert str(caught.value).splitlines() == [
        "report /dev/full: No space left on device: choose a path that can be written",
        f"the model was written to {output}; only the report is missing or incomplete",
    ]
    assert qgraph.explain(output).coverage.linears_quantized == 21  # Q, K and V in one
    with pytest.raises(qgraph.InputError, match=r"choose a path that can be written$"):
        qgraph.optimize(model, dry_run=True, **options)


def test_an_output_that_ends_with_a_slash_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(qgraph.InputError, match="is a folder: name a file in it"):
        qgraph.optimize(tmp_path / "m.onnx", f"{tmp_path}/out/")
    assert list(tmp_path.iterdir()) == []
    assert output_file("out/m.onnx") == output_file(Path("out/m.onnx")) == Path("out/m.onnx")


LEVEL = "lower_matmul_nbits.accuracy_level"


@pytest.mark.parametrize("level,option", [("0", "4"), ("4", "0"), ("0", "auto"), (4, "0")])
def test_levels_that_contradict_each_other_are_both_named(
    tmp_path: Path, level: str | int, option: str
) -> None:
    words = rf"--accuracy-level {level} and --option {LEVEL}={option} contradict"
    with pytest.raises(qgraph.InputError, match=words):
        qgraph.optimize(tmp_path / "m.onnx", accuracy_level=level, options={LEVEL: option})


@pytest.mark.parametrize("level,option", [("0", "0"), ("4", "4"), ("auto", "4"), ("auto", "auto")])
def test_levels_that_agree_are_fine(level: str, option: str) -> None:
    assert qgraph.Recipe(accuracy_level=level, options={LEVEL: option}).options[LEVEL] == option


def test_second_weights_and_row_scales_are_told_as_a_whole(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    plan = qgraph.optimize(source, dry_run=True, purpose="both").plan
    many = [item.many for item in plan.decisions if item.many is not None]
    (note,) = [note for note in plan_notes(plan) if "second weight" in note]
    size = sum(each.packed_bytes for each in many) / 1e6
    assert note.startswith(
        f"{len(many)} linears have a second weight, for {many[0].from_rows} rows and more: "
        f"{size:.1f} of "
    )
    found = qgraph.optimize(source, dry_run=True, format="int8-row").report.notes
    (note,) = [note for note in found if note.startswith("int8-row has one scale to a row")]
    assert "block=128" in note
    for options in ({"format": "uint4"}, {"activations": "int8-row"}):
        told = qgraph.optimize(source, dry_run=True, **options).report.notes
        assert not [
            note for note in told if "second weight" in note or "one scale to a row" in note
        ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "uint4:group=128"}, "K = 64 in groups of 128 (mm; 64 would divide it)"),
        ({"format": "uint4:group=128", "target": "qdq"}, "K = 64 in groups of 128"),
        ({"format": "uint4:group=32"}, ""),
        ({"group": 128}, ""),  # the best format takes a group that divides
        ({"format": "int8-row"}, ""),
    ],
)
def test_rows_that_are_padded_are_told(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    notes = qgraph.optimize(source, **options).report.notes
    found = [note for note in notes if note.startswith("rows are padded")]
    assert bool(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "int2:group=32", "target": "qdq"}, "opset from 21 to 25, IR version from 10"),
        ({"format": "int4:group=32", "target": "qdq"}, ""),
        ({}, ""),
    ],
)
def test_an_opset_that_was_raised_is_told(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    notes = qgraph.optimize(source, **options).report.notes
    found = [note for note in notes if note.startswith("raised: ")]
    assert bool(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize("tokens,told", [(255, True), (256, False)])
def test_few_tokens_to_solve_on_are_told(tmp_path: Path, tokens: int, told: bool) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    x = np.random.default_rng(0).standard_normal((tokens, 64)).astype(np.float32)
    notes = qgraph.optimize(source, solver="gptq", calibrate=[{"x": x}]).report.notes
    found = [note for note in notes if "by heart" in note]
    assert bool(found) == told
    assert not told or "at worst 255 for K = 64 (mm)" in found[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target": "qdq", "format": "int4:group=32"}, True),
        ({"target": "qdq", "format": "int8-row"}, False),  # no kernel is made of that
        ({"format": "int4:group=32"}, False),
    ],
)
def test_what_a_portable_file_costs_at_load_is_told(
    tmp_path: Path, options: dict[str, Any], told: bool
) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    notes = qgraph.optimize(source, **options).report.notes
    assert any("each time that it loads it" in note for note in notes) == told
