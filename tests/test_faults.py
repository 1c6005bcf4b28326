"""Faults that were found by attacking whole runs; each stands for its kind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from one_matmul import MATMUL, save, weight
from onnx import helper, numpy_helper

import qgraph
from qgraph.formats.base import parse
from qgraph.lost_weights import LOST
from qgraph.runtimes.ort import OrtRuntime


def run(path: Path, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(dtype)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("target", ["ort-cpu", "qdq"])
@pytest.mark.parametrize("rows", [64, 40])
def test_a_fused_matmul_that_transposes_its_weight(tmp_path: Path, target: str, rows: int) -> None:
    node = helper.make_node(
        "FusedMatMul", ["x", "w"], ["y"], "mm", domain="com.microsoft", transB=1
    )
    source = save(tmp_path / "m.onnx", node, weight(rows, 64))
    qgraph.optimize(
        source, tmp_path / "o.onnx", target=target, format="int4", group=32, accuracy_level=0
    )
    expected, got = run(source), run(tmp_path / "o.onnx")
    assert np.abs(got - expected).max() < 0.03 * np.abs(expected).max()


def test_whole_rows_of_2_bits_are_not_spelled_in_a_way_that_is_misread(tmp_path: Path) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(40, 64, "uint2:group=row").T.copy())
    with pytest.raises(qgraph.CoverageError, match="BLOCK_UNSUPPORTED"):
        qgraph.optimize(source, tmp_path / "o.onnx", target="qdq", format="uint2", group="row")


def test_a_float16_weight_whose_scales_underflow_stays_float(tmp_path: Path) -> None:
    tiny = (weight(24, 64).T * 1e-6).astype(np.float16)
    more = [helper.make_node("Identity", ["y"], ["z"], "out")]
    source = save(tmp_path / "m.onnx", MATMUL, tiny, more)
    with pytest.raises(qgraph.CoverageError, match="WEIGHT_LOST"):
        qgraph.optimize(source, tmp_path / "o.onnx", format="int4", group=32)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("format_", ["fp8-e4m3", "fp8-e5m2"])
def test_a_float16_weight_that_is_rounded_beyond_float16_stays_float(
    tmp_path: Path, format_: str
) -> None:
    """65504 is 448 times 146.2, and with that scale in float16, 146.25, it reads back as 65520."""
    top = np.full((64, 24), 65504, np.float16)
    more = [helper.make_node("Identity", ["y"], ["z"], "out")]
    source = save(tmp_path / "m.onnx", MATMUL, top, more)
    with pytest.raises(
        qgraph.CoverageError, match=r"WEIGHT_LOST \(.*become 655\d\d, and float16 ends at 65504"
    ):
        qgraph.optimize(source, tmp_path / "o.onnx", format=format_)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("options", [{}, {"format": "int8", "accuracy_level": 0}])
def test_a_portable_site_that_misses_its_check_ends_as_float(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OrtRuntime.run
    monkeypatch.setattr(
        OrtRuntime, "run",
        lambda *given: [{k: v * np.nan for k, v in found.items()} for found in right(*given)],
    )  # fmt: skip
    source = save(tmp_path / "m.onnx", MATMUL, weight(24, 64).T.copy())
    with pytest.raises(qgraph.CoverageError, match="FAILED_CHECK"):
        qgraph.optimize(source, tmp_path / "o.onnx", unfused="portable", **options)


@pytest.mark.parametrize(
    ("dtype", "alpha", "offered"), [(np.float16, 100.0, True), (np.float32, 1.0, False)]
)
def test_a_way_out_is_not_the_type_that_the_model_has(
    tmp_path: Path, dtype: Any, alpha: float, offered: bool
) -> None:
    top = np.finfo(dtype).max
    huge = np.zeros((64, 64), dtype)
    huge[0, 3], huge[1, 3] = top, -top
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "mm", alpha=alpha)
    more = [helper.make_node("Identity", ["y"], ["z"], "out")]
    source = save(tmp_path / "m.onnx", node, huge, more)
    with pytest.raises(qgraph.InputError, match="its scale does not fit") as caught:
        qgraph.optimize(source, tmp_path / "o.onnx", format="uint4", group=32, accuracy_level=0)
    assert "--exclude 'w'" in str(caught.value)
    assert ("convert the model to float32" in str(caught.value)) == offered


def test_weights_may_be_far_off_where_their_outputs_are_not(tmp_path: Path) -> None:
    """At 2 bits gptq gives up the weights' own error for that of the outputs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 20)) @ rng.standard_normal((20, 64))
    x = (x + 0.01 * rng.standard_normal(x.shape)).astype(np.float32)
    source = save(tmp_path / "m.onnx", MATMUL, rng.standard_normal((64, 48)).astype(np.float32))
    result = qgraph.optimize(
        source, tmp_path / "o.onnx", format="int2:group=32", solver="gptq", calibrate=[{"x": x}],
        accuracy_level=0,
    )  # fmt: skip
    (step,) = [step for step in result.report.steps if step.pass_name == "solve"]
    assert step.error is not None
    assert step.error > LOST
    y, wanted = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (tmp_path / "o.onnx", source)
    )
    assert np.linalg.norm(y - wanted) < 0.5 * np.linalg.norm(wanted)


