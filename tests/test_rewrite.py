"""The helpers through which passes change a graph."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.rewrite import Rewriter


def test_attributes_have_the_type_of_their_value() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    given: dict[str, int | float | str | list[int]] = {
        "a": 1, "b": 1.0, "c": "1", "d": [1, 2], "e": True, "f": ir.DataType.FLOAT,
    }  # fmt: skip
    node = Rewriter(ir.Model(graph, ir_version=10)).node("Op", [], name="n", attributes=given)
    wanted = ir.node("Op", [], given, name="n")
    assert ir.to_proto(node).attribute == ir.to_proto(wanted).attribute
    assert [attr.type.name for attr in node.attributes.values()] == [
        "INT", "FLOAT", "STRING", "INTS", "INT", "INT",
    ]  # fmt: skip
