"""Weights inside the .onnx file stay there; the model is the same as the plainly parsed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qgraph import external_data, inline_data, onnx_file


def tensors(proto: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for _, tensor in external_data.tensors(proto)]


def embed(proto: onnx.ModelProto, folder: Path) -> None:
    """Bring referenced bytes back into the message."""
    for tensor in tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            data = (folder / entries["location"]).read_bytes()
            start = int(entries["offset"])
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = data[start : start + int(entries["length"])]


ARRAYS = st.builds(
    lambda size, dtype, fill: np.full(size, fill).astype(dtype),
    st.integers(0, 40),
    st.sampled_from([np.float32, np.float16, np.int8, np.int64]),
    st.integers(-100, 100),
)


@st.composite
def tensor_protos(draw: st.DrawFn) -> TensorProto:
    array = draw(ARRAYS)
    proto = numpy_helper.from_array(array, draw(st.sampled_from(["a", "W", "ünï"])))
    if array.dtype == np.float32 and draw(st.booleans()):
        proto = helper.make_tensor(proto.name, TensorProto.FLOAT, array.shape, array.tolist())
    proto.doc_string = draw(st.sampled_from(["", "words", "x" * 60]))
    return proto


@st.composite
def graphs(draw: st.DrawFn, depth: int = 2) -> onnx.GraphProto:
    graph = onnx.GraphProto(name=draw(st.sampled_from(["g", "h" * 200])))
    graph.initializer.extend(draw(st.lists(tensor_protos(), max_size=3)))
    for tensor in draw(st.lists(tensor_protos(), max_size=2)):
        graph.node.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
    if depth and draw(st.booleans()):
        body = draw(graphs(depth - 1))
        graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=body))
        graph.node.append(helper.make_node("Custom", ["c"], ["z"], bodies=[body, body]))
    return graph


@given(graph=graphs(), large=st.integers(0, 120), unknown=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_message_is_the_same_with_its_data_put_back(
    tmp_path_factory: pytest.TempPathFactory, graph: onnx.GraphProto, large: int, unknown: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    proto = onnx.ModelProto(ir_version=10, graph=graph)
    (held,) = graph.initializer[:1] or (numpy_helper.from_array(np.ones(9), "f"),)
    nodes = [helper.make_node("Constant", [], ["k"], value=held)]
    proto.functions.append(helper.make_function("local", "F", [], ["k"], nodes, []))
    data = proto.SerializeToString() + (b"\xda\x3e\x03abc\xc5\x3e\x01\x02\x03\x04" * unknown)
    wanted = onnx.ModelProto.FromString(data)
    (folder / "model.onnx").write_bytes(data)
    found = onnx.ModelProto.FromString(inline_data.read(str(folder / "model.onnx"), large))

    for before, after in zip(tensors(wanted), tensors(found), strict=True):
        moved = after.data_location == TensorProto.EXTERNAL
        assert moved == (before.HasField("raw_data") and len(before.raw_data) >= large)
        assert moved != after.HasField("raw_data") or not before.HasField("raw_data")
    embed(found, folder)
    assert found == wanted
    assert found.SerializeToString(deterministic=True) == wanted.SerializeToString(
        deterministic=True
    )


@given(data=st.binary(max_size=200), large=st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_model_parse_or_fail_as_before(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, large: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.onnx"
    path.write_bytes(data + b"\x00" * (not data))
    assert parsed(inline_data.read(str(path), large)) == parsed(path.read_bytes())


def parsed(data: bytes) -> Any:
    try:
        proto = onnx.ModelProto.FromString(data)
    except Exception as error:
        return type(error)
    assert not tensors(proto)
    return proto.SerializeToString(deterministic=True)


def test_messages_that_parsers_merge_are_left_alone(tmp_path: Path) -> None:
    def read(data: bytes) -> bytes:
        (tmp_path / "model.onnx").write_bytes(data)
        return inline_data.read(str(tmp_path / "model.onnx"), 32)

    weight = numpy_helper.from_array(np.ones(9, np.float32), "W")
    graph = onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight])).SerializeToString()
    assert read(graph) != graph
    assert read(graph + graph) == graph + graph, "two graphs"

    weight.data_location = TensorProto.EXTERNAL
    placed = onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight])).SerializeToString()
    assert read(placed) == placed, "data and a place"


def big_model(folder: Path, rows: int) -> tuple[Path, np.ndarray]:
    weight = np.arange(rows * 1024, dtype=np.float32).reshape(1024, rows) / 7
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["y"], "mm")],
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1024])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "W"), numpy_helper.from_array(weight[0, :9], "b")],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx", weight


def test_loading_maps_large_tensors_from_the_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, weight = big_model(tmp_path, 256)
    monkeypatch.chdir(tmp_path)
    model = onnx_file.load("model.onnx")
    monkeypatch.chdir("/")
    large, small = (value.const_value for value in model.graph.initializers.values())
    assert isinstance(large, ir.ExternalTensor)
    assert Path(large.path) == path
    np.testing.assert_array_equal(large.numpy(), weight)
    assert not isinstance(small, ir.ExternalTensor)
    assert small is not None
    np.testing.assert_array_equal(small.numpy(), weight[0, :9])


def test_links_are_followed_and_hard_links_read_plainly(tmp_path: Path) -> None:
    path, weight = big_model(tmp_path, 256)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "other.onnx").symlink_to(path)
    (tensor, _) = onnx_file.load(tmp_path / "linked" / "other.onnx").graph.initializers.tensors()
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), weight)

    os.link(path, tmp_path / "again.onnx")
    (tensor, _) = onnx_file.load(path).graph.initializers.tensors()
    assert not isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), weight)


MEASURE = """
import sys
import onnx_ir as ir
from qgraph import onnx_file
from qgraph.frontends import canonical
def peak():
    # Unlike ru_maxrss, this does not start at the peak of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = peak()
model = onnx_file.load(sys.argv[1])
canonical.canonicalize(model)
print(before, peak())
"""


def test_a_single_file_model_is_captured_without_its_weights_in_memory(tmp_path: Path) -> None:
    path, _ = big_model(tmp_path, 12_500)
    assert path.stat().st_size > 50_000_000
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, done.stdout.split())
    assert after - before < 20_000, "kB of resident memory"