def test_outputs_that_are_lost_are_refused_whatever_the_solver(tmp_path: Path) -> None:
    """Scales below float16's normal numbers: the codes are all but zero."""
    rng = np.random.default_rng(0)
    tiny = (rng.standard_normal((64, 24)) * 1e-6).astype(np.float16)
    more = [helper.make_node("Identity", ["y"], ["z"], "out")]
    source = save(tmp_path / "m.onnx", MATMUL, tiny, more)
    x = rng.standard_normal((300, 64)).astype(np.float16)
    with pytest.raises(qgraph.CoverageError, match="WEIGHT_LOST"):
        qgraph.optimize(
            source, tmp_path / "o.onnx", format="int4:group=32", solver="gptq", calibrate=[{"x": x}]
        )
    assert not (tmp_path / "o.onnx").exists()


def test_a_data_file_that_another_model_names_is_kept(tmp_path: Path) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    qgraph.optimize(source, tmp_path / "o")
    qgraph.optimize(source, tmp_path / "o.onnx")
    qgraph.optimize(source, tmp_path / "o", format="int8")
    assert np.isfinite(run(tmp_path / "o.onnx")).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, False),
        ({"format": "fp8-e4m3"}, False),
        ({"format": "int8:group=32"}, True),
        ({"activations": "int8-row"}, True),
        ({"format": "fp8-e4m3", "solver": "hqq"}, True),
    ],
)
def test_quantized_weights_that_stay_as_they_are_are_told(
    tmp_path: Path, options: dict[str, Any], told: bool
) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    qgraph.optimize(source, tmp_path / "q.onnx", format="fp8-e4m3")
    result = qgraph.optimize(tmp_path / "q.onnx", tmp_path / "o.onnx", **options)
    assert [item.format for item in result.plan.decisions] == ["fp8-e4m3"]
    assert any("codes (fp8-e4m3), whatever" in note for note in result.report.notes) == told


@pytest.mark.parametrize("fmt", ["int4:group=32", "mxfp8"])
def test_packed_weights_become_no_floats_at_load(tmp_path: Path, fmt: str) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    qgraph.optimize(source, tmp_path / "q.onnx", format=fmt)
    result = qgraph.optimize(tmp_path / "q.onnx", tmp_path / "o.onnx", dequantize_at_load=True)
    assert [item.kernel for item in result.plan.decisions] != ["DequantizeAtLoad"]
    (note,) = [note for note in result.report.notes if "at load" in note or "is loaded" in note]
    assert note.startswith("0 linears become floats")


def test_weights_that_are_no_linears_are_told(tmp_path: Path) -> None:
    node = helper.make_node("Einsum", ["x", "w"], ["y"], "es", equation="bk,kn->bn")
    source = save(tmp_path / "m.onnx", node, weight(64, 64))
    with pytest.raises(qgraph.CoverageError):
        qgraph.optimize(source, tmp_path / "o.onnx")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "mm")
    both = onnx.load(save(tmp_path / "b.onnx", node, weight(64, 64)))
    both.graph.initializer.append(numpy_helper.from_array(weight(64, 64), "e"))
    both.graph.node.append(
        helper.make_node("Einsum", ["y", "e"], ["z"], "es", equation="bk,kn->bn")
    )
    both.graph.output[0].name = "z"
    onnx.save(both, tmp_path / "b.onnx")
    result = qgraph.optimize(tmp_path / "b.onnx", tmp_path / "o.onnx")
    assert any("Einsum 0.0 MB" in note for note in result.report.notes)


