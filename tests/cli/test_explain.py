"""`qgraph explain`: of a model as exported, of an optimized one, of a run, of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qgraph import InputError, pipeline

Command = Callable[..., Any]


@pytest.fixture
def optimized(qgraph: Command, model: Path) -> Path:
    ran = qgraph("optimize", model, "--int4-groups", "64", "--exclude", "head", "--quiet")
    assert ran.status == 0, ran.err
    return model.with_name("model.int4.onnx")


def test_a_float_model(qgraph: Command, model: Path) -> None:
    ran = qgraph("explain", model)
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("model.onnx · target ort-cpu")
    assert lines[1].startswith("quantized 0/5 linears")
    assert [line.split()[0] for line in lines if " float " in line and "×" in line] == [
        "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head",
    ]  # fmt: skip


def test_an_optimized_model_as_json(qgraph: Command, optimized: Path) -> None:
    ran = qgraph("explain", optimized, "--format", "json")
    assert ran.status == 0, ran.err
    data = json.loads(ran.out)
    assert data["source"] == "file"
    assert (data["totals"]["linears"], data["totals"]["linears_fused"]) == (5, 4)
    sites = {site["name"]: site for site in data["sites"]}
    up = sites["layers.0.up"]
    assert (up["state"], up["bits"], up["block"], up["level"]) == ("fused", 4, 64, 4)
    assert (up["op"], up["op_now"]) == ("MatMul", "com.microsoft::MatMulNBits")
    assert (up["n"], up["k"], up["weight"]) == (256, 128, "layers.0.up.weight")
    assert 0 < up["error"] < 0.2
    assert sites["layers.1.down"]["op"] == "Gemm"
    assert (sites["head"]["state"], sites["head"]["reason"]) == ("float", "EXCLUDED")
    assert sites["head"]["hint"]


def test_the_table_ends_with_why(qgraph: Command, optimized: Path) -> None:
    ran = qgraph("explain", optimized)
    tail = ran.out[ran.out.index("not fused, and why") :]
    assert "1 × EXCLUDED" in tail
    assert "head" in tail
    assert "layers" not in tail


def test_a_profile_shows_what_really_ran(qgraph: Command, optimized: Path) -> None:
    ran = qgraph("explain", optimized, "--profile", "--format", "json")
    assert ran.status == 0, ran.err
    data = json.loads(ran.out)
    assert data["source"] == "run"
    fused = [site for site in data["sites"] if site["state"] == "fused"]
    assert len(fused) == 4
    assert all(site["ran"] and site["time_us"] > 0 for site in fused)
    (kernel,) = [row for row in data["kernels"] if row["origin"] == "ran"]
    assert (kernel["sites"], kernel["provider"]) == (4, "CPUExecutionProvider")
    (proof,) = data["level_proofs"]
    assert (proof["bits"], proof["block"], proof["int8_compute"]) == (4, 64, True)
    assert 1e-4 < proof["difference"] < 0.05
    assert {row["op"] for row in data["other_ops"]} >= {"Relu"}


def test_a_profile_as_a_table(qgraph: Command, optimized: Path) -> None:
    ran = qgraph("explain", optimized, "--profile")
    assert ran.status == 0, ran.err
    assert "CPUExecutionProvider (ran)" in ran.out
    assert "int8 compute" in ran.out


def test_a_profile_says_of_how_many_rows_it_is_and_what_stands_beside(
    qgraph: Command, model: Path, optimized: Path
) -> None:
    ran = qgraph("explain", optimized, "--profile", "--rows", "3", "--against", model)
    assert ran.status == 0, ran.err
    first = ran.out.splitlines()[0]
    assert "measured on 3 rows (" in first
    assert "median of 10 runs: " in first
    assert f"{model.name} beside " in first
    ran = qgraph(
        "explain", optimized, "--profile", "--rows", "3", "--against", model, "--format", "json"
    )
    data = json.loads(ran.out)
    assert (data["run"]["rows"], data["run"]["against"]) == (3, model.name)
    assert all(site["against_us"] > 0 for site in data["sites"])
    whole = sum(row["microseconds"] for row in (*data["kernels"], *data["other_ops"]))
    floats = sum(site["time_us"] for site in data["sites"] if not site["kernel"])
    assert whole + floats == pytest.approx(data["total_us"])


@pytest.mark.parametrize("options", [("--rows", "3"), ("--against", "m.onnx")])
def test_what_is_of_a_run_wants_one(qgraph: Command, model: Path, options: tuple[str, ...]) -> None:
    ran = qgraph("explain", model, *options)
    assert ran.status == 2
    assert ran.err == f"error: {options[0]} is of a run of the model: add --profile\n"


def test_the_library_asks_for_a_run_in_its_own_words(model: Path) -> None:
    with pytest.raises(InputError, match=r"add profile=True \(--profile\)"):
        pipeline.explain(model, rows=3)


def test_one_node(qgraph: Command, optimized: Path) -> None:
    ran = qgraph("explain", optimized, "--node", "*.1.down")
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[0] == "layers.1.down"
    assert "accuracy level 4" in ran.out
    assert "layers.0" not in ran.out
    ran = qgraph("explain", optimized, "--node", "*.1.down", "--format", "json")
    assert [site["name"] for site in json.loads(ran.out)["sites"]] == ["layers.1.down"]
    ran = qgraph("explain", optimized, "--node", "last:1", "--format", "json")
    assert {site["name"].split(".")[1] for site in json.loads(ran.out)["sites"]} == {"1"}
    ran = qgraph("explain", optimized, "--node", "layers.1.dawn")
    assert ran.status == 2
    assert "did you mean 'layers.1.down'" in ran.err


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "qdq"])
def test_targets(qgraph: Command, model: Path, target: str) -> None:
    ran = qgraph("explain", model, "--target", target)
    assert ran.status == 0, ran.err
    assert f"target {target}" in ran.out.splitlines()[0]


def test_the_target_of_the_file_is_the_default(qgraph: Command, model: Path) -> None:
    assert qgraph("optimize", model, "--format", "int4", "--target", "qdq", "-q").status == 0
    ran = qgraph("explain", model.with_name("model.int4.onnx"), "--format", "json")
    data = json.loads(ran.out)
    assert data["target"] == "qdq"
    assert {site["state"] for site in data["sites"]} == {"qdq"}
    assert data["totals"]["linears_quantized"] == 5


def test_a_plan(qgraph: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ran = qgraph("optimize", model, "--dry-run", "--report", path, "--int4-groups", "row")
    assert ran.status == 0, ran.err
    ran = qgraph("explain", path, "--format", "json")
    assert ran.status == 0, ran.err
    data = json.loads(ran.out)
    assert data["source"] == "plan"
    assert data["summary"].startswith("would quantize 5/5 linears")
    (up,) = [site for site in data["sites"] if site["name"] == "layers.0.up"]
    assert (up["state"], up["bits"], up["group"], up["block"]) == ("planned", 4, 0, 128)
    assert "planned; nothing was written" in qgraph("explain", path).out


@pytest.mark.parametrize("content,words", [
    ("{}", "holds no plan"),
    ("[]", "holds no plan"),
    ("{", "plan.json"),
    ("[" * 100_000, "plan.json"),
    ('{"kind": "plan", "decisions": [{}], "target": "t", "runtime": "r"}', "damaged"),
    ('{"kind": "plan"}', "damaged"),
    ('{"kind": "plan", "decisions": 3, "target": "t", "runtime": "r"}', "damaged"),
])  # fmt: skip
def test_what_is_no_plan_is_2(qgraph: Command, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    ran = qgraph("explain", path)
    assert ran.status == 2
    assert words in ran.err


def test_a_plan_cannot_be_profiled_nor_change_its_target(
    qgraph: Command, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    assert qgraph("optimize", model, "--dry-run", "--report", path, "-q").status == 0
    assert qgraph("explain", path, "--profile").status == 2
    ran = qgraph("explain", path, "--target", "qdq")
    assert ran.status == 2
    assert "--target qdq" in ran.err


def test_explaining_changes_nothing(qgraph: Command, optimized: Path) -> None:
    before = {p.name: p.read_bytes() for p in optimized.parent.iterdir()}
    qgraph("explain", optimized, "--profile")
    assert {p.name: p.read_bytes() for p in optimized.parent.iterdir()} == before
