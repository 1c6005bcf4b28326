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
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph.formats.base import parse

FLOAT = TensorProto.FLOAT


def weight(n: int, k: int, fmt: str = "int4:group=32") -> np.ndarray:
    """`[n, k]` that lies on the grid of a format, so that rounding changes nothing."""
    import onnx_ir as ir

    spec = parse(fmt)
    rows = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    return spec.dequantize(spec.quantize(rows, ir.DataType.FLOAT))


def save(path: Path, node: onnx.NodeProto, array: np.ndarray, extra: Any = None) -> Path:
    """x `[B, 64]` → `node` with weight `w` → y."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    nodes = [node, *(extra or [])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, ["B", 64])],
        [helper.make_tensor_value_info(nodes[-1].output[0], kind, None)],
        [numpy_helper.from_array(array, "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def run(path: Path, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(dtype)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"], "mm")


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


@pytest.mark.parametrize("options", [{}, {"format": "int8", "accuracy_level": 0}])
def test_a_portable_site_that_misses_its_check_ends_as_float(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    huge = (weight(24, 64).T * 1e37).astype(np.float32)
    source = save(tmp_path / "m.onnx", MATMUL, huge)
    with pytest.raises(qgraph.CoverageError, match="FAILED_CHECK"):
        qgraph.optimize(source, tmp_path / "o.onnx", unfused="portable", **options)


def test_a_data_file_that_another_model_names_is_kept(tmp_path: Path) -> None:
    source = save(tmp_path / "m.onnx", MATMUL, weight(64, 64))
    qgraph.optimize(source, tmp_path / "o")
    qgraph.optimize(source, tmp_path / "o.onnx")
    qgraph.optimize(source, tmp_path / "o", format="int8")
    assert np.isfinite(run(tmp_path / "o.onnx")).all()


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
