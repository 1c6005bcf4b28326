from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from qgraph.errors import InputError, MissingExtra
from qgraph.runtimes import ort_session
from qgraph.runtimes.base import ValueSpec
from qgraph.runtimes.ort import CPU, CUDA

ADD = """
<ir_version: 10, opset_import: ["" : 21]>
add (float[B, 3] x) => (float[B, 3] y) <float[3] w = {1, 2, 3}> {
    [the_add] y = Add(x, w)
}
"""
BFLOAT16 = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
bf (bfloat16[M, 32] x, uint8[4, 1, 16] b, bfloat16[4, 1] s) => (bfloat16[M, 4] y) {
    [layers_0_q] y = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 32> (x, b, s)
}
"""
UNKNOWN = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
bad (float[M] x) => (float[M] y) {
    [strange] y = com.microsoft.NoSuchOp (x)
}
"""


def model(text: str) -> bytes:
    return onnx.parser.parse_model(text).SerializeToString()


def int4_product(n: int = 64, k: int = 64) -> bytes:
    """x · Wᵀ with W behind an int4 DequantizeLinear, which ONNX Runtime fuses by itself."""
    rng = np.random.default_rng(0)
    codes = ir.tensor(
        rng.integers(-8, 8, (k, n)).astype(np.int8).astype(ir.DataType.INT4.numpy()),
        dtype=ir.DataType.INT4, name="codes",
    )  # fmt: skip
    scales = numpy_helper.from_array(np.full((k // 32, n), 0.1, np.float32), "scales")
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["codes", "scales"], ["w"], "dq", axis=0, block_size=32
        ),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["M", n])],
        [ir.serde.serialize_tensor(codes), scales],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


def test_a_session_says_what_it_takes_and_gives() -> None:
    session = CPU.open(model(ADD))
    assert session.inputs == (ValueSpec("x", "float32", ("B", 3)),)
    assert session.outputs == (ValueSpec("y", "float32", ("B", 3)),)
    result = session.run({"x": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(result["y"], [[1, 2, 3]] * 2)


@pytest.mark.parametrize(
    "feeds, words",
    [
        ({}, "Required inputs"),
        ({"x": np.zeros((2, 4), np.float32)}, "Got: 4 Expected: 3"),
        ({"x": np.zeros((2, 3))}, "tensor(double)"),
        ({"x": np.zeros((2, 3), np.float32), "z": np.zeros(1, np.float32)}, "z"),
    ],
)
def test_wrong_feeds(feeds: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError) as caught:
        CPU.open(model(ADD)).run(feeds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_type_without_kernel_is_named_with_node_and_op() -> None:
    with pytest.raises(InputError) as caught:
        CPU.open(model(BFLOAT16))
    assert "MatMulNBits(1) node with name 'layers_0_q'" in str(caught.value)
    assert "x is BFLOAT16" in str(caught.value)


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(InputError, match=r"refuses the model: .*com.microsoft:NoSuchOp"):
        CPU.open(model(UNKNOWN))


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_files_that_are_no_model(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        CPU.open(path)
    assert str(caught.value).count(str(path)) <= 2
    assert "[ONNXRuntimeError]" not in str(caught.value)


def external(folder: Path) -> Path:
    graph = ir.from_proto(onnx.parser.parse_model(ADD))
    graph.graph.initializers["w"].const_value = ir.tensor(np.arange(3, dtype=np.float32), name="w")
    ir.save(graph, folder / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    assert (folder / "m.data").exists()
    return folder / "m.onnx"


def test_external_data_is_found_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path)
    x = {"x": np.zeros((1, 3), np.float32)}
    np.testing.assert_array_equal(CPU.open(path).run(x)["y"], [[0, 1, 2]])
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(CPU.open("m.onnx").run(x)["y"], [[0, 1, 2]])


def test_missing_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "m.data").unlink()
    with pytest.raises(InputError, match=r"m\.data"):
        CPU.open(path)


def test_a_small_graph_is_opened_without_having_been_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = held(external(tmp_path))
    weight = graph.graph.initializers["w"].const_value
    x = {"x": np.zeros((1, 3), np.float32)}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session = CPU.open(graph)
    assert list(tmp_path.glob("qgraph-*"))
    np.testing.assert_array_equal(session.run(x)["y"], [[0, 1, 2]])
    del session
    gc.collect()
    assert not list(tmp_path.glob("qgraph-*"))
    assert graph.graph.initializers["w"].const_value is weight


def held(path: Path) -> ir.Model:
    """The model with its weights in memory."""
    graph = ir.load(path)
    value = graph.graph.initializers["w"]
    assert value.const_value is not None
    value.const_value = ir.tensor(np.array(value.const_value.numpy()), name="w")
    return graph


def test_weights_in_files_are_read_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = ir.load(external(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ort_session, "SMALL_MODEL", 11)  # they are no part of the graph's size
    session = CPU.open(graph)
    assert not list(tmp_path.glob("qgraph-*"))
    (tmp_path / "m.data").unlink()
    x = {"x": np.zeros((1, 3), np.float32)}
    np.testing.assert_array_equal(session.run(x)["y"], [[0, 1, 2]])
    assert isinstance(graph.graph.initializers["w"].const_value, ir.ExternalTensor), "unchanged"


def test_a_large_graph_has_to_be_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_session, "SMALL_MODEL", 11)
    with pytest.raises(InputError, match="save it and open the file"):
        CPU.open(held(external(tmp_path)))


def test_the_level_of_fused_dequantization_is_set() -> None:
    x = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}
    kernels = Counter(run.op for run in CPU.profile(int4_product(), x))
    assert kernels == {"MatMulNBits": 1}, "fused by ONNX Runtime itself"
    reference = CPU.open(int4_product(), reference=True).run(x)["y"]
    rounded = CPU.open(int4_product()).run(x)["y"]
    exact = CPU.open(int4_product(), accuracy_level=0).run(x)["y"]
    norm = np.linalg.norm(reference)
    assert np.linalg.norm(exact - reference) < 1e-5 * norm
    assert np.linalg.norm(rounded - reference) > 1e-3 * norm


def test_run_opens_a_model_once_for_all_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = ort_session.open_session

    def counting(*args: object, **options: object) -> object:
        opened.append(args)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("qgraph.runtimes.ort.open_session", counting)
    feeds = [{"x": np.full((m, 3), m, np.float32)} for m in (1, 2)]
    results = CPU.run(model(ADD), feeds)
    assert [result["y"].shape for result in results] == [(1, 3), (2, 3)]
    assert len(opened) == 1


def test_cuda_without_cuda_names_the_extra() -> None:
    if CUDA.available():
        pytest.skip("CUDA is installed here")
    with pytest.raises(MissingExtra, match=r"onnxruntime-gpu, or '\.\[gpu\]'"):
        CUDA.open(model(ADD))
