"""Walks over a whole model, against onnx-ir's own."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from qgraph.model_tensors import all_graphs, all_nodes, all_tensors, has_unread, remove_unread

TEXT = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
main (bool c, float[2] x) => (float[2] y)
<float[2] read = {1, 2}, float[2] unread = {3, 4}> {
    a = Constant<value = float[1] {5}>()
    b = If (c) <
        then_branch = outer () => (t) {
            d = Constant<value = float[1] {6}>()
            t = If (c) <
                then_branch = inner () => (u) {
                    e = Constant<value = float[1] {7}>()
                    u = Add(e, x)
                },
                else_branch = empty () => (v) { v = Identity(read) }
            >
        },
        else_branch = other () => (w) { w = Constant<value = float[1] {8}>() }
    >
    g = f.called(b)
    y = Add(g, a)
}
<domain: "f", opset_import: ["" : 21]> called (p) => (q) {
    k = Constant<value = bool {1}>()
    q = If (k) <
        then_branch = in_function () => (r) { r = Neg(p) },
        else_branch = in_function_too () => (s) { s = Constant<value = float[1] {9}>() }
    >
}
"""


@pytest.fixture
def model() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT))


def test_every_graph_and_node_in_the_order_of_declaration(model: ir.Model) -> None:
    (function,) = model.functions.values()
    graphs = list(all_graphs(model))
    assert graphs == [*model.graphs(), *function.subgraphs()]
    assert [graph.name for graph in graphs] == [
        "main", "outer", "inner", "empty", "other", "in_function", "in_function_too",
    ]  # fmt: skip
    assert list(all_nodes(model)) == [*model.graph.all_nodes(), *function.all_nodes()]


def test_tensors_of_initializers_then_of_attributes(model: ir.Model) -> None:
    firsts = [float(tensor.numpy().reshape(-1)[0]) for tensor in all_tensors(model)]
    assert firsts == [1, 3, 5, 6, 7, 8, 1, 9]


def test_what_is_read_in_a_body_stays(model: ir.Model) -> None:
    assert has_unread(model)
    remove_unread(model)
    assert list(model.graph.initializers) == ["read"]
    assert not has_unread(model)
