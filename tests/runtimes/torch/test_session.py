"""Sessions of models that are wrong, or that come with more than inputs and weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qgraph import registry
from qgraph.errors import InputError
from qgraph.runtimes.torch.missing import located
from qgraph.runtimes.torch.runtime import CPU

W = np.arange(6, dtype=np.float32).reshape(3, 2)
X = np.eye(3, dtype=np.float32)
ORT: Any = registry.load("target", "ort-cpu")


def model_of(nodes: list[Any], constants: dict[str, Any], output: Any = None) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"])],
        [output or helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def product() -> onnx.ModelProto:
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], {"w": W})


def external(location: str, **entries: int) -> onnx.ModelProto:
    """The product with its weight in a data file."""
    model = product()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data files, a secret beside it, and ways to it."""
    (tmp_path / "secret.bin").write_bytes(W.tobytes())
    inner = tmp_path / "in"
    inner.mkdir()
    (inner / "ok.bin").write_bytes(W.tobytes())
    os.symlink("../secret.bin", inner / "link.bin")
    os.symlink("..", inner / "up")
    return inner


def test_external_data_is_read(folder: Path) -> None:
    onnx.save(external("ok.bin", offset=0, length=24), folder / "m.onnx")
    np.testing.assert_array_equal(CPU.open(folder / "m.onnx").run({"x": X})["y"], W)


@pytest.mark.parametrize(
    "location,entries,words",
    [
        ("../secret.bin", {}, "outside the model's folder"),
        ("link.bin", {}, "outside the model's folder"),
        ("up/secret.bin", {}, "outside the model's folder"),
        ("/dev/zero", {}, "relative to the model's folder"),
        ("gone.bin", {}, "cannot be found"),
        ("ok.bin", {"offset": 16}, "needs bytes 16 to 40"),
        ("ok.bin", {"offset": -4}, "offset '-4'"),
        ("ok.bin", {"length": 8}, "has length 8"),
        ("ok.bin", {"length": 2**62}, "has length"),
    ],
)
def test_external_data_stays_in_the_folder(
    folder: Path, location: str, entries: dict[str, int], words: str
) -> None:
    onnx.save(external(location, **entries), folder / "m.onnx")
    with pytest.raises(InputError, match=words):
        CPU.open(folder / "m.onnx")


def test_bytes_have_no_data_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match="'w' lies in a data file"):
        CPU.open(external("ok.bin").SerializeToString())


