"""The targets `torch`, `torch-cpu` and `torch-cuda`: sessions, profiles, and whole runs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph.capabilities import Query
from qgraph.errors import InputError
from qgraph.formats.base import parse
from qgraph.kernel_ops import OWN_LINEAR
from qgraph.runtimes.base import ValueSpec
from qgraph.runtimes.torch.kernels import _Ladder
from qgraph.runtimes.torch.runtime import CPU, CUDA, HERE

ADD = """
<ir_version: 10, opset_import: ["" : 21]>
add (float[B, 3] x) => (float[B, 3] y) <float[3] w = {1, 2, 3}> {
    [the_add] y = Add(x, w)
}
"""
LIAR = """
<ir_version: 10, opset_import: ["" : 21, "qgraph" : 1]>
model (float[B, 3] x) => (float[B, 3] y) {
    [call] y = qgraph.LinearInt4V1 (x)
}
<domain: "qgraph", opset_import: ["" : 21]>
LinearInt4V1 (x) => (y) {
    y = Neg (x)
}
"""
BFLOAT16 = """
<ir_version: 10, opset_import: ["" : 21]>
double (bfloat16[M] x) => (bfloat16[M] y) {
    y = Add(x, x)
}
"""
MATMUL = """
<ir_version: 10, opset_import: ["" : 21]>
product (float[M, K] x, float[K, N] z) => (float[M, N] y) {
    [product] y = MatMul (x, z)
}
"""
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def model(text: str) -> bytes:
    return onnx.parser.parse_model(text).SerializeToString()


def network(folder: Path, dtype: type = np.float32) -> Path:
    """An embedding and two linears, one with a bias; K of 96 leaves partial blocks at 64."""
    rng = np.random.default_rng(0)
    weights = {
        "embed.weight": rng.standard_normal((80, 96)),
        "up.weight": rng.standard_normal((96, 160)) / 9,
        "down.weight": rng.standard_normal((96, 160)) / 12,
        "down.bias": rng.standard_normal(96),
    }
    nodes = [
        helper.make_node("Gather", ["embed.weight", "ids"], ["h"], "embed"),
        helper.make_node("MatMul", ["h", "up.weight"], ["u"], "up"),
        helper.make_node("Relu", ["u"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "down.weight", "down.bias"], ["y"], "down", transB=1),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["T"])],
        [helper.make_tensor_value_info("y", kind, ["T", 96])],
        [numpy_helper.from_array(np.asarray(w, dtype), name) for name, w in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path


def test_a_session_says_what_it_takes_and_gives() -> None:
    session = CPU.open(model(ADD))
    assert session.inputs == (ValueSpec("x", "float32", ("B", 3)),)
    assert session.outputs == (ValueSpec("y", "float32", ("B", 3)),)
    result = session.run({"x": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(result["y"], [[1, 2, 3]] * 2)


@pytest.mark.parametrize(
    "feeds, words",
    [
        ({}, "'x' is missing"),
        ({"x": np.zeros((2, 4), np.float32)}, r"is \(2, 4\), wanted \('B', 3\)"),
        ({"x": np.zeros((2, 3))}, "is float64, wanted float32"),
        ({"x": np.zeros((2, 3), np.float32), "z": np.zeros(1)}, "no input 'z'"),
    ],
)
def test_wrong_feeds_are_named(feeds: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        CPU.open(model(ADD)).run(feeds)


def test_what_torch_refuses_is_one_line() -> None:
    session = CPU.open(model(MATMUL))
    with pytest.raises(InputError, match=r"torch could not run the model: .*2x3 and 4x5") as error:
        session.run({"x": np.zeros((2, 3), np.float32), "z": np.zeros((4, 5), np.float32)})
    assert "\n" not in str(error.value)


def test_a_read_only_feed_stays_as_it_is() -> None:
    x = np.arange(3, dtype=np.float32)[None]
    x.flags.writeable = False
    result = CPU.open(model(ADD)).run({"x": x})
    np.testing.assert_array_equal(result["y"], [[1, 3, 5]])
    np.testing.assert_array_equal(x, [[0, 1, 2]])


def test_bfloat16_comes_and_goes() -> None:
    x = np.array([1.5, -2], ml_dtypes.bfloat16)
    result = CPU.open(model(BFLOAT16)).run({"x": x})
    assert result["y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result["y"].astype(np.float32), [3, -4])


def test_a_function_is_known_by_its_body() -> None:
    result = CPU.open(model(LIAR)).run({"x": np.ones((1, 3), np.float32)})
    np.testing.assert_array_equal(result["y"], [[-1, -1, -1]])


@pytest.mark.parametrize("content", [b"no model", b""])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"m\.onnx"):
        CPU.open(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.onnx: no such file"):
        CPU.open(tmp_path / "gone.onnx")


def test_the_profile_has_every_node_under_its_name(tmp_path: Path) -> None:
    path = network(tmp_path)
    ran = CPU.profile(path, {"ids": np.arange(5)}, runs=2)
    assert [item.node for item in ran] == ["embed", "up", "relu", "down"]
    assert [item.op for item in ran] == ["Gather", "MatMul", "Relu", "Gemm"]
    assert all(item.microseconds > 0 and item.provider == "torch cpu" for item in ran)


@pytest.mark.parametrize("dtype, close", [(np.float32, 1e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize("form", ["uint4:group=64", "int4:group=32", "int8:group=row"])
def test_one_file_on_both_runtimes(tmp_path: Path, dtype: type, close: float, form: str) -> None:
    path, output = network(tmp_path, dtype), tmp_path / "o.onnx"
    result = qgraph.optimize(path, output, format=form, target="torch-cpu", min_elements=1)
    assert [item.site for item in result.plan.decisions if item.quantized] == [
        "embed",
        "up",
        "down",
    ]
    assert all("level=4" not in str(item.kernel) for item in result.plan.decisions)
    feeds = {"ids": np.array([0, 79, 3, 3])}
    found = qgraph.open(output, "torch-cpu").run(feeds)["y"].astype(np.float64)
    wanted = qgraph.open(output, "ort-cpu").run(feeds)["y"].astype(np.float64)
    assert np.linalg.norm(found - wanted) <= close * np.linalg.norm(wanted)


def test_what_has_no_fused_op_runs_as_portable(tmp_path: Path) -> None:
    path, output = network(tmp_path), tmp_path / "o.onnx"
    result = qgraph.optimize(
        path, output, format="int4:group=32", target="torch-cpu", accuracy_level=4,
        unfused="portable", min_elements=1,
    )  # fmt: skip
    kernels = {item.site: item.kernel for item in result.plan.decisions}
    assert kernels["up"] == kernels["down"] == "portable"
    feeds = {"ids": np.array([7, 1])}
    found = qgraph.open(output, "torch-cpu").run(feeds)["y"]
    np.testing.assert_allclose(found, qgraph.open(output).run(feeds)["y"], atol=1e-4)


def test_explain_says_what_runs_at_which_number_of_rows(tmp_path: Path) -> None:
    path, output = network(tmp_path), tmp_path / "o.onnx"
    qgraph.optimize(path, output, format="uint4:group=32", target="torch-cpu", min_elements=1)
    explanation = qgraph.explain(output, profile=True)
    assert explanation.target == "torch-cpu"
    rows = {row.name: row for row in explanation.sites}
    assert rows["up"].by_rows.startswith("dequantize + matmul")
    assert {row.provider for row in explanation.kernels} == {"torch cpu"}
    assert {row.origin for row in explanation.kernels} == {"ran"}
    assert explanation.profile.times["down"] > 0


LEVELS = ["nf4:group=32", "mxfp4", "nvfp4", "mxfp8", "fp8-e4m3", "fp8-e4m3:scale=block"]
UNFUSED = ["nf4:group=32,double=true", "mxfp4", "nvfp4", "mxfp8"]


@pytest.mark.parametrize(
    "text, target",
    [*((text, "torch-cpu") for text in LEVELS), *((text, "ort-cpu") for text in UNFUSED)],
)
def test_formats_of_levels_are_explained_by_rows(text: str, target: str, tmp_path: Path) -> None:
    """As the kernels' ladder has it, whatever the file was written for."""
    path, output = network(tmp_path), tmp_path / "o.onnx"
    qgraph.optimize(path, output, format=text, target=target, prefer="size", min_elements=1)
    found = qgraph.explain(output, target="torch-cpu")
    row = {row.name: row for row in found.sites}["up"]
    fmt = parse(text)
    assert row.state == "portable"
    assert row.kernel is not None and row.kernel.startswith(f"Linear codes={fmt.numbers}")
    assert (row.bits, row.group, row.reason) == (fmt.bits, fmt.group, None)
    assert row.by_rows.startswith("dequantize + matmul")
    assert "up" not in {each.name for rows in found.unfused.values() for each in rows}


