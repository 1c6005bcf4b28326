"""`qgraph export` and `qgraph import` as a user types them: out of a float model and back in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command

pytest.importorskip("onnxruntime")


@pytest.fixture
def gptq(qgraph: Command, model: Path) -> Path:
    """The model's checkpoint."""
    folder = model.with_name("gptq")
    ran = qgraph("export", model, "--layout", "gptq", "--group", "32", "-o", folder, "-q")
    assert (ran.status, ran.out) == (0, "")
    return folder


def test_out_and_in_again(qgraph: Command, model: Path) -> None:
    folder = model.with_name("awq")
    ran = qgraph("export", model, "--layout", "awq", "--group", "64", "-o", folder)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert "awq: 5 quantized weights, 0 float tensors" in lines
    assert any(line.startswith(f"wrote {folder / 'model.safetensors'} (") for line in lines)
    assert lines[-1] == f"next: qgraph inspect {folder}"
    ran = qgraph("import", folder, model)
    out = model.with_name("model.imported.onnx")
    assert ran.status == 0
    assert "5 × uint4:group=64 → MatMulNBits bits=4 block=64 level=4" in ran.out
    assert "quantized 5/5 linears (100 %" in ran.out
    assert ran.out.splitlines()[-1] == f"next: qgraph explain {out} --profile"
    again = qgraph("export", out, "--layout", "gptq", "-o", model.with_name("out"))
    assert again.status == 0


def test_a_plan_and_a_report(qgraph: Command, model: Path, gptq: Path) -> None:
    report = model.with_name("plan.json")
    ran = qgraph("import", gptq, model, "--dry-run", "--report", report)
    assert ran.status == 0
    plan = json.loads(report.read_text())
    assert {item["solver"] for item in plan["decisions"]} == {"imported"}
    assert not model.with_name("model.imported.onnx").exists()
    assert qgraph("explain", report).status == 0


def test_bindings_and_other_targets(qgraph: Command, model: Path, gptq: Path) -> None:
    names = model.with_name("names.json")
    names.write_text(json.dumps({"head": None}))
    out = model.with_name("o.onnx")
    ran = qgraph("import", gptq, model, "--bindings", names, "-o", out, "--target", "qdq")
    assert ran.status == 0
    assert "quantized 4/5 linears" in ran.out
    assert "1 quantized parameter is read by no site: head.weight" in ran.out
    names.write_text(json.dumps({"haed": "head.weight"}))
    ran = qgraph("import", gptq, model, "--bindings", names, "-o", out)
    assert ran.status == 2
    assert "bindings: 'haed' is no linear or embedding of the graph" in ran.err
    assert "did you mean 'head'" in ran.err


def test_for_an_older_runtime(qgraph: Command, model: Path, gptq: Path) -> None:
    ran = qgraph("import", gptq, model, "--min-runtime", "1.20")
    assert ran.status == 0
    assert "note: runs on ONNX Runtime 1.20 and later" in ran.out
    ran = qgraph("import", gptq, model, "--min-runtime", "1.2x")
    assert ran.status == 2
    assert "min runtime '1.2x' is no version" in ran.err


def test_a_checkpoint_of_another_model(qgraph: Command, tied: Path, gptq: Path) -> None:
    ran = qgraph("import", gptq, tied)
    assert ran.status == 2
    assert "the checkpoint has no parameter for" in ran.err
    assert "--bindings FILE.json" in ran.err
    assert not tied.with_name("tied.imported.onnx").exists()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["nowhere", "m.onnx"], "nowhere is no file and no folder"),
        (["model.onnx", "model.onnx"], "model.onnx is no checkpoint"),
    ],
)
def test_what_is_no_checkpoint(
    qgraph: Command, model: Path, arguments: list[str], words: str
) -> None:
    ran = qgraph("import", *(model.with_name(name) for name in arguments))
    assert ran.status == 2
    assert words in ran.err


def test_the_input_is_never_overwritten(qgraph: Command, model: Path, gptq: Path) -> None:
    weights = gptq / "model.safetensors"
    before = weights.read_bytes()
    ran = qgraph("import", gptq, model, "-o", weights, "--force")
    assert ran.status == 2
    assert "is a file of the input" in ran.err
    assert weights.read_bytes() == before


def test_an_unknown_layout(qgraph: Command, model: Path) -> None:
    ran = qgraph("export", model, "--layout", "gtpq", "-o", model.with_name("x"))
    assert ran.status == 2
    assert "did you mean 'gptq'" in ran.err