def _short(tensor: TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[:8]


def _unknown(tensor: TensorProto) -> None:
    tensor.data_type = 99


def _negative(tensor: TensorProto) -> None:
    tensor.dims[0] = -3


@pytest.mark.parametrize(
    "damage,words",
    [(_short, "holds 8 bytes"), (_unknown, "data type 99"), (_negative, "dimensions are 0")],
)
def test_a_damaged_constant(damage: Callable[[TensorProto], None], words: str) -> None:
    model = product()
    damage(model.graph.initializer[0])
    with pytest.raises(InputError, match=words):
        CPU.open(model.SerializeToString())


@pytest.mark.parametrize("ir_version", [3, 10])
def test_constants_may_be_inputs_too(ir_version: int) -> None:
    model = product()
    model.ir_version = ir_version
    model.graph.input.insert(0, helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    session = CPU.open(model.SerializeToString())
    assert [spec.name for spec in session.inputs] == ["x"]
    np.testing.assert_array_equal(session.run({"x": X})["y"], W)


def test_a_sequence_is_a_list_of_arrays() -> None:
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Neg", ["x"], ["z"])]
    nodes += [helper.make_node("SequenceConstruct", ["x", "z"], ["y"])]
    model = model_of(nodes, {}, output)
    found: Any = CPU.open(model.SerializeToString()).run({"x": X / 3})["y"]
    assert isinstance(found, list)
    np.testing.assert_array_equal(found[0], X / 3)
    np.testing.assert_array_equal(found[1], -X / 3)


OPENED = {
    "no value": (helper.make_node("Constant", [], ["y"], name="k"), {}, "node k: a Constant has"),
    "unknown type": (
        helper.make_node("Cast", ["k"], ["y"], name="cast", to=999),
        {"k": np.array([6])},
        r"node cast \(Cast\): .*999",
    ),
    "no axis": (helper.make_node("Concat", ["x"], ["y"], name="joined"), {}, "joined.*'axis'"),
    "an input less": (helper.make_node("MatMul", ["x"], ["y"], name="m"), {}, "node m:.*'b'"),
    "an input more": (helper.make_node("Relu", ["x", "x"], ["y"], name="r"), {}, "too many"),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_node_that_cannot_be_built_is_named(name: str) -> None:
    node, constants, words = OPENED[name]
    with pytest.raises(InputError, match=words):
        CPU.open(model_of([node], constants).SerializeToString())


RUN = {
    "division": helper.make_node("Div", ["s", "zero"], ["y"], name="quotient"),
    "unknown type": helper.make_node("EyeLike", ["h"], ["y"], name="eye", dtype=999),
    "wrong rank": helper.make_node("Attention", ["h", "h", "h"], ["y"], name="attend"),
    "no such size": helper.make_node("Reshape", ["h", "s"], ["y"], name="shaped"),
}


@pytest.mark.parametrize("name", RUN)
def test_a_node_that_fails_is_named(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), RUN[name]]
    model = model_of(nodes, {"s": np.array([5, 7]), "zero": np.array([0])})
    model.opset_import[0].version = 23
    with pytest.raises(InputError, match=rf"could not run the model: node {RUN[name].name} \("):
        CPU.open(model.SerializeToString()).run({"x": X})
    assert capfd.readouterr() == ("", "")


OPEN = """
import sys
from qgraph.runtimes.torch.runtime import CPU
CPU.open(sys.stdin.buffer.read())
"""


def test_a_large_power_of_constants_takes_no_time() -> None:
    nodes = [helper.make_node("Pow", ["a", "a"], ["s"]), helper.make_node("Add", ["s", "s"], ["t"])]
    nodes += [helper.make_node("Reshape", ["x", "t"], ["y"])]
    data = model_of(nodes, {"a": np.array([10**7])}).SerializeToString()
    subprocess.run([sys.executable, "-c", OPEN], input=data, timeout=60, check=True)


POWERS = [(3, 4), (-3, 3), (2, -1), (1, -5), (-1, -3), (9, 0.5), (2, 62)]


@pytest.mark.parametrize("base,exponent", POWERS)
def test_powers_of_sizes_are_those_of_onnxruntime(base: int, exponent: float) -> None:
    power = helper.make_node("Pow", ["a", "b"], ["p"])
    nodes = [power, helper.make_node("Cast", ["p"], ["c"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Mul", ["x", "c"], ["y"])]
    model = model_of(nodes, {"a": np.array(base), "b": np.array(exponent)}).SerializeToString()
    wanted = ORT.open(model, reference=True).run({"x": X})["y"]
    np.testing.assert_allclose(CPU.open(model).run({"x": X})["y"], wanted, rtol=1e-6)


@pytest.mark.parametrize("exponent", [np.nan, np.inf, -np.inf, 1e30, 2.0, -2.0])
def test_powers_of_any_number(exponent: float) -> None:
    nodes = [helper.make_node("Pow", ["x", "b"], ["y"])]
    model = model_of(nodes, {"b": np.array(exponent, np.float32)}).SerializeToString()
    x = np.array([[0.5, 1, 3]], np.float32)
    wanted = ORT.open(model, reference=True).run({"x": x})["y"]
    np.testing.assert_array_equal(CPU.open(model).run({"x": x})["y"], wanted)


@pytest.mark.parametrize("exponent", [-1, 3, 0.5])
def test_powers_of_integers(exponent: float) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT32)]
    nodes += [helper.make_node("Pow", ["i", "b"], ["p"])]
    nodes += [helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT)]
    kind = np.int64 if isinstance(exponent, int) else np.float32
    model = model_of(nodes, {"b": np.array(exponent, kind)}).SerializeToString()
    x = np.array([[1, 4, 9, -1]] if exponent != 0.5 else [[1, 4, 9]], np.float32)
    wanted = ORT.open(model, reference=True).run({"x": x})["y"]
    np.testing.assert_array_equal(CPU.open(model).run({"x": x})["y"], wanted)


@pytest.mark.parametrize("feed", [[[1.0], [1.0, 2.0]], "text", None, np.array([object()])])
def test_a_feed_that_is_no_array(feed: Any) -> None:
    with pytest.raises(InputError, match="input 'x' is"):
        CPU.open(product().SerializeToString()).run({"x": feed})


def test_an_error_names_the_innermost_node_once() -> None:
    """Whatever its words begin with: `node counts differ` is of no node yet."""
    inner = located("node inner (Add)", InputError("node counts differ"))
    assert str(inner) == "node inner (Add): node counts differ"
    assert located("node outer (If)", inner) is inner
    assert str(located("node outer (If)", ValueError("bad"))) == "node outer (If): bad"
