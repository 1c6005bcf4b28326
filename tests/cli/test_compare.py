"""`qgraph compare`: figures, bars, JSON, the gate, wrong usage."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from qgraph.comparison import Comparison, SiteRow
from qgraph.comparison_view import bar, render
from qgraph.divergence import Divergence

Command = Callable[..., Any]
SIZE = 128


@pytest.fixture
def optimized(qgraph: Command, tied: Path) -> Path:
    output = tied.with_name("o.onnx")
    ran = qgraph("optimize", tied, "-o", output, "--format", "uint4", "--group", "64", "--quiet")
    assert ran.status == 0, ran.err
    return output


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = np.random.default_rng(0).integers(0, SIZE, (3, 16)).tolist()
    path.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
    return path


def test_a_pipe_gets_a_plain_table(
    qgraph: Command, tied: Path, optimized: Path, data: Path
) -> None:
    ran = qgraph("compare", tied, optimized, "--data", data)
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == f"{tied} ‖ {optimized}"
    assert lines[1] == "3 samples · 48 tokens · 48 positions scored · target ort-cpu"
    assert [line.split("  ")[0].strip() for line in lines[4:10]] == [
        "KL divergence, mean", "", "", "", "top-1 agreement", "perplexity",
    ]  # fmt: skip
    rows = [line.split() for line in lines[lines.index("") + 1 :] if "#" in line]
    assert {row[0] for row in rows} == {"embed", "fc", "head"}
    errors = [float(row[2]) for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert rows[0][-1] == "#" * 30
    assert all(len(row[-1]) == round(30 * float(row[2]) / errors[0]) for row in rows[1:])
    own = {row[0]: row[3:-1] for row in rows}
    assert (len(own["embed"]), len(own["fc"]), len(own["head"])) == (0, 2, 2)
    assert 0 < float(own["fc"][0]) < float(own["fc"][1])
    assert "comparing: 3 samples" in ran.err


def test_json_and_report_agree(
    qgraph: Command, tied: Path, optimized: Path, data: Path, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    ran = qgraph("compare", tied, optimized, "--data", data, "--format", "json", "--report", report)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert found == json.loads(report.read_text("utf-8"))
    assert found["schema"] == 1
    assert found["divergence"]["positions"] == 48
    assert [site["name"] for site in found["sites"]] != []
    assert f"wrote {report}" in ran.err


def test_options_reach_the_run(qgraph: Command, tied: Path, optimized: Path, data: Path) -> None:
    ran = qgraph(
        "compare", tied, optimized, "--data", data, "--samples", "2", "--llama-cpp",
        "--no-sites", "--format", "json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert (found["samples"], found["second_half"], found["sites"]) == (2, True, [])
    assert found["divergence"]["positions"] == 2 * 7


def test_text(qgraph: Command, tied: Path, optimized: Path, tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZE)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text(" ".join(f"w{i}" for i in range(40)), encoding="utf-8")
    arguments = ("--text", tmp_path / "t.txt", "--tokenizer", tmp_path / "tokenizer.json")
    ran = qgraph("compare", tied, optimized, *arguments, "--sequence", "8", "--no-sites")
    assert ran.status == 0, ran.err
    assert "5 samples · 40 tokens · 40 positions scored" in ran.out
    assert "note: the text has 5 blocks of 8 tokens, not 20" in ran.out


def test_the_gate_speaks_after_the_result(
    qgraph: Command, tied: Path, optimized: Path, data: Path
) -> None:
    ran = qgraph("compare", tied, optimized, "--data", data, "--max-kl", "1e-9", "--no-sites")
    assert ran.status == 4
    assert "KL divergence, mean" in ran.out
    assert "more than the 1e-09 that are allowed; `qgraph optimize` loses less with" in ran.err
    ran = qgraph("compare", tied, tied, "--data", data, "--max-kl", "0", "--no-sites")
    assert ran.status == 0, ran.err


@pytest.mark.parametrize(
    "arguments,words",
    [
        ((), "one of the two"),
        (("--text", "t"), "--text needs --tokenizer"),
        (("--text", "t", "--tokenizer", "t", "--data", "d"), "one of the two"),
        (("--data", "d.jsonl", "--tokenizer", "t"), "--tokenizer goes with --text"),
        (("--data", "d.csv"), "neither a .npz nor a .jsonl"),
        (("--data", "d.jsonl"), "No such file"),
        (
            ("--data", "d.jsonl", "--report", "no/where/r.json"),
            "No such file or directory: choose a path",
        ),
        (("--data", "d.jsonl", "--report", "d.jsonl"), "would overwrite"),
        (("--data", "d.jsonl", "--samples", "0"), "--samples"),
        (("--data", "d.jsonl", "--max-kl", "-1"), "--max-kl"),
        (("--data", "d.jsonl", "--format", "yaml"), "table, json"),
    ],
)
def test_wrong_usage(qgraph: Command, tied: Path, arguments: tuple[str, ...], words: str) -> None:
    ran = qgraph("compare", tied, tied, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert words in ran.err


def test_a_model_that_is_not_there_is_named_first(qgraph: Command, tied: Path) -> None:
    missing = tied.with_name("missing.onnx")
    for models_ in ((missing, tied), (tied, missing)):
        ran = qgraph("compare", *models_)
        assert ran.status == 2
        assert f"{missing}: no such file; the folder holds" in ran.err


def test_a_model_without_logits_has_no_gate(qgraph: Command, model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, SIZE), np.float32))
    ran = qgraph("compare", model, model, "--data", tmp_path / "d.npz", "--no-sites")
    assert ran.status == 0, ran.err
    assert "cosine, mean" in ran.out
    assert [line.split() for line in ran.out.splitlines() if line.startswith("scores")] == [
        ["scores", "0.000000", "1.000000", "1.000000"]
    ]
    ran = qgraph("compare", model, model, "--data", tmp_path / "d.npz", "--max-kl", "1")
    assert ran.status == 2
    assert "--max-kl has no meaning" in ran.err


def many(count: int) -> Comparison:
    sites = [
        SiteRow(f"[/x]{i}", "w", "linear", "MatMul", "MatMul", None, 1 / (1 + i))
        for i in range(count)
    ]
    divergence = Divergence(8, 0.5, 0.25, 1.5, 2.0, 0.75, 7, 10.0, 11.0)
    return Comparison(
        "a", "b", "ort-cpu", 1, 8, False, divergence, sites=tuple(sites), site_samples=1
    )


@pytest.mark.parametrize("width", [50, 100])
def test_a_terminal_gets_bars_that_fit(width: int) -> None:
    screen = io.StringIO()
    render(many(30), Console(file=screen, force_terminal=True, width=width, color_system=None))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    drawn = [line for line in lines if "[/x]" in line]
    assert len(drawn) == 20
    cells = min(30, width - 6 - 6 - 17)
    assert drawn[0].count("█") == cells
    assert drawn[1].count("█") == cells // 2
    assert any("and 10 more" in line for line in lines)
    assert "+10.00 %" in screen.getvalue()


def test_numbers_near_zero_are_shown_as_they_are() -> None:
    screen = io.StringIO()
    site = SiteRow("fc", "w", "linear", "MatMul", "MatMul", None, 1.2e-6)
    divergence = Divergence(8, -4e-9, 0.0, 1.5, 2.0, 0.75, 7, 10.0, 11.0)
    found = Comparison("a", "b", "ort-cpu", 1, 8, False, divergence, sites=(site,))
    render(found, Console(file=screen, force_terminal=False, width=80))
    assert "-0.000000" not in screen.getvalue()
    assert "1e-06" in screen.getvalue()


def test_bars() -> None:
    assert bar(1, 1, 10) == "█" * 10
    assert bar(0.5, 1, 10) == "█" * 5
    assert bar(0.0625, 1, 10) == "▋"
    assert bar(0.5, 1, 10, fine=False) == "#####"
    assert bar(0, 0, 10) == bar(float("nan"), 1, 10) == ""
    assert bar(float("inf"), float("inf"), 10) == "█" * 10