def test_the_ladder_of_a_gpu_knows_the_layout() -> None:
    """Which the format's function says: blocks of 128 rows have tiles of their own."""
    ladder = _Ladder("cuda")
    words = {
        text: ladder(Query(OWN_LINEAR, "float16", fmt.bits, fmt.group, n=512, k=512,
                           numbers=fmt.numbers, function=fmt.linear_name))
        for text, fmt in ((text, parse(text)) for text in LEVELS)
    }  # fmt: skip
    assert all("triton matrix-vector" in each for each in words.values())
    assert "triton fp8 tiles" in words["fp8-e4m3:scale=block"]
    assert "triton fp8 tiles" not in words["nvfp4"]


def test_a_file_with_int8_activations_is_explained_as_torch_runs_it(tmp_path: Path) -> None:
    path, output = network(tmp_path), tmp_path / "o.onnx"
    qgraph.optimize(path, output, format="uint4:group=32", accuracy_level=4, min_elements=1)
    sites = {row.name: row for row in qgraph.explain(output, target="torch-cpu").sites}
    assert sites["up"].level == 0 and sites["up"].by_rows
    assert {row.name: row for row in qgraph.explain(output).sites}["up"].level == 4


@no_cuda
def test_cuda_is_planned_where_it_is_absent_but_not_run(tmp_path: Path) -> None:
    path, output = network(tmp_path), tmp_path / "o.onnx"
    result = qgraph.optimize(path, output, format="uint4:group=32", target="torch-cuda")
    assert any("predicted" in note for note in result.report.notes)
    assert qgraph.explain(output).sites[1].origin == "predicted"
    with pytest.raises(InputError, match=r"torch-cuda needs CUDA.*--target torch-cpu"):
        qgraph.open(output, "torch-cuda")
    assert not CUDA.available() and HERE.available()
