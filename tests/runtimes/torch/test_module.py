"""The module pickles as its graph, with its weights, bodies and the nodes' origins."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch

import qgraph
from qgraph.capturing import capture
from qgraph.models import tiny
from qgraph.runtimes.torch.executor import build

IDS = torch.arange(18).reshape(2, 9) * 7 % 256
BRANCHES = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N] x, float[1] w) => (float[N] y) {
    total = ReduceSum<keepdims = 0>(x)
    zero = Constant<value_float = 0.0>()
    above = Greater(total, zero)
    y = If (above) <
        then_branch = yes () => (a) { c = Cos(x)
            a = Mul(c, w) },
        else_branch = no () => (b) { b = Sub(x, w) }
    >
}"""


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": pickled, "torch.save": saved, "deepcopy": copy.deepcopy}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("decoder")
    result = qgraph.optimize(tiny.build(folder), folder / "q.onnx", format="int4", check=False)
    return build(result.graph.model)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_the_same(decoder: Any, way: str) -> None:
    again = COPIES[way](decoder)
    assert torch.equal(again(IDS)[0], decoder(IDS)[0])
    assert list(again.state_dict()) == list(decoder.state_dict())
    origins = [node.meta.get("onnx") for node in again.graph.nodes]
    assert origins == [node.meta.get("onnx") for node in decoder.graph.nodes]
    assert again.training == decoder.training


@pytest.mark.parametrize("way", COPIES)
def test_bodies_are_copied(way: str) -> None:
    model = ir.serde.deserialize_model(onnx.parser.parse_model(BRANCHES))
    module = build(capture(model).model)
    again = COPIES[way](module)
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])):
        assert torch.equal(again(x, torch.ones(1))[0], module(x, torch.ones(1))[0])


def test_a_copy_has_its_own_weights(decoder: Any) -> None:
    before = decoder(IDS)[0]
    again = pickled(decoder).eval()
    for buffer in again.buffers():
        buffer.zero_()
    assert not torch.equal(again(IDS)[0], before)
    assert torch.equal(decoder(IDS)[0], before)
