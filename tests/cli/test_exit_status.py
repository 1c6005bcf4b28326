"""What every command has in common: usage, errors, exit statuses, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qgraph as package
from qgraph import errors, pipeline
from qgraph.plan import Decision, QuantPlan
from qgraph.recipe import Recipe

Command = Callable[..., Any]


def failing(error: BaseException) -> Callable[..., Any]:
    def optimize(*_: object, **__: object) -> None:
        raise error

    return optimize


def test_version(qgraph: Command) -> None:
    ran = qgraph("--version")
    assert (ran.status, ran.out, ran.err) == (0, f"qgraph {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("optimize", "-h")])
def test_help_is_an_answer(qgraph: Command, arguments: tuple[str, ...]) -> None:
    ran = qgraph(*arguments)
    assert (ran.status, ran.err) == (0, "")
    assert "Usage: qgraph" in ran.out


def test_no_command_is_wrong_usage_and_names_them(qgraph: Command) -> None:
    ran = qgraph()
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        "error: no command given: optimize, explain, compare, bench, capture, import, export, "
        "quantize, inspect, generate or demo\n"
        "  try: qgraph --help\n"
    )


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("optimise",), "No such command 'optimise'"),
        (("optimize",), "Missing argument 'MODEL'"),
        (("optimize", "m.onnx", "--int4-group", "3"), "--int4-groups"),
        (("optimize", "m.onnx", "--solver", "rtm"), "did you mean 'rtn'"),
        (("optimize", "m.onnx", "--target", "cuda"), "ort-cuda"),
        (("optimize", "m.onnx", "--accuracy-level", "3"), "auto, 0, 4"),
        (("optimize", "m.onnx", "--int4-groups", "many"), "neither a number"),
        (("optimize", "m.onnx", "--group", "0"), "'row'"),
        (("optimize", "m.onnx", "--min-coverage", "95"), "--min-coverage"),
        (("optimize", "m.onnx", "--option", "x=1"), "PASS.FIELD=VALUE"),
        (("optimize", "m.onnx", "--int4-groups", "64", "--format", "int8"), "one or the other"),
        (("optimize", "m.onnx", "--int4-groups", "64", "--group", "32"), "one or the other"),
        (("optimize", "m.onnx", "--strict", "--no-check"), "one or the other"),
        (("optimize", "m.onnx", "--set", "head"), "GLOB=FORMAT"),
        (("explain", "m.onnx", "--format", "yaml"), "table, json"),
    ],
)
def test_wrong_usage_is_2_and_says_how(
    qgraph: Command, arguments: tuple[str, ...], words: str
) -> None:
    ran = qgraph(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert words in ran.err


@pytest.mark.parametrize(
    "error,status",
    [
        (errors.QGraphError("x"), 1),
        (errors.InputError("x"), 2),
        (errors.GraphError("x"), 2),
        (errors.MissingExtra("p", "cpu", "x"), 2),
        (errors.CoverageError("x"), 3),
        (errors.NumericError("x"), 4),
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
        (MemoryError(), 1),
        (EOFError("x"), 1),
    ],
)
def test_errors_have_their_status_and_are_one_plain_text(
    qgraph: Command,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    error: BaseException,
    status: int,
) -> None:
    monkeypatch.setattr(pipeline, "optimize", failing(error))
    ran = qgraph("optimize", model, "--quiet")
    assert ran.status == status
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "error,first",
    [
        (KeyboardInterrupt(), "error: interrupted"),
        (errors.InputError("full"), "error: full"),
        (MemoryError(), "error: out of memory"),
        (ValueError("x"), "error: ValueError: x"),
    ],
)
def test_what_was_noted_of_an_error_is_said(
    qgraph: Command,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    error: BaseException,
    first: str,
) -> None:
    error.add_note("go on with --resume")
    monkeypatch.setattr(pipeline, "optimize", failing(error))
    lines = qgraph("optimize", model, "--quiet").err.splitlines()
    assert (lines[0], lines[-1]) == (first, "  go on with --resume")


def test_a_fault_says_how_to_see_where(
    qgraph: Command, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(pipeline, "optimize", failing(ValueError("broken")))
    ran = qgraph("optimize", model, "--quiet")
    assert ran.err.splitlines()[0] == "error: ValueError: broken"
    assert "QGRAPH_DEBUG=1" in ran.err
    monkeypatch.setenv("QGRAPH_DEBUG", "1")
    assert "Traceback" in qgraph("optimize", model, "--quiet").err


def test_names_in_errors_steer_no_terminal(
    qgraph: Command, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(pipeline, "optimize", failing(errors.InputError("a\x1b[2J[/x]\nb\u202e")))
    ran = qgraph("optimize", model, "--quiet")
    assert ran.err == "error: a\\x1b[2J[/x]\n  b\\u202e\n"


def test_a_missing_file_is_named(qgraph: Command, tmp_path: Path) -> None:
    ran = qgraph("optimize", tmp_path / "[/none].onnx")
    assert ran.status == 2
    assert "[/none].onnx" in ran.err
    assert list(tmp_path.iterdir()) == []


def shell(script: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    environment = {"Q": f"{sys.executable} -m qgraph", "PYTHONIOENCODING": encoding}
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        encoding=encoding,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("format", ["table", "json"])
def test_a_closed_pipe_is_quiet(tmp_path: Path, format: str) -> None:
    names = [f"layer.{i}" for i in range(3000)]
    decisions = [Decision(name, f"{name}.w", "linear", "MatMul", 8, 8) for name in names]
    plan = QuantPlan(Recipe(), "ort-cpu", "ONNX Runtime", tuple(decisions))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    done = shell(f"$Q explain {path} --format {format} | head -c 1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout[1:] == "141\n"
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "--version"])
def test_a_full_device_is_an_error(arguments: str, unbuffered: str) -> None:
    done = shell(f"PYTHONUNBUFFERED={unbuffered} $Q {arguments} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == (
        "error: the output, or a temporary file, cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal_works(model: Path, encoding: str) -> None:
    done = shell(f"$Q explain {model}", encoding)
    assert done.returncode == 0
    assert "layers.0.up" in done.stdout


def test_it_runs_as_a_module_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qgraph", "--version"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == f"qgraph {package.__version__}\n"
