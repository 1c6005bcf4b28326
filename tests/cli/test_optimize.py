"""`qgraph optimize` end to end, option by option, on a small model."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import qgraph as package
from qgraph import check, making

Command = Callable[..., Any]
LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")


def ops(path: Path) -> dict[str, int]:
    """How often each op type stands in a model's main graph."""
    counts: dict[str, int] = {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def attributes(path: Path, name: str) -> dict[str, Any]:
    """The attributes of the node `name`."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    (node,) = [node for node in nodes if node.name == name]
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def run(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x}), strict=True))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_main_job(qgraph: Command, model: Path) -> None:
    before = model.read_bytes()
    ran = qgraph("optimize", model, "--int4-groups", "128")
    assert ran.status == 0, ran.err
    output = model.with_name("model.int4.onnx")
    assert ops(output) == {"MatMulNBits": 5, "Relu": 2, "Transpose": 1, "MatMul": 1}
    shape = attributes(output, "layers.0.up")
    assert (shape["bits"], shape["block_size"], shape["accuracy_level"]) == (4, 128, 4)
    assert model.read_bytes() == before
    float_logits, logits = run(model)["logits"], run(output)["logits"]
    error = np.linalg.norm(logits - float_logits) / np.linalg.norm(float_logits)
    assert 0.01 < error < 0.3


def test_it_prints_configuration_stages_coverage_files_and_the_next_step(
    qgraph: Command, model: Path
) -> None:
    ran = qgraph("optimize", model, "--int4-groups", "128")
    out = ran.out.splitlines()
    assert out[0] == f"qgraph {package.__version__}: {model} → {model.with_name('model.int4.onnx')}"
    for words in ("group 128", "solver rtn", "target ort-cpu", "accuracy level auto", "check on"):
        assert words in out[1]
    (coverage,) = [line for line in out if line.startswith("quantized ")]
    assert coverage.startswith("quantized 5/5 linears (100 % of linear weight bytes)")
    assert "    5 × uint4:group=128 → MatMulNBits bits=4 block=128 level=4" in out
    written = [line.split(" (")[0].removeprefix("wrote ") for line in out if "wrote " in line]
    assert {Path(path).name for path in written} == files(model.parent) - {"model.onnx"}
    result = model.with_name("model.int4.onnx")
    assert out[-1] == f"next: qgraph explain {result} --profile --against {model}"
    stages = [line.split(":")[0].split(" (")[0] for line in ran.err.splitlines()]
    assert stages[:2] == ["capture", "plan"]
    assert all(line.endswith(" s)") for line in ran.err.splitlines())


def test_the_heading_says_what_is_not_as_by_default(
    qgraph: Command, model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('activations = "int8-row"\n', encoding="utf-8")
    ran = qgraph(
        "optimize", model, "--dry-run", "--outliers", "2", "--recipe", recipe,
        "--set", "*.up=activations=int8", "--no-fuse",
    )  # fmt: skip
    head = "\n".join(ran.out.splitlines()[1:5])
    for words in ("activations int8-row", "outliers 2", "fuse no", f"recipe {recipe}"):
        assert words in head
    assert "set *.up=activations=int8" in head
    assert ran.status == 2
    assert "--outliers takes calibration data" in ran.err
    plain = qgraph("optimize", model, "--dry-run").out.splitlines()[1]
    for words in ("activations", "outliers", "fuse", "prefer", "unfused", "for "):
        assert words not in plain


def test_what_was_refused_is_printed_with_its_way_out(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--min-elements", "20000")
    assert ran.status == 0
    assert "WEIGHT_TOO_SMALL" in ran.out
    assert "head" in ran.out
    assert "lower --min-elements" in ran.out
    assert ops(model.with_name("model.int4.onnx"))["MatMulNBits"] == 4


@pytest.mark.parametrize("group,block", [("16", 16), ("64", 64), ("256", 256), ("row", 128)])
def test_groups(qgraph: Command, model: Path, group: str, block: int) -> None:
    ran = qgraph("optimize", model, "--int4-groups", group)
    assert ran.status == 0, ran.err
    assert attributes(model.with_name("model.int4.onnx"), "layers.0.down")["block_size"] == block


@pytest.mark.parametrize("name,bits", [("int4", 4), ("uint4", 4), ("int8", 8), ("uint8", 8),
                                       ("int2", 2), ("uint2", 2)])  # fmt: skip
def test_formats(qgraph: Command, model: Path, name: str, bits: int) -> None:
    ran = qgraph("optimize", model, "--format", name, "--group", "32")
    assert ran.status == 0, ran.err
    output = model.with_name(f"model.{name}.onnx")
    assert attributes(output, "head")["bits"] == bits
    weights = {t.name for t in onnx.load(output, load_external_data=False).graph.initializer}
    assert not weights & {"head.weight", "layers.0.up.weight"}


def test_set_include_exclude(qgraph: Command, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "mixed.onnx"
    ran = qgraph(
        "optimize", model, "-o", output, "--format", "int4:group=32",
        "--set", "first:1=int8:group=64", "--set", "*.down=float", "--exclude", "head.weight",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert ops(output) == {"MatMulNBits": 2, "Gemm": 2, "MatMul": 2, "Relu": 2, "Transpose": 1}
    assert attributes(output, "layers.0.up")["bits"] == 8
    assert attributes(output, "layers.1.up")["bits"] == 4
    ran = qgraph("optimize", model, "-o", output, "--include", "layers.1.*", "--force")
    assert ops(output)["MatMulNBits"] == 2
    assert "include layers.1.*" in ran.out


@pytest.mark.parametrize("embedding,embed_bits,head_bits", [
    ("int4", 4, 4), ("uint8:group=32", 8, 8), ("float", None, None),
])  # fmt: skip
def test_embedding_decides_for_the_tied_head(
    qgraph: Command, tied: Path, embedding: str, embed_bits: int | None, head_bits: int | None
) -> None:
    ran = qgraph("optimize", tied, "--format", "int8", "--group", "32", "--embedding", embedding)
    assert ran.status == 0, ran.err
    output = tied.with_name("tied.int8.onnx")
    assert attributes(output, "embed").get("bits") == embed_bits
    assert attributes(output, "head").get("bits") == head_bits
    assert attributes(output, "fc")["bits"] == 8


def test_a_head_apart_from_its_table_says_what_it_costs(qgraph: Command, tied: Path) -> None:
    ran = qgraph("optimize", tied, "--embedding", "int8", "--set", "head=int4:group=32")
    assert ran.status == 0, ran.err
    output = tied.with_name("tied.int4.onnx")
    assert attributes(output, "embed")["bits"] == 8
    assert attributes(output, "head")["bits"] == 4
    assert "SEPARATE_COPY" in ran.out


def test_a_selector_that_matches_nothing_names_the_nearest(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--exclude", "layer.0.up")
    assert ran.status == 2
    assert "'layers.0.up'" in ran.err
    assert files(model.parent) == {"model.onnx"}


@pytest.mark.parametrize(
    "key, words",
    [
        ("target", "give --target on the command line"),
        ("min_coverage", "give --min-coverage on the command line"),
        ("for", "--for is called 'purpose' here"),
        ("target_bit", "did you mean 'target_bits'"),
    ],
)
def test_what_a_recipe_does_not_hold_is_told(
    qgraph: Command, model: Path, tmp_path: Path, key: str, words: str
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'{key} = "x"\n', encoding="utf-8")
    ran = qgraph("optimize", model, "--recipe", recipe)
    assert ran.status == 2
    assert words in ran.err


def test_recipe_file_and_options_on_top(qgraph: Command, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('format = "int8"\ngroup = 64\n[[set]]\nselector = "head"\nformat = "float"\n')
    assert qgraph("optimize", model, "--recipe", recipe).status == 0
    output = model.with_name("model.int8.onnx")
    assert ops(output)["MatMulNBits"] == 4
    assert attributes(output, "layers.0.up")["block_size"] == 64
    ran = qgraph("optimize", model, "--recipe", recipe, "--group", "32", "--force")
    assert ran.status == 0, ran.err
    assert attributes(output, "layers.0.up")["block_size"] == 32


@pytest.mark.parametrize("level", ["0", "4"])
def test_accuracy_level(qgraph: Command, model: Path, level: str) -> None:
    ran = qgraph("optimize", model, "--accuracy-level", level)
    assert ran.status == 0, ran.err
    found = attributes(model.with_name("model.int4.onnx"), "head").get("accuracy_level", 0)
    assert found == int(level)


def test_target_qdq_is_portable(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--format", "int4", "--group", "32", "--target", "qdq")
    assert ran.status == 0, ran.err
    counts = ops(model.with_name("model.int4.onnx"))
    assert counts["DequantizeLinear"] == 5
    assert "MatMulNBits" not in counts


def test_target_cuda_is_predicted_where_it_is_not_installed(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--format", "int4", "--target", "ort-cuda", "--no-check")
    assert ran.status == 0, ran.err
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert "predicted" in ran.out
    assert ops(model.with_name("model.int4.onnx"))["MatMulNBits"] == 5


def test_dry_run_writes_nothing_but_the_plan(qgraph: Command, model: Path, tmp_path: Path) -> None:
    ran = qgraph("optimize", model, "--dry-run")
    assert ran.status == 0, ran.err
    assert files(model.parent) == {"model.onnx"}
    assert "5  MatMulNBits bits=4" in ran.out
    plan = tmp_path / "plan.json"
    ran = qgraph("optimize", model, "--dry-run", "--report", plan, "--exclude", "head")
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1] == f"next: qgraph explain {plan}"
    data = json.loads(plan.read_text())
    assert (data["schema"], data["kind"]) == (1, "plan")
    formats = {item["site"]: item["format"] for item in data["decisions"]}
    assert {site for site, spelled in formats.items() if spelled} == set(LINEARS[:4])


def test_report_holds_steps_and_totals(qgraph: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert qgraph("optimize", model, "--report", path, "--int4-groups", "64").status == 0
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert set(data) == {"schema", "configuration", "steps", "notes", "totals"}
    assert {step["site"] for step in data["steps"] if step["outcome"] == "done"} >= set(LINEARS)
    assert data["totals"]["linears_quantized"] == 5
    assert data["totals"]["bytes_before"] > 4 * data["totals"]["bytes_after"]
    assert sum(data["totals"]["kernels"].values()) == 5


def test_single_file(qgraph: Command, model: Path) -> None:
    assert qgraph("optimize", model, "--single-file").status == 0
    assert files(model.parent) == {"model.onnx", "model.int4.onnx"}
    assert run(model.with_name("model.int4.onnx"))["logits"].shape == (3, 128)


def test_an_output_that_exists_wants_force(qgraph: Command, model: Path) -> None:
    output = model.with_name("model.int4.onnx")
    output.write_bytes(b"mine")
    ran = qgraph("optimize", model)
    assert ran.status == 2
    assert "--force" in ran.err
    assert output.read_bytes() == b"mine"
    assert qgraph("optimize", model, "--force").status == 0
    assert ops(output)["MatMulNBits"] == 5


@pytest.mark.parametrize("name", ["folder", "folder/"])
def test_a_folder_gets_the_default_name(qgraph: Command, model: Path, name: str) -> None:
    folder = model.parent / "folder"
    folder.mkdir()
    ran = qgraph("optimize", model, "-o", f"{model.parent}/{name}", "--single-file")
    assert ran.status == 0, ran.err
    assert files(folder) == {"model.int4.onnx"}
    assert files(model.parent) == {"model.onnx", "folder"}


@pytest.mark.parametrize("output,words", [("none/", "there is no folder"), ("", "wanted")])
def test_a_folder_that_is_not_there_is_never_a_file(
    qgraph: Command, model: Path, monkeypatch: pytest.MonkeyPatch, output: str, words: str
) -> None:
    monkeypatch.chdir(model.parent)
    ran = qgraph("optimize", model, "-o", output)
    assert ran.status == 2
    assert words in ran.err
    assert files(model.parent) == {"model.onnx"}


def test_a_calibrated_plan_predicts_time_and_memory(qgraph: Command, model: Path) -> None:
    plain = qgraph("optimize", model, "--dry-run")
    assert "prediction" not in plain.out + plain.err
    ran = qgraph("optimize", model, "--dry-run", "--solver", "gptq", "--samples", "4")
    assert ran.status == 2, "as the run itself would be, without data"
    assert "the solver gptq needs calibration data: --calibrate FILE" in ran.err
    assert "would quantize 5/5 linears" in ran.out
    (line,) = [line for line in ran.out.splitlines() if line.startswith("prediction: ")]
    shape = r"prediction: about \d+ s and \d+ MB of memory at the peak, for at most 2048 tokens"
    assert re.fullmatch(shape, line)
    assert "prediction" not in qgraph("optimize", model, "--dry-run", "--solver", "gptq", "-q").out


def test_the_input_is_never_the_output(qgraph: Command, model: Path) -> None:
    before = model.read_bytes()
    assert qgraph("optimize", model, "-o", model, "--force").status == 2
    assert model.read_bytes() == before


def test_quiet_prints_the_coverage_line_only(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--quiet")
    assert len(ran.out.splitlines()) == 1
    assert ran.out.startswith("quantized 5/5 linears")
    assert ran.err == ""


def test_coverage_below_the_minimum_is_3(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--exclude", "layers.*", "--min-coverage", "0.95")
    assert ran.status == 3
    assert "--min-coverage" in ran.err
    assert files(model.parent) == {"model.onnx"}


def test_nothing_quantized_is_3(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--exclude", "*")
    assert ran.status == 3
    assert "nothing was quantized" in ran.err
    assert files(model.parent) == {"model.onnx"}


def test_a_wrong_weight_is_named_and_nothing_written(qgraph: Command, model: Path) -> None:
    proto = onnx.load(model)
    (weight,) = [t for t in proto.graph.initializer if t.name == "head.weight"]
    values = onnx.numpy_helper.to_array(weight).copy()
    values[3, 5] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "head.weight"))
    onnx.save(proto, model)
    ran = qgraph("optimize", model)
    assert ran.status == 2
    assert "head.weight" in ran.err
    assert "--exclude" in ran.err
    assert files(model.parent) == {"model.onnx"}
    assert qgraph("optimize", model, "--exclude", "head").status == 0


@pytest.mark.parametrize("arguments,words", [
    (("--group", "100"), "power of two"),
    (("--format", "int44"), "did you mean 'int4'"),
    (("--format", "int4:grup=32"), "did you mean 'group'"),
    (("--option", "quantize_rtm.x=1"), "did you mean 'quantize_rtn'"),
    (("--option", "cleanup.nothing=1"), "nothing"),
    (("--embedding", "int9"), "int"),
    (("--recipe", "none.toml"), "none.toml"),
    (("-o", "no/such/folder/m.onnx"), "folder"),
    (("--report", "no/such/folder/r.json"), "no/such/folder/r.json"),
    (("--accuracy-level", "0", "--option", "lower_matmul_nbits.accuracy_level=4"), "contradict"),
])  # fmt: skip
def test_bad_values_are_2_and_write_nothing(
    qgraph: Command, model: Path, arguments: tuple[str, ...], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(model.parent)
    ran = qgraph("optimize", model, *arguments)
    assert ran.status == 2
    assert words in ran.err
    assert files(model.parent) == {"model.onnx"}


def test_python_and_command_line_write_the_same_bytes(qgraph: Command, model: Path) -> None:
    one, two = model.with_name("a.onnx"), model.with_name("b.onnx")
    assert qgraph("optimize", model, "-o", one, "--int4-groups", "64", "--single-file").status == 0
    package.optimize(model, two, group=64, single_file=True)
    assert one.read_bytes() == two.read_bytes()


def failing_at_level_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the check find every level-4 kernel wrong."""
    real = check.check_model

    def checked(*arguments: Any) -> list[check.SiteCheck]:
        return [
            dataclasses.replace(item, ok=False, code="LEVEL_FAILED_CHECK", detail="by the test")
            if item.kernel_key.level == 4
            else item
            for item in real(*arguments)
        ]

    monkeypatch.setattr(making, "check_model", checked)


def test_a_failed_check_takes_the_next_kernel_and_says_so(
    qgraph: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at_level_4(monkeypatch)
    ran = qgraph("optimize", model, "--int4-groups", "32")
    assert ran.status == 0, ran.err
    assert "5 × otherwise than planned, LEVEL_FAILED_CHECK" in ran.out
    assert ran.out.count("LEVEL_FAILED_CHECK") == ran.out.count("--accuracy-level 0 avoids") == 1
    assert "    5 × uint4:group=32 → MatMulNBits bits=4 block=32 level=0" in ran.out.splitlines()
    assert attributes(model.with_name("model.int4.onnx"), "head").get("accuracy_level", 0) == 0


def test_a_failed_check_is_4_with_strict_and_writes_nothing(
    qgraph: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at_level_4(monkeypatch)
    ran = qgraph("optimize", model, "--strict")
    assert ran.status == 4
    assert "by the test" in ran.err
    assert files(model.parent) == {"model.onnx"}
    assert qgraph("optimize", model, "--no-check").status == 0


def test_an_option_reaches_its_pass(qgraph: Command, model: Path) -> None:
    ran = qgraph("optimize", model, "--option", "lower_matmul_nbits.accuracy_level=0")
    assert ran.status == 0, ran.err
    output = model.with_name("model.int4.onnx")
    assert attributes(output, "head").get("accuracy_level", 0) == 0
