"""`qgraph demo`: the main job on the model that comes with the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

Command = Callable[..., Any]


def test_demo(qgraph: Command, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    ran = qgraph("demo", "--folder", folder)
    assert ran.status == 0, ran.err
    nodes = onnx.load(folder / "tiny.int4.onnx", load_external_data=False).graph.node
    fused = sum(node.op_type == "MatMulNBits" for node in nodes)
    assert re.search(r"^quantized 29/29 linears \(100 % ", ran.out, re.MULTILINE)
    assert fused == 21  # four layers of seven, of which Q, K and V became one, and the head
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if " MB " in line}
    bits = {name: float(rows[name][3]) for name in ("float", "int4")}
    assert 0.5 < bits["float"] < 2.2
    assert bits["float"] < bits["int4"] < bits["float"] + 0.1
    sizes = {name: float(rows[name][1]) for name in ("float", "int4")}
    assert sizes["int4"] < sizes["float"] / 4
    assert "CPUExecutionProvider (ran)" in ran.out
    at = ran.out.index("\nkernels\n")
    header, *kernels = ran.out[at:].strip().splitlines()[1:5]
    assert header.split() == ["sites", "kernel", "provider", "ms", "share", "beside", "ms"]
    assert "tiny.onnx beside " in ran.out
    others = re.search(r"^ +other operators +([\d.]+) +([\d.]+) %$", ran.out, re.MULTILINE)
    assert others is not None
    shares = [float(line.split(" %")[0].split()[-1]) for line in kernels] + [float(others[2])]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert ran.out.splitlines()[-1].startswith("next: qgraph explain ")
    models = folder / "tiny.onnx", folder / "tiny.int4.onnx"
    compared = qgraph("compare", *models, "--data", folder / "heldout.jsonl", "--samples", "2")
    assert compared.status == 0, compared.err
    assert "KL" in compared.out


def test_demo_may_be_run_again(qgraph: Command, tmp_path: Path) -> None:
    for _ in range(2):
        assert qgraph("demo", "--folder", tmp_path, "--int4-groups", "32").status == 0
    assert len(list(tmp_path.glob("*.data"))) == 2


def test_a_folder_that_cannot_be_written_is_2(qgraph: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = qgraph("demo", "--folder", tmp_path / "file")
    assert ran.status == 2
    assert "file" in ran.err
