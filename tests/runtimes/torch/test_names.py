"""Names and texts of a file never become Python, and every name that ONNX allows runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qgraph.errors import InputError
from qgraph.runtimes.torch.runtime import CPU

W = np.arange(6, dtype=np.float32).reshape(3, 2)
X = np.ones((2, 3), np.float32)
KEYWORDS = ["class", "lambda", "None", "True", "layers.0.in", "self"]
MODULE = ["graph", "_graph", "code", "_code", "meta", "recompile", "print_readable", "training"]
CHARACTERS = ['p"q', "a\\", "a\nb", "[/x]", "\u00e9", "\ufb01", "0", "a..b", ".", "x y", "a::b/c-d"]
SHADOWS = ["torch", "getattr", "device", "inf", "input", "__class__", "_buffers.a", "body_0"]


def session_of(nodes: list[Any], inputs: list[str], constants: dict[str, Any]) -> Any:
    """A session of `nodes`, which make y from float inputs [2, 3]."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("qgraph", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return CPU.open(model.SerializeToString())


def payload(folder: Path) -> tuple[Path, str]:
    """A file, and Python without quotes, dots or slashes in text that makes it."""
    path = folder / "made"
    code = f"open({str(path)!r}, 'w').close()"
    return path, f"exec(bytes([{','.join(str(byte) for byte in code.encode())}]))"


@pytest.mark.parametrize("name", KEYWORDS + MODULE + CHARACTERS + SHADOWS)
def test_any_name_of_a_constant_runs(name: str) -> None:
    found = session_of([helper.make_node("MatMul", ["x", name], ["y"])], ["x"], {name: W})
    np.testing.assert_array_equal(found.run({"x": X})["y"], X @ W)


@given(st.text(min_size=1, max_size=8).filter(lambda name: name not in ("x", "y")))
@settings(max_examples=60, deadline=None)
def test_every_name_of_a_constant_runs(name: str) -> None:
    session = session_of([helper.make_node("MatMul", ["x", name], ["y"])], ["x"], {name: W})
    np.testing.assert_array_equal(session.run({"x": X})["y"], X @ W)


@pytest.mark.parametrize(
    "form",
    [
        'training"),{}#',
        'training")\n    return ()\n{}\ndef other(self):\n    return getattr(self, "t',
        "x = 0\n{}\n#",
        "a',{},'",
    ],
)
@pytest.mark.parametrize("place", ["constant", "input", "node", "text", "format"])
def test_python_in_a_name_is_not_run(tmp_path: Path, place: str, form: str) -> None:
    made, code = payload(tmp_path)
    text = form.format(code)
    constant = text if place == "constant" else "w"
    x = text if place == "input" else "x"
    node = helper.make_node("MatMul", [x, constant], ["h"], name=text if place == "node" else "n")
    last = helper.make_node("Identity", ["h"], ["y"])
    if place == "text":
        last = helper.make_node("Gelu", ["h"], ["y"], approximate=text)
    if place == "format":
        last = helper.make_node(f"Linear{text}", ["h", constant, "x"], ["y"], domain="qgraph")
    try:
        session_of([node, last], [x], {constant: W}).run({x: X})
    except InputError:
        assert place in ("text", "format")
    assert not made.exists()


@pytest.mark.parametrize(
    "names", [("input", "input_1"), ("torch", "getattr"), ("\ufb01", "fi"), ("a b", "a-b")]
)
def test_inputs_are_told_apart(names: tuple[str, str]) -> None:
    session = session_of([helper.make_node("Sub", [*names], ["y"])], [*names], {})
    feeds = {names[0]: np.full((2, 3), 5, np.float32), names[1]: X}
    np.testing.assert_array_equal(session.run(feeds)["y"], np.full((2, 3), 4))


def test_a_name_of_the_module_is_free_further_down() -> None:
    nodes = [helper.make_node("MatMul", ["x", "layers.0.graph"], ["y"])]
    session = session_of(nodes, ["x"], {"layers.0.graph": W})
    assert set(session.module.state_dict()) == {"layers.0.graph"}
    assert torch.equal(session.module.state_dict()["layers.0.graph"], torch.from_numpy(W))
