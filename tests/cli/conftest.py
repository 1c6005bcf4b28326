"""A small model on disk, and the command line run in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qgraph.cli import run

SIZE = 128


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command answered."""

    status: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def qgraph(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `qgraph ARGUMENTS`."""

    def command(*arguments: object) -> Ran:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        return Ran(status, streams.out, streams.err)

    return command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers of two linears, a head, and a product of two activations."""
    path = tmp_path / "model.onnx"
    onnx.save(make_model(), path)
    return path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """An embedding, a linear, and a head that is the embedding's table turned around."""
    rng = np.random.default_rng(0)
    table, weight = rng.standard_normal((2, SIZE, SIZE)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"], name="embed"),
        helper.make_node("MatMul", ["x", "fc.weight"], ["y"], name="fc"),
        helper.make_node("Transpose", ["table"], ["turned"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["y", "turned"], ["logits"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", SIZE])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "fc.weight")],
    )
    path = tmp_path / "tied.onnx"
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


def make_model() -> onnx.ModelProto:
    """`x → 2 · (up, Relu, down) → head`, and `scores`: a MatMul without a weight."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(2):
        up, down = f"layers.{layer}.up", f"layers.{layer}.down"
        nodes += [
            helper.make_node("MatMul", [value, f"{up}.weight"], [up], name=up),
            helper.make_node("Relu", [up], [f"{up}.act"], name=f"layers.{layer}.act"),
            helper.make_node("Gemm", [f"{up}.act", f"{down}.weight"], [down], name=down, transB=1),
        ]
        weights += [(f"{up}.weight", (SIZE, 2 * SIZE)), (f"{down}.weight", (SIZE, 2 * SIZE))]
        value = down
    nodes += [
        helper.make_node("MatMul", [value, "head.weight"], ["logits"], name="head"),
        helper.make_node("Transpose", ["logits"], ["turned"], name="turn"),
        helper.make_node("MatMul", ["logits", "turned"], ["scores"], name="scores"),
    ]
    weights += [("head.weight", (SIZE, SIZE))]
    floats = [
        numpy_helper.from_array((rng.standard_normal(shape) / 12).astype(np.float32), name)
        for name, shape in weights
    ]
    value_info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "small",
        [value_info("x", TensorProto.FLOAT, ["rows", SIZE])],
        [value_info("logits", TensorProto.FLOAT, ["rows", SIZE]),
         value_info("scores", TensorProto.FLOAT, ["rows", "rows"])],
        floats,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
