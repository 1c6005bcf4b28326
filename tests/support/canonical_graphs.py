"""What the tests of canonical form share: models as text, running them, what is left of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import parser

from qgraph.frontends.canonical import canonicalize
from qgraph.frontends.notes import Note
from qgraph.scopes import scopes
from qgraph.verify import verify

Feeds = dict[str, np.ndarray]


def run(model: onnx.ModelProto | ir.Model, feeds: Feeds) -> list[np.ndarray]:
    """All outputs, from ONNX Runtime without graph optimizations."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def forget_node_names(graph: onnx.GraphProto) -> None:
    """ONNX Runtime refuses two nodes of one name in a graph; the names mean nothing to it."""
    for node in graph.node:
        node.name = ""
        for attribute in node.attribute:
            forget_node_names(attribute.g)


def capture(
    text: str | onnx.ModelProto, *feeds: Feeds, **options: Any
) -> tuple[ir.Model, list[Note]]:
    """The model in canonical form, after a check that it computes what it did, bit for bit."""
    proto = parser.parse_model(text) if isinstance(text, str) else text
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    forget_node_names(plain.graph)
    before = [run(plain, f) for f in feeds]
    model = ir.from_proto(proto)
    notes = canonicalize(model, **options)
    verify(model)
    for f, wanted in zip(feeds, before, strict=True):
        for found, want in zip(run(model, f), wanted, strict=True):
            np.testing.assert_array_equal(found, want)
    return model, notes


def ops(model: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.all_nodes()))


def main_constants(model: ir.Model) -> list[str]:
    return sorted(model.graph.initializers)


def body_constants(model: ir.Model) -> list[str]:
    return sorted(name for body in scopes(model.graph)[1:] for name in body.initializers)


def codes(notes: list[Note]) -> list[tuple[str, str]]:
    return [(note.code, note.name) for note in notes]


X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
SQUARE = "{1, 2, 3, 4, 5, 6, 7, 8, 9}"
ENDING = "{9, 8, 7, 6, 5, 4, 3, 2, 1}"

IF = f"""
<ir_version: 10, opset_import: ["": 18]>
main (float[2, 3] x, bool c) => (float[2, 3] y) <float[3, 3] W = {SQUARE}> {{
    [mm] h = MatMul (x, W)
    [choose] y = If (c) <
        then_branch = yes () => (float[2, 3] a) <float[3, 3] V = {SQUARE}, int64[2] to = {{2, 3}}>
        {{
            [mm] m = MatMul (h, V)
            [reshape] a = Reshape (m, to)
        }},
        else_branch = no () => (float[2, 3] b)
        <float[3, 3] V = {ENDING}, float[3] bias = {{1, 2, 3}}> {{
            [mm] m = MatMul (h, V)
            [add] b = Add (m, bias)
        }}
    >
}}
"""

LOOP = """
<ir_version: 10, opset_import: ["": 18]>
main (float[2, 3] x, int64 n) => (float[2, 3] y, z) {
    go = Constant <value = bool {1}> ()
    y, z = Loop (n, go, x) <body = step (int64 i, bool on, float[2, 3] h)
        => (bool on_out, float[2, 3] h_out, float[3, 3] seen) {
        on_out = Identity (on)
        [held] W = Constant <value = float[3, 3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> ()
        to = Constant <value_ints = [2, 3]> ()
        m = MatMul (h, W)
        h_out = Reshape (m, to)
        [given] seen = Constant <value = float[3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}> ()
    }>
}
"""
