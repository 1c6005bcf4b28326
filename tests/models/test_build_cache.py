"""A finished build returns at once; anything else is built again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.errors import InputError
from qgraph.models.build_cache import cached_build
from qgraph.models.download import sha256_of
from qgraph.torch_onnx import strip


class Maker:
    """Makes y = x + w with 1024 weights, and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> ir.Model:
        self.calls += 1
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1024]))
        w = ir.Value(name="w", const_value=ir.tensor(np.full(1024, self.calls, np.float32)))
        node = ir.node("Add", [x, w])
        graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=[w], name="g")
        node.outputs[0].name = "y"
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/model.py", line 1'
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['layers.0']"
        node.doc_string = 'File "/home/me/model.py"'
        return ir.Model(graph, ir_version=10)


def test_a_finished_build_is_not_made_again(tmp_path: Path) -> None:
    make = Maker()
    paths = [cached_build(tmp_path / "new", "m", {"version": 1}, make) for _ in range(2)]
    assert (make.calls, paths) == (1, [tmp_path / "new" / "m.onnx"] * 2)
    mark = json.loads((tmp_path / "new" / "m.json").read_text())
    assert mark["recipe"] == {"version": 1}
    assert mark["files"]["m.onnx"]["sha256"] == sha256_of(paths[0])
    assert mark["files"]["m.onnx.data"]["bytes"] == 4096
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["m.json", "m.onnx", "m.onnx.data"]


@pytest.mark.parametrize("damage", ["recipe", "no mark", "broken mark", "short data", "no graph"])
def test_anything_else_is_made_again(tmp_path: Path, damage: str) -> None:
    make = Maker()
    path = cached_build(tmp_path, "m", {"version": 1}, make)
    mark, data = tmp_path / "m.json", tmp_path / "m.onnx.data"
    match damage:
        case "no mark":
            mark.unlink()
        case "broken mark":
            mark.write_text('{"recipe": {"version": 1}, "files": []}')
        case "short data":
            data.write_bytes(data.read_bytes()[:-1])
        case "no graph":
            path.unlink()
    cached_build(tmp_path, "m", {"version": 2 if damage == "recipe" else 1}, make)
    assert make.calls == 2
    assert ir.load(path).graph.initializers["w"].const_value.numpy()[0] == 2.0


def test_a_folder_that_is_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make = Maker()
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(InputError, match=r"cannot write the model to .*file is no folder"):
            cached_build(folder, "m", {}, make)
    assert make.calls == 0


def test_strip_removes_paths_and_keeps_scopes() -> None:
    (node,) = strip(Maker()()).graph
    assert dict(node.metadata_props) == {"pkg.torch.onnx.name_scopes": "['layers.0']"}
    assert node.doc_string is None
