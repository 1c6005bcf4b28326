"""`qgraph bench`: tables, JSON, PNG and wrong usage; times themselves decide nothing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qgraph.bench_plot import plot
from qgraph.bench_result import Bench, Row, Side, SiteBench
from qgraph.bench_view import render
from qgraph.timing import Timing

Command = Callable[..., Any]


def row(rows: int | None, *times: float) -> Row:
    """Sides `a`, `b`, … of these seconds, the second of two rounds twice as long."""
    sides = [Side("abc"[at], f"K{at}", Timing((t, 2 * t))) for at, t in enumerate(times)]
    return Row(rows, tuple(sides))


@pytest.fixture
def found() -> Bench:
    site = SiteBench("fc", "MatMulNBits", 64, 32, "K0", 3, (row(1, 1e-5, 4e-5),))
    whole = (row(1, 0.001, 0.003), row(256, 0.2, 0.1))
    return Bench("a", ("b",), "ort-cpu", "ONNX Runtime 1", "CPU", 2, 5, "tokens", whole, (site,))


def shown(found: Bench, width: int = 200) -> list[str]:
    stream = io.StringIO()
    render(found, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def test_a_table_has_every_side_its_time_ratio_and_bar(found: Bench) -> None:
    lines = shown(found)
    assert lines[0] == "a against b"
    assert lines[1].startswith("CPU · ONNX Runtime 1 · 2 threads · 5 rounds")
    assert lines[3] == "whole model, rows = tokens of one prompt, no cache"
    assert [line.split() for line in lines[5:9]] == [
        ["1", "a", "1.50", "########"],
        ["b", "4.50", "3.00", "(3.00…3.00)", "#" * 24],
        ["256", "a", "300", "#" * 24],
        ["b", "150", "0.50", "(0.50…0.50)", "#" * 12],
    ]
    assert lines[10] == "64×32, 3 linears as fc"
    assert lines[13].split()[:4] == ["b", "K1", "0.06", "4.00"]


def test_the_command_prints_a_table_and_writes_json(
    qgraph: Command, model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "bench.json"
    ran = qgraph(
        "bench", model, "--against", model, "--rows", "1,2", "--rounds", "3", "--report", report
    )
    assert ran.status == 0, ran.err
    found = json.loads(report.read_text("utf-8"))
    assert found["schema"] == 1
    assert found["against"] == [f"{model} (2)"]
    assert [each["rows"] for each in found["whole"]] == [1, 2]
    assert {(s["n"], s["k"], s["count"]) for s in found["sites"]} == {
        (256, 128, 2), (128, 256, 2), (128, 128, 1),
    }  # fmt: skip
    assert "whole model, rows = samples of a batch" in ran.out
    assert f"wrote {report}" in ran.err


def test_json_goes_to_stdout(qgraph: Command, model: Path) -> None:
    options = ("--rows", "1", "--rounds", "3", "--no-sites", "--threads", "1", "--format", "json")
    ran = qgraph("bench", model, *options)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert (found["threads"], found["rounds"], found["sites"]) == (1, 3, [])


@pytest.mark.parametrize(
    "options,words",
    [
        (("--rows", "0"), "wanted numbers of 1 and more"),
        (("--rows", "a"), "wanted numbers of 1 and more"),
        (("--rounds", "2"), "--rounds"),
        (("--target", "ort-cpi"), "did you mean"),
    ],
)
def test_wrong_usage(qgraph: Command, model: Path, options: tuple[str, ...], words: str) -> None:
    ran = qgraph("bench", model, *options)
    assert ran.status == 2
    assert words in ran.err


@pytest.mark.parametrize("option", ["--report", "--plot"])
def test_no_output_overwrites_a_model(qgraph: Command, model: Path, option: str) -> None:
    before = model.read_bytes()
    ran = qgraph("bench", model, option, model)
    assert ran.status == 2
    assert "would overwrite a model" in ran.err
    assert model.read_bytes() == before


def test_a_plot_without_matplotlib_names_the_extra_before_it_measures(
    qgraph: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = qgraph("bench", model, "--plot", tmp_path / "p.png")
    assert ran.status == 2
    assert "pip install matplotlib, or '.[plot]'" in ran.err
    assert "measuring" not in ran.err


def test_a_plot_is_a_png(found: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    plot(found, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
