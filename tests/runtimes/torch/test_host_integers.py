"""Integers that shapes give: their width and type, as ONNX Runtime has them.

The models are opened as files are, which say the types of no values between nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.errors import InputError
from qgraph.runtimes.torch.executor import build
from qgraph.runtimes.torch.onnx_ops.arithmetic import power
from tests.runtimes.torch.one_node import f32, run_onnxruntime

WIDTHS = {
    "a size as uint8": """g (float[N] x) => (int64[1] y) {
        s = Shape(x)  c = Cast<to = 2>(s)  y = Cast<to = 7>(c) }""",
    "a product of int32": """g (float[N] x) => (int64[1] y) {
        k = Constant<value = int32[1] {1073741824}>()
        s = Shape(x)  c = Cast<to = 6>(s)  m = Mul(c, k)  y = Cast<to = 7>(m) }""",
    "a sum of int32 constants": """g (float[N] x) => (float[N] y) {
        k = Constant<value = int32[1] {2147483647}>()
        m = Add(k, k)  c = Cast<to = 1>(m)  y = Add(x, c) }""",
    "a sum of uint8 constants": """g (float[N] x) => (float[N] y) {
        p = Constant<value = uint8[1] {200}>()  q = Constant<value = uint8[1] {100}>()
        s = Add(p, q)  c = Cast<to = 1>(s)  y = Add(x, c) }""",
    "a difference of uint8 constants": """g (float[N] x) => (float[N] y) {
        p = Constant<value = uint8[1] {1}>()  q = Constant<value = uint8[1] {2}>()
        s = Sub(p, q)  c = Cast<to = 1>(s)  y = Add(x, c) }""",
    "a product of int64 constants": """g (float[N] x) => (float[N] y) {
        p = Constant<value = int64[1] {4611686018427387904}>()  q = Constant<value_ints = [4]>()
        s = Mul(p, q)  c = Cast<to = 1>(s)  y = Add(x, c) }""",
    "the opposite of a uint8 constant's int8": """g (float[N] x) => (float[N] y) {
        p = Constant<value = uint8[1] {128}>()  i = Cast<to = 3>(p)
        n = Neg(i)  c = Cast<to = 1>(n)  y = Add(x, c) }""",
    "a bound cut to int32": """g (float[N] x) => (float[M] y) {
        a = Constant<value = int32[1] {0}>()  e = Constant<value = int64[1] {9223372036854775807}>()
        c = Cast<to = 6>(e)  y = Slice(x, a, c) }""",
    "powers of a size": """g (float[N] x) => (int64[1] y, int64[1] z) {
        a = Constant<value_ints = [2]>()  b = Constant<value = float {0.5}>()
        s = Shape(x)  y = Pow(s, a)  z = Pow(s, b) }""",
    "remainders of a negative size": """g (float[N] x) => (int64[1] y, int64[1] z) {
        a = Constant<value_ints = [7]>()
        s = Shape(x)  n = Neg(s)  y = Mod<fmod = 1>(n, a)  z = Mod(n, a) }""",
    "a remainder as a shape": """g (float[N] x) => (float[M] y) {
        a = Constant<value_ints = [1000]>()
        s = Shape(x)  m = Mod<fmod = 1>(s, a)  y = Reshape(x, m) }""",
}
TYPES = {
    "given out": "y = Identity(c)",
    "with another axis": "z = Constant<value_ints = [0]>()  y = Unsqueeze(c, z)",
    "broadcast": "e = Constant<value_ints = [3, 2]>()  u = Expand(c, e)  y = Mul(u, u)",
    "as a matrix": "e = Constant<value_ints = [1, -1]>()  y = Reshape(c, e)",
    "picked by data": "i = ArgMax<keepdims = 0>(x)  y = Gather(c, i)",
    "chosen by data": """m = Less(x, x)  w = ReduceMax<keepdims = 0, axes = [1]>(x)
        d = Less(w, w)  y = Where(d, c, c)""",
    "counted": """z = Constant<value = int32 {0}>()  o = Constant<value = int32 {1}>()
        i = Constant<value_int = 0>()  n = Gather(c, i)  y = Range(z, n, o)""",
}
CAST_LIKE = {
    "a tensor like one": "a = Add(x, x)  y = CastLike(i, a)",
    "a tensor like an untyped one": "a = Cast<to = 7>(x)  y = CastLike(x, a)",
    "a tensor like a size": "s = Shape(x)  c = Cast<to = 6>(s)  y = CastLike(x, c)",
    "a size like a tensor": "s = Shape(x)  y = CastLike(s, x)",
}


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')


def opened(model: onnx.ModelProto) -> Any:
    return registry.load("target", "torch").open(model.SerializeToString())


def check(text: str, *feeds: Any) -> None:
    model = parsed(text)
    given = dict(zip([value.name for value in model.graph.input], feeds, strict=True))
    session = opened(model)
    wanted = run_onnxruntime(model, given)
    for found, expected in zip(session.run(given).values(), wanted, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", WIDTHS)
def test_integers_keep_their_width(name: str) -> None:
    check(WIDTHS[name], f32(300))


@pytest.mark.parametrize("name", TYPES)
def test_integers_keep_their_type(name: str) -> None:
    text = f"g (float[M, N] x) => (y) {{ s = Shape(x)  c = Cast<to = 6>(s)  {TYPES[name]} }}"
    check(text, f32(2, 2))


@pytest.mark.parametrize("name", CAST_LIKE)
def test_cast_like_needs_no_types_in_the_file(name: str) -> None:
    check(f"g (float[M, N] x, int64[K] i) => (y) {{ {CAST_LIKE[name]} }}", f32(2, 3), np.arange(3))


def test_a_traced_size_is_cut_to_a_narrow_type() -> None:
    text = WIDTHS["a size as uint8"]
    module = opened(parsed(text)).module
    dynamic = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, (torch.zeros(300),), dynamic_shapes=(dynamic,))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for run in (program.module(), compiled):
        assert [run(torch.zeros(n))[0].tolist() for n in (300, 5, 513)] == [[44], [5], [1]]


def test_a_power_of_huge_integers_takes_no_time() -> None:
    session = opened(
        parsed("""g (float[N] x) => (float[N] y) {
            a = Constant<value_ints = [10000001]>()  p = Pow(a, a)  q = Pow(p, a)
            c = Cast<to = 1>(q)  y = Add(x, c) }""")
    )
    wanted = (torch.tensor(10000001) ** 10000001) ** 10000001
    assert session.run({"x": np.zeros(1, np.float32)})["y"] == wanted.float().numpy()


def test_negative_powers_of_integers() -> None:
    assert power((5, 1, -1, -1), (-2, -3, -3, -4)) == (0, 1, -1, 1)
    with pytest.raises(InputError, match="by zero"):
        power((0,), (-1,))
    with pytest.raises(InputError, match="no integer"):
        power((10**7,), 1e300)


def test_a_division_by_zero_fails_where_it_runs() -> None:
    text = """g (float[N] x, bool c) => (y) {
        a = Constant<value_ints = [4]>()  b = Constant<value_ints = [0]>()
        y = If (c) <then_branch = t () => (p) { d = Div(a, b)  p = Reshape(x, d) },
                    else_branch = e () => (q) { q = Neg(x) }> }"""
    session = opened(parsed(text))
    assert session.run({"x": f32(4), "c": np.array(False)})["y"].tolist() == (-f32(4)).tolist()
    with pytest.raises(InputError, match="by zero"):
        session.run({"x": f32(4), "c": np.array(True)})


def test_a_float_bound_of_range_stays_on_the_host() -> None:
    """As exporters write arange(n): a float constant, cast like the size."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        g (int64[B, N] x) => (int64[M] y) <float zero = {0}, float one = {1}> {
            s = Shape <start = 1, end = 2> (x)
            axis = Constant <value_ints = [0]> ()
            n = Squeeze (s, axis)
            first = CastLike (zero, n)
            step = CastLike (one, n)
            y = Range (first, n, step)
        }"""
    module = build(ir.from_onnx_text(text))
    x = torch.zeros(2, 5, dtype=torch.int64)
    dims = {0: torch.export.Dim("b"), 1: torch.export.Dim("n")}
    program = torch.export.export(module, (x,), dynamic_shapes=(dims,))
    assert program.module()(x[:, :3])[0].tolist() == [0, 1, 2]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    assert compiled(x)[0].tolist() == [0, 1, 2, 3, 4]
