"""Damaged models are refused in words, and the errors of our own code stay what they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph import capturing, sites
from qgraph.errors import GraphError, InputError
from qgraph.node_form import check_nodes

PLAIN = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (int64[S] ids, float[M, 32] x) => (float[M, 32] y, float[S, 32] e, float[M, 32] q)
<int64[1] zero = {0}, int64[1] end = {32}, int64[2] shape = {32, 32}, int64[2] sizes = {32, 32}> {
    e = Gather <axis = 0> (table, ids)
    [turned] t = Transpose <perm = [1, 0]> (a)
    left, right = Split <axis = 0> (wide, sizes)
    [cut] c = Slice (left, zero, end, zero)
    [cast] w = Cast <to = 1> (c)
    [shaped] s = Reshape (w, shape)
    h = MatMul (x, t)
    g = MatMul (h, s)
    y = Gemm <alpha = 0.5, transB = 1> (g, right)
    q = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 32> (x, codes, scales)
}
"""
WEIGHTS = {
    "table": np.ones((9, 32), np.float32), "a": np.ones((32, 32), np.float32),
    "wide": np.ones((64, 32), np.float32), "codes": np.ones((32, 1, 16), np.uint8),
    "scales": np.ones((32, 1), np.float32),
}  # fmt: skip


def plain() -> onnx.ModelProto:
    model = onnx.parser.parse_model(PLAIN)
    for name, array in WEIGHTS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def damaged() -> Iterator[tuple[str, onnx.ModelProto]]:
    """The model with one thing wrong, for each node, input, attribute and constant."""
    for at, node in enumerate(plain().graph.node):
        for position in range(len(node.input)):
            for drop in (True, False):
                model = plain()
                inputs = model.graph.node[at].input
                if drop:
                    del inputs[position]
                else:
                    inputs[position] = ""
                yield f"{node.op_type} input {position}", model
        for position, attribute in enumerate(node.attribute):
            for value in ("text", 0, -9, 99, [5, 5], None):
                model = plain()
                del model.graph.node[at].attribute[position]
                if value is not None:
                    made = onnx.helper.make_attribute(attribute.name, value)
                    model.graph.node[at].attribute.append(made)
                yield f"{node.op_type} {attribute.name} {value}", model
        model = plain()
        del model.graph.node[at].output[:]
        yield f"{node.op_type} outputs", model
    for at, tensor in enumerate(plain().graph.initializer):
        for dims in ([], [7], [*tensor.dims, 3], [-1]):
            model = plain()
            del model.graph.initializer[at].dims[:]
            model.graph.initializer[at].dims.extend(dims)
            yield f"{tensor.name} {dims}", model


def look(model: onnx.ModelProto) -> int:
    """The number of sites of a model as a file has it."""
    return len(capturing._canonical(ir.serde.deserialize_model(model)).sites())


def test_every_damage_is_told_or_harmless() -> None:
    assert look(plain()) == 5
    refused = []
    for what, model in damaged():
        try:
            look(model)
        except InputError:  # any other error fails the test
            refused.append(what)
    assert len(refused) >= 60
    assert {"MatMul input 0", "Gemm alpha text", "Transpose perm 0", "MatMulNBits K None"} <= {
        *refused
    }


WRONG = {
    "inputs": ("MatMul (h, s)", "MatMul (h)", r"node g \(MatMul\).* has 1 input, wanted 2"),
    "more": ("MatMul (h, s)", "MatMul (h, s, s)", r"has 3 inputs, wanted 2"),
    "left out": ("MatMul (h, s)", 'MatMul ("", s)', r"its input 0 is left out"),
    "type": ("perm = [1, 0]", "perm = 1.5", r"turned \(Transpose\).*perm is of the type FLOAT"),
    "zero": ("block_size = 32", "block_size = 0", r"block_size is 0, wanted 1 or more"),
    "absent": ("K = 32, ", "", r"it has no attribute K"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named(kind: str) -> None:
    old, new, words = WRONG[kind]
    assert old in PLAIN
    model = ir.serde.deserialize_model(onnx.parser.parse_model(PLAIN.replace(old, new)))
    with pytest.raises(GraphError, match=words):
        check_nodes(model)


def test_bodies_and_functions_are_looked_into() -> None:
    inner = onnx.helper.make_node("MatMul", ["x"], ["r"], "inner")
    result = onnx.helper.make_tensor_value_info("r", 1, None)
    body = onnx.helper.make_graph([inner], "body", [], [result])
    model = plain()
    branch = onnx.helper.make_node("If", ["ids"], ["z"], then_branch=body, else_branch=body)
    model.graph.node.append(branch)
    with pytest.raises(GraphError, match=r"inner \(MatMul\)"):
        check_nodes(ir.serde.deserialize_model(model))


def test_a_constant_in_the_file_has_the_length_of_its_shape() -> None:
    model = plain()
    model.graph.initializer[-1].dims[:] = [32, 2]
    with pytest.raises(GraphError, match=r"constant scales is damaged: it has 128 bytes.*256"):
        check_nodes(ir.serde.deserialize_model(model))


@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError, IndexError])
def test_an_error_of_ours_does_not_blame_the_model(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(node: ir.Node) -> None:
        raise error("ours")

    graph = capturing.capture(ir.serde.deserialize_model(plain()))
    monkeypatch.setitem(sites._FINDERS, ("", "MatMul"), fails)
    with pytest.raises(error, match="ours"):
        graph.sites()