def test_the_data_file_holds_what_the_model_reads_and_no_more(tmp_path: Path) -> None:
    """Of a weight that was packed no float stays behind, and one that is kept is not cut."""
    more = [helper.make_node("MatMul", ["y", "w2"], ["z"], "mm2")]
    source = onnx.load(save(tmp_path / "m.onnx", MATMUL, weight(64, 64), more))
    source.graph.initializer.append(numpy_helper.from_array(weight(64, 64) + 1, "w2"))
    onnx.save(source, tmp_path / "m.onnx")
    result = qgraph.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", exclude="mm2")
    made = onnx.load(tmp_path / "o.onnx", load_external_data=False)
    stored = [
        {entry.key: entry.value for entry in tensor.external_data}
        for tensor in made.graph.initializer
        if tensor.external_data
    ]
    assert stored
    assert result.files[1].name == stored[0]["location"]
    ends = sorted((int(each["offset"]), int(each["length"])) for each in stored)
    at = 0
    for offset, length in ends:
        assert 0 <= offset - at < 64
        at = offset + length
    assert result.files[1].stat().st_size == at
    assert {tensor.name for tensor in made.graph.initializer} >= {"w.codes", "w2"}
    assert "w" not in {tensor.name for tensor in made.graph.initializer}


@pytest.mark.parametrize("options", [{"accuracy_level": "0"}, {}])
def test_a_kernel_slower_than_float_says_so(tmp_path: Path, options: dict[str, Any]) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    result = qgraph.optimize(source, tmp_path / "o.onnx", format="int8:group=32", **options)
    reason = "SLOWER_THAN_FLOAT" if options else None
    assert [item.reason for item in result.plan.decisions] == [reason]
    (row,) = qgraph.explain(tmp_path / "o.onnx").sites
    assert (row.reason, row.origin) == (reason, "installed")


def test_foreign_kernels_without_a_level_are_told(tmp_path: Path) -> None:
    """A quantizer that sets no accuracy level leaves int8 compute out; who asked for it knows."""
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    for level, told in (("0", True), ("4", False)):
        made = tmp_path / f"{level}.onnx"
        qgraph.optimize(source, made, format="int4:group=32", accuracy_level=level)
        assert qgraph.explain(made).notes == ()
        model = onnx.load(made)
        del model.metadata_props[:]
        onnx.save(model, made)
        notes = qgraph.explain(made).notes
        assert any("without int8 compute" in note and "as mm" in note for note in notes) == told


MALFORMED = [
    helper.make_node("MatMul", [], ["y"], "bad"),
    helper.make_node("MatMul", ["x"], ["y"], "bad"),
    helper.make_node("MatMulNBits", ["x"], ["y"], "bad", domain="com.microsoft", K="s"),
    helper.make_node(
        "GatherBlockQuantized", ["w", "x", "w"], ["y"], "bad", domain="com.microsoft", bits=0
    ),
    helper.make_node("Gather", ["w"], ["y"], "bad"),
    helper.make_node("Identity", ["x", "w"], [], "bad"),
]  # fmt: skip


@pytest.mark.parametrize("node", MALFORMED, ids=lambda node: node.op_type)
def test_malformed_nodes_are_input_errors(tmp_path: Path, node: onnx.NodeProto) -> None:
    extra = [helper.make_node("Identity", ["x"], ["out"], "last")]
    source = save(tmp_path / "m.onnx", node, weight(64, 64), extra)
    with pytest.raises((qgraph.InputError, qgraph.CoverageError)):
        qgraph.optimize(source, tmp_path / "o.onnx")


