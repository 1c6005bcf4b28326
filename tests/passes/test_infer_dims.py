"""Sizes as polynomials, and shapes that follow from the names of the inputs' axes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fusing import CPU
from hypothesis import given
from hypothesis import strategies as st

from qgraph.capturing import capture
from qgraph.passes.dims import Size, at_most, broadcast, product, sizes_of
from qgraph.passes.infer_dims import infer_dims


def value(size: Size, known: dict[str, int]) -> int:
    return sum(f * int(np.prod([known[s] for s in symbols])) for symbols, f in size.terms)


SIZES = st.recursive(
    st.sampled_from([0, 1, 2, 7, "a", "b", "a + b"]).map(Size.of),
    lambda inner: (
        st.tuples(inner, inner).map(lambda p: p[0] + p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] * p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] - p[1])
    ),
    max_leaves=5,
)


@given(SIZES, SIZES, st.integers(1, 9), st.integers(1, 9))
def test_arithmetic_is_that_of_numbers(first: Size, second: Size, a: int, b: int) -> None:
    known = {"a": a, "b": b}
    x, y = value(first, known), value(second, known)
    assert value(first + second, known) == x + y
    assert value(first - second, known) == x - y
    assert value(first * second, known) == x * y
    quotient = (first * second).over(second)
    if quotient is not None and y:
        assert value(quotient, known) == x
    if first.number is not None:
        assert first.number == x
    if first.is_positive:
        assert x >= 0
        assert Size.of(first.dim) == first


def test_spelled_as_shapes_spell_it() -> None:
    batch, past = Size.of("batch"), Size.of("past_sequence + sequence")
    assert (batch * Size.of("sequence")).dim == "batch*sequence"
    assert past.dim == "past_sequence + sequence"
    assert past == Size.of("sequence + past_sequence")
    assert (Size.of(3) * batch + Size.of(1)).dim == "1 + 3*batch"
    assert Size.of("Min(64, sequence)") == at_most(64, Size.of("sequence"))
    assert Size.of("not an expression").dim == "not an expression"


def test_broadcasting_knows_what_meets() -> None:
    s, one, limit = Size.of("s"), Size.of(1), at_most(64, Size.of("s"))
    assert broadcast([s, one], [Size.of(4)]) == [s, Size.of(4)]
    assert broadcast([s], [s]) == [s]
    assert broadcast([s], [Size.of("t")]) == [None]
    assert broadcast([None], [Size.of(4)]) == [Size.of(4)]
    assert broadcast([None], [s]) == [None]
    assert broadcast([limit], [s]) == [s]
    assert product([s, Size.of(3), s]) == Size.of("3*s*s")
    assert product([s, None]) is None


TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, sequence, 12] x, float[batch, 2, past, 3] k, int64[batch, sequence] ids)
  => (float[p, q, r] y)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] far = {9223372036854775807},
 int64 i0 = {0}, int64 i1 = {1}, int64[1] last = {-1}, int64[4] heads = {0, 0, 4, 3},
 float f0 = {0}, float f1 = {1}, int64[1] twelve = {12}, int64[2] halves = {5, 7}>
{ BODY }"""
FEEDS = {
    "x": np.zeros((2, 5, 12), np.float32),
    "k": np.zeros((2, 2, 4, 3), np.float32),
    "ids": np.zeros((2, 5), np.int64),
}
KNOWN = {"batch": 2, "sequence": 5, "past": 4}
DIMS = (
    "s = Shape(x) b = Gather(s, i0) n = Gather(s, i1) "
    "b1 = Unsqueeze(b, zero) n1 = Unsqueeze(n, zero) "
)
CHOICE = (
    "few = Size(ids) c = Less(few, i1) y = If(c) <"
    "then_branch = a () => (t) {{ {} }}, else_branch = b () => (e) {{ {} }}>"
)
BODIES = {
    "heads": ("y = Reshape(x, heads)", "batch sequence 4 3"),
    "dims": (DIMS + "t = Concat<axis = 0>(b1, n1, last) y = Reshape(x, t)", "batch sequence 12"),
    "rows": (DIMS + "bn = Mul(b1, n1) t = Concat<axis = 0>(bn, last) y = Reshape(x, t)",
             "batch*sequence 12"),
    "free rows": ("t = Concat<axis = 0>(last, twelve) y = Reshape(x, t)", "batch*sequence 12"),
    "front": ("s = Shape(x) f = Slice(s, zero, last) t = Concat<axis = 0>(f, last) "
              "y = Reshape(x, t)", "batch sequence 12"),
    "cache": ("h = Reshape(x, heads) a = Transpose<perm = [0, 2, 1, 3]>(h) "
              "c = Slice(a, zero, two, one) y = Concat<axis = 2>(k, c)",
              "batch 2 past+sequence 3"),
    "expand": (DIMS + "t = Concat<axis = 0>(b1, last, n1) l = Shape(t) w = ConstantOfShape(l) "
               "neg = Equal(t, last) m = ConstantOfShape<value = int64[1] {1}>(l) "
               "e = Where(neg, m, t) o = ConstantOfShape<value = float[1] {0.0}>(e) "
               "y = Identity(o)", None),
    "range": (DIMS + "p = Range(i0, n, i1) u = Unsqueeze(p, zero) y = Cast<to = 1>(u)",
              "1 sequence"),
    "range of floats": (DIMS + "e = Cast<to = 1>(n) p = Range(f0, e, f1) y = Unsqueeze(p, zero)",
                        "1 sequence"),
    "split": ("y, z = Split<axis = 2>(x, halves)", "batch sequence 5"),
    "equal split": ("y, z = Split<axis = 2>(x)", "batch sequence 6"),
    "product": ("h = Reshape(x, heads) a = Transpose<perm = [0, 2, 1, 3]>(h) "
                "t = Transpose<perm = [0, 1, 3, 2]>(a) y = MatMul(a, t)",
                "batch 4 sequence sequence"),
    "mean": ("y = ReduceMean<axes = [-1]>(x)", "batch sequence 1"),
    "all but": ("y = Squeeze(m, two) m = ReduceMean<axes = [2]>(x)", None),
    "rest": ("y = Slice(x, one, far, one)", None),
    "added": ("m = ReduceMean<axes = [1]>(x) y = Add(x, m)", "batch sequence 12"),
    "both bodies": (CHOICE.format("s = Reshape(x, heads) t = Cos(s)",
                                  "h = Reshape(x, heads) e = Sin(h)"), "batch sequence 4 3"),
    "one body": (CHOICE.format("s = Reshape(x, heads) t = Cos(s)",
                               "h = Reshape(x, heads) e = Slice(h, zero, one, one)"),
                 "batch _ 4 3"),
    "other rank": (CHOICE.format("t = Reshape(x, heads)", "e = Cos(x)"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_shapes_are_those_that_the_runtime_makes(name: str) -> None:
    body, wanted = BODIES[name]
    if name == "all but":
        body = "m = ReduceMean<axes = [2]>(x) y = Squeeze(m, two)"
    graph = capture(ir.from_onnx_text(TEXT.replace("BODY", body)))
    for node in graph.model.graph:
        for output in node.outputs:
            output.shape = None
    infer_dims(graph.model.graph)
    shapes = {v.name: sizes_of(v.shape) for n in graph.model.graph for v in n.outputs}
    if wanted is not None:
        sizes = [Size.of(int(w) if w.isdigit() else w) for w in wanted.split()]
        assert shapes["y"] == [None if w == Size.of("_") else w for w in sizes]
    model = graph.model.clone()
    made = [v for n in model.graph for v in n.outputs]
    del model.graph.outputs[:]
    model.graph.outputs.extend(made)
    ran = CPU.open(model, reference=True).run(FEEDS)
    for each, sizes in shapes.items():
        for axis, size in enumerate(sizes or []):
            assert size is None or value(size, KNOWN) == ran[str(each)].shape[axis], each
