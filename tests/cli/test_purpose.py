"""`qgraph optimize --for … --tune`: what is printed, planned, written and refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from qgraph import alone

Command = Callable[..., Any]
NODES = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("QGRAPH_CACHE", str(folder))
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of each linear: what is measured here decides nothing."""
    monkeypatch.setattr(alone, "MOST_COPIES", 1)


def nodes(graph: onnx.GraphProto) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in graph.node:
        found[node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += nodes(attribute.g)
    return found


def run(path: Path, rows: int) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(rows).standard_normal((rows, 128)).astype(np.float32)
    return session.run(["logits"], {"x": x})[0]


def narrow(path: Path) -> None:
    """`x → up → down → head`; 128 divides K of down and head, not the 96 of up."""
    rng = np.random.default_rng(0)
    shapes = {"up": (96, 128), "down": (128, 128), "head": (128, 96)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), f"{name}.weight")
        for name, shape in shapes.items()
    ]
    values = ["x", "up", "down", "y"]
    nodes = [
        helper.make_node("MatMul", [given, weight.name], [made], name)
        for given, weight, made, name in zip(values, weights, values[1:], shapes, strict=False)
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 96]) for name in "xy"
    ]
    graph = helper.make_graph(nodes, "narrow", ends[:1], ends[1:], weights)
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)


def test_both_by_rule(qgraph: Command, model: Path, tmp_path: Path) -> None:
    paths = {purpose: tmp_path / f"{purpose}.onnx" for purpose in ("decode", "prefill", "both")}
    for purpose, path in paths.items():
        ran = qgraph("optimize", model, "--for", purpose, "-o", path)
        assert ran.status == 0, ran.err
        assert f"for {purpose}" in ran.out.splitlines()[1]
        assert "goes by rule: nothing was measured here; --tune measures" in ran.out
    assert "5 × int8-pairs → from 8 rows MatMulIntegerToFloat" in ran.out
    ops = nodes(onnx.load(paths["both"], load_external_data=False).graph)
    assert (ops["MatMulNBits"], ops["MatMulIntegerToFloat"]) == (5, 5)
    assert ops["If"] == 1  # nothing but Relu lies between
    for rows, like in ((2, "decode"), (9, "prefill")):
        np.testing.assert_array_equal(run(paths["both"], rows), run(paths[like], rows))
    ran = qgraph("explain", paths["both"], "--format", "json")
    assert ran.status == 0, ran.err
    sites = json.loads(ran.out)["sites"]
    assert [site["name"] for site in sites] == list(NODES)
    assert all(site["by_rows"].startswith("from 8 rows") for site in sites)


def test_a_dry_run_shows_both_weights_and_their_size(
    qgraph: Command, model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "plan.json"
    ran = qgraph("optimize", model, "--for", "both", "--dry-run", "--report", report)
    assert ran.status == 0, ran.err
    decisions = json.loads(report.read_text("utf-8"))["decisions"]
    assert {item["many"]["format"] for item in decisions} == {"int8-pairs"}
    assert all("MB more" in item["detail"] for item in decisions)
    ran = qgraph("explain", report)
    assert ran.status == 0, ran.err
    assert "by rows of the activation: from 8 rows MatMulIntegerToFloat" in ran.out


@pytest.mark.parametrize("purpose", ["decode", "both"])
def test_a_group_that_was_adjusted_is_told_for_a_purpose_too(
    qgraph: Command, tmp_path: Path, purpose: str
) -> None:
    model, report, output = (tmp_path / name for name in ("m.onnx", "plan.json", "o.onnx"))
    narrow(model)
    words = "groups of 32: 128 does not divide K = 96"
    options = ("--int4-groups", "128", "--for", purpose, "--min-elements", "1")
    ran = qgraph("optimize", model, *options, "--dry-run", "--report", report)
    assert ran.status == 0, ran.err
    assert "1 × GROUP_ADJUSTED" in ran.out
    told = {d["site"]: d for d in json.loads(report.read_text("utf-8"))["decisions"]}
    assert told["up"]["reason"] == "GROUP_ADJUSTED"
    assert told["up"]["detail"].startswith(f"{words}; for {purpose}: by rule")
    assert told["down"]["reason"] is None
    ran = qgraph("optimize", model, *options, "-o", output, "--report", report)
    assert f"up: {words}; for {purpose}" in ran.out
    ran = qgraph("explain", output)
    assert f"up: {words}; for {purpose}" in ran.out


@pytest.mark.usefixtures("quick")
def test_tune_measures_keeps_and_says_what_it_found(
    qgraph: Command, model: Path, cache: Path
) -> None:
    options = ("--for", "prefill", "--tune", "--dry-run")
    ran = qgraph("optimize", model, *options)
    assert ran.status == 0, ran.err
    (path,) = (cache / "tune").iterdir()
    assert f"kept in {path}" in ran.err
    content = json.loads(path.read_text("utf-8"))
    sizes = {(item["n"], item["k"], item["rows"]) for item in content["measured"]}
    assert sizes == {(256, 128, 256), (128, 256, 256), (128, 128, 256)}
    assert ran.out.count(": at 256 rows") == 3
    ran = qgraph("optimize", model, *options)
    assert "tune: all times were known, 3 sizes" in ran.err


@pytest.mark.usefixtures("quick")
def test_a_table_of_another_machine_is_ignored_and_said_to_be(
    qgraph: Command, model: Path, cache: Path
) -> None:
    assert qgraph("optimize", model, "--for", "decode", "--tune", "--dry-run").status == 0
    (path,) = (cache / "tune").iterdir()
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, "cpu": "another"}), encoding="utf-8")
    ran = qgraph("optimize", model, "--for", "decode", "--dry-run")
    assert ran.status == 0, ran.err
    assert "are ignored: they are of another machine (another" in ran.out
    assert "goes by rule" in ran.out


@pytest.mark.parametrize(
    "options,words",
    [
        (("--for", "decoding"), "did you mean 'decode'"),
        (("--tune",), "add --for decode, prefill or both"),
        (("--for", "both", "--dequantize-at-load"), "contradict each other|there are none"),
    ],
)
def test_wrong_usage(qgraph: Command, model: Path, options: tuple[str, ...], words: str) -> None:
    ran = qgraph("optimize", model, *options)
    assert ran.status == 2
    assert any(word in ran.err for word in words.split("|"))


def test_a_recipe_file_may_say_it(qgraph: Command, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('purpose = "prefill"\n', encoding="utf-8")
    ran = qgraph("optimize", model, "--recipe", recipe, "--dry-run")
    assert ran.status == 0, ran.err
    assert "MatMulIntegerToFloat" in ran.out


def test_compare_says_which_way_its_sites_are(qgraph: Command, model: Path, tmp_path: Path) -> None:
    """Each sample is one row."""
    output, data = tmp_path / "both.onnx", tmp_path / "data.npz"
    assert qgraph("optimize", model, "--for", "both", "-o", output).status == 0
    np.savez(data, x=np.random.default_rng(0).standard_normal((9, 128)).astype(np.float32))
    ran = qgraph("compare", model, output, "--data", data)
    assert ran.status == 0, ran.err
    assert "note: " in ran.out and "these figures are of those that few rows run" in ran.out
    assert "--way many measures the others" in ran.out
    other = qgraph("compare", model, output, "--data", data, "--way", "many")
    assert other.status == 0 and "of those that many rows run" in other.out
    assert all(f"\n{site} " in ran.out for site in ("layers.0.up", "head"))
