"""If, Loop and Scan: run, exported and compiled, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.capturing import capture
from qgraph.errors import InputError
from qgraph.runtimes.torch.executor import build

ROWS = {0: torch.export.Dim.DYNAMIC}
TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def rows(count: int) -> Any:
    return torch.linspace(-1, 2, count * 4).reshape(count, 4)


IF = """g (float[M, 4] x, bool c) => (y) {
    w = Constant<value = float[1] {2.0}>()
    y = If (c) <then_branch = t () => (a) { a = Mul(x, w) },
                else_branch = e () => (b) { b = Neg(x) }> }"""
ALIAS = """g (float[M, 4] x, bool c) => (y) {
    y = If (c) <then_branch = t () => (a) { a = Identity(x) },
                else_branch = e () => (b) { b = Neg(x) }> }"""
NESTED = """g (float[M, 4] x, bool c) => (y) {
    z = Neg(x)
    y = If (c) <then_branch = t () => (a) {
            a = If (c) <then_branch = u () => (p) { p = Add(x, z) },
                        else_branch = v () => (q) { q = Add(z, z) }> },
                else_branch = e () => (b) { b = Mul(z, x) }> }"""
COUNTED = """g (float[M, 4] x) => (y, s) {
    n = Constant<value_int = 3>()  t = Constant<value = bool {1}>()
    y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[M, 4] v) => (d, u, w) {
        d = Identity(c)  f = Cast<to = 1>(i)  u = Add(v, f)  w = ReduceSum(u) }> }"""
WHILE = """g (float[M, 4] x, int64 n) => (y) {
    t = Constant<value = bool {1}>()
    y = Loop (n, t, x) <body = b (int64 i, bool c, float[M, 4] v) => (d, u) {
        k = Constant<value = float {100.0}>()  u = Add(v, v)  m = ReduceMax<keepdims = 0>(u)
        d = Less(m, k) }> }"""
BY_SHAPE = """g (float[M, 4] x) => (y) {
    t = Constant<value = bool {1}>()  sh = Shape<end = 1>(x)  n = Squeeze(sh)
    y = Loop (n, t, x) <body = b (int64 i, bool c, float[M, 4] v) => (d, u) {
        d = Identity(c)  k = Constant<value = float {1.5}>()  u = Mul(v, k) }> }"""
SCAN = """g (float[M, 4] x, float[4] h) => (y, s) {
    y, s = Scan <num_scan_inputs = 1, body = b (float[4] v, float[4] r) => (u, w) {
        u = Add(v, r)  t = Tanh(u)  w = Mul(t, h) }> (h, x) }"""
BACKWARD = """g (float[M, 4] x, float[M] h) => (y, s) {
    y, s = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
                 scan_output_axes = [1], scan_output_directions = [1],
                 body = b (float[M] v, float[M] r) => (u, w) {
        u = Add(v, r)  w = Tanh(u) }> (h, x) }"""
STACKING = """g (float[M, 4] x, int64 n) => (s) {
    t = Constant<value = bool {1}>()
    y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[M, 4] v) => (d, u, w) {
        d = Identity(c)  u = Add(v, v)  w = ReduceSum(u) }> }"""

CASES = {
    "if": (IF, [(rows(3), TRUE), (rows(5), FALSE)], (ROWS, None)),
    "if that hands its input on": (ALIAS, [(rows(3), TRUE), (rows(5), FALSE)], (ROWS, None)),
    "if within if": (NESTED, [(rows(3), TRUE), (rows(5), FALSE)], (ROWS, None)),
    "loop of constant length": (COUNTED, [(rows(3),), (rows(5),)], (ROWS,)),
    "loop until": (WHILE, [(rows(3), torch.tensor(3)), (rows(5), torch.tensor(40))], (ROWS, None)),
    "loop as long as a shape": (BY_SHAPE, [(rows(3),), (rows(5),)], (ROWS,)),
    "scan": (SCAN, [(rows(3), rows(1)[0]), (rows(6), rows(1)[0])], (ROWS, None)),
    "scan backward": (BACKWARD, [(rows(3), rows(3)[:, 0]), (rows(6), rows(6)[:, 1])], (ROWS, ROWS)),
}


def pair(text: str) -> tuple[Any, Any]:
    """The module, and a call that gives ONNX Runtime's results."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    module = build(capture(ir.serde.deserialize_model(model)).model)
    runtime = registry.load("target", "ort-cpu").open(model.SerializeToString(), reference=True)
    names = [value.name for value in model.graph.input]

    def wanted(feeds: Any) -> list[Any]:
        arrays = [feed.numpy() for feed in feeds]
        return list(runtime.run(dict(zip(names, arrays, strict=True))).values())

    return module, wanted


def check(run: Any, wanted: Any, feeds: Any) -> None:
    for found, expected in zip(run(*feeds), wanted(feeds), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_runs_exported_and_compiled(name: str) -> None:
    text, feeds, shapes = CASES[name]
    module, wanted = pair(text)
    program = torch.export.export(module, feeds[0], dynamic_shapes=shapes)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for run in (module, program.module(), compiled):
        for each in feeds:
            check(run, wanted, each)


def test_control_flow_on_data_stays_in_the_program() -> None:
    found = {}
    for name in ("if", "loop until", "scan", "loop of constant length"):
        text, feeds, shapes = CASES[name]
        program = torch.export.export(pair(text)[0], feeds[0], dynamic_shapes=shapes)
        called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        found[name] = called & {"cond", "while_loop", "scan"}
    assert found == {
        "if": {"cond"},
        "loop until": {"while_loop"},
        "scan": {"scan"},
        "loop of constant length": set(),
    }


def test_a_loop_that_stacks_runs_and_says_that_it_cannot_be_traced() -> None:
    module, wanted = pair(STACKING)
    feeds = (rows(2), torch.tensor(4))
    check(module, wanted, feeds)
    with pytest.raises(InputError, match=r"stacks results .* cannot be traced"):
        torch.export.export(module, feeds)


def test_a_scan_and_a_loop_of_nothing() -> None:
    module, _ = pair(SCAN)
    state, stacked = module(torch.zeros(0, 4), torch.ones(4))
    assert (state.tolist(), stacked.shape) == ([1, 1, 1, 1], (0, 4))


@pytest.mark.parametrize("open_as", ["captured", "file"])
@pytest.mark.parametrize("sizes", [(3, 4), (0, 4)])
def test_a_loop_of_nothing_gives_the_type_and_rank_of_its_results(
    open_as: str, sizes: tuple[int, int]
) -> None:
    text = """g (float[M, 4] x, int64 n) => (float[M, 4] y, int64[K, M, 4] s, bool[K] t) {
        v = Constant<value = bool {1}>()
        y, s, t = Loop (n, v, x) <body = b (int64 i, bool c, float[M, 4] v)
                => (bool d, float[M, 4] u, int64[M, 4] w, bool e) {
            d = Identity(c)  u = Add(v, v)  w = Cast<to = 7>(u)  e = Identity(c) }> }"""
    module, wanted = pair(text)
    if open_as == "file":
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
        module = registry.load("target", "torch").open(model.SerializeToString()).module
    for count in (0, 2):
        feeds = torch.ones(sizes), torch.tensor(count)
        for found, expected in zip(module(*feeds), wanted(feeds), strict=True):
            assert (found.numpy().dtype, found.ndim) == (expected.dtype, expected.ndim)
            assert found.shape[0] == expected.shape[0]