HOSTILE = [
    {"target": 7}, {"target": ["ort-cpu"]}, {"sites": 3}, {"sites": {"mm": 5}},
    {"sites": {"mm": {"n": None, "k": "x", "format": 4, "reason": [], "error": {}, "detail": 1}}},
    {"sites": {"mm": {"n": 1e999, "format": "no such format", "reason": "NO_SUCH"}}},
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_metadata_can_say_anything(tmp_path: Path, content: dict[str, Any]) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    qgraph.optimize(source, tmp_path / "o.onnx")
    model = onnx.load(tmp_path / "o.onnx", load_external_data=False)
    entry = next(p for p in model.metadata_props if p.key == "qgraph")
    entry.value = json.dumps({**json.loads(entry.value), **content})
    onnx.save(model, tmp_path / "o.onnx")
    explanation = qgraph.explain(tmp_path / "o.onnx")
    assert [(row.name, row.state) for row in explanation.sites] == [("mm", "fused")]
    json.dumps(explanation.to_json())


@pytest.mark.parametrize(
    "text", ["set = 5", "options = 5", 'options = ["a"]', "[" * 5000, "group = []"]
)
def test_recipes_of_wrong_types(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.toml").write_text(text, encoding="utf-8")
    with pytest.raises(qgraph.InputError, match=r"r\.toml"):
        qgraph.Recipe.from_toml(tmp_path / "r.toml")


def test_a_set_that_sets_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[set]]\nselector = "role:head"\n', encoding="utf-8")
    with pytest.raises(qgraph.InputError, match=r"r\.toml: .*role:head.*format.*solver or activ"):
        qgraph.Recipe.from_toml(tmp_path / "r.toml")
    with pytest.raises(qgraph.InputError, match="says nothing"):
        qgraph.Override("role:head")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('selector = ["a"]\nformat = "int4"', "takes texts"),
        ('selector = "a"\nformat = 4', "takes texts"),
        ('selector = ""\nformat = "int4"', "says nothing"),
        ('selector = "a"\nsolver = ""', "says nothing"),
    ],
)
def test_a_set_of_other_values_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.toml").write_text(f"[[set]]\n{text}\n", encoding="utf-8")
    with pytest.raises(qgraph.InputError, match=rf"r\.toml: .*{words}"):
        qgraph.Recipe.from_toml(tmp_path / "r.toml")


@pytest.mark.parametrize("text", ["a=int4,solver=", "a=int4,solver=gptq,solver=rtn"])
def test_a_set_that_names_a_solver_badly_is_refused(text: str) -> None:
    with pytest.raises(qgraph.InputError, match=r"says nothing|once"):
        qgraph.Override.parse(text)


@pytest.mark.parametrize("wrong", ["NF4", "Nf4", "MXFP4", "Int8-Row"])
def test_a_name_in_the_wrong_case_is_recognized(wrong: str) -> None:
    with pytest.raises(qgraph.InputError, match=rf"did you mean '{wrong.lower()}'\?"):
        parse(wrong)


def test_the_beginning_of_a_name_is_recognized() -> None:
    with pytest.raises(qgraph.InputError, match="did you mean 'fp8-e4m3' or 'fp8-e5m2'"):
        parse("fp8")


@pytest.mark.parametrize("selector", ["first:²", "last:0", "first:" + "9" * 5000, "role:heads"])
def test_selectors_that_mean_nothing(tmp_path: Path, selector: str) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    with pytest.raises(qgraph.InputError, match="wanted"):
        qgraph.optimize(source, exclude=selector)


def test_an_exact_name_is_a_selector_whatever_it_holds(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "/layers.0/mm[0]")
    source = save(tmp_path / "m.onnx", node, weight(64, 64))
    with pytest.raises(qgraph.CoverageError, match="EXCLUDED"):
        qgraph.optimize(source, exclude="/layers.0/mm[0]")


def test_an_option_of_a_pass_is_checked(tmp_path: Path) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    with pytest.raises(qgraph.InputError, match="accuracy_level '7': wanted auto, 0, 4"):
        qgraph.optimize(source, options={"lower_matmul_nbits.accuracy_level": "7"})


def test_pipes_are_no_models_and_no_recipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(qgraph.InputError, match="no regular file"):
        qgraph.capture(tmp_path / "pipe")
    with pytest.raises(qgraph.InputError, match="no regular file"):
        qgraph.Recipe.from_toml(tmp_path / "pipe")
