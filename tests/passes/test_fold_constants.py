"""What depends on small constants is computed, what changes nothing goes away."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from fusing import evaluate, run

from qgraph.capturing import capture
from qgraph.passes.fold_constants import fold_constants
from qgraph.rewrite import Rewriter


def folded(text: str) -> tuple[ir.Model, ir.Model]:
    before = capture(ir.from_onnx_text(text))
    after = before.clone()
    fold_constants(Rewriter(after.model), evaluate)
    after.verify()
    return before.model, after.model


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


X = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}


def test_axes_and_numbers_become_constants() -> None:
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[2, 3, 1] y)
        <int64 axis = {-1}, int64[1] flat = {-1}, double eps = {0.5}>
        { a = Reshape(axis, flat) e = Cast<to = 1>(eps) m = ReduceMean(x, a) y = Add(m, e) }"""
    )
    assert ops(after) == ["ReduceMean", "Add"]
    np.testing.assert_array_equal(run(after, X)["y"], run(before, X)["y"])


def test_codes_that_are_read_through_views_stay_stored_once() -> None:
    """And what is made of a few numbers stays so where it would be a table in the file."""
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (int64[n] i, uint8[2, 2] x, int64[m] j) => (uint8[n, 4] y, uint8[2, 2] z, int64[m] w)
        <uint8[2, 2] codes = {1, 2, 3, 4}, int64[2] flat = {1, 4}, int64 none = {0},
         int64 one = {1}, int64 far = {5000}>
        { t = Reshape(codes, flat) y = Gather(t, i) z = BitwiseXor(x, codes)
          r = Range(none, far, one) w = Gather(r, j) }"""
    )
    assert ops(after) == ["Reshape", "Gather", "BitwiseXor", "Range", "Gather"]
    assert set(after.graph.initializers) == set(before.graph.initializers)


def test_a_number_of_the_type_that_it_is_cast_to_is_a_constant() -> None:
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[2, 3, 4] y, float16[2, 3, 4] z) <float scale = {0.25}>
        { like = CastLike(scale, x) root = Sqrt(like) y = Mul(x, root)
          h = Cast<to = 10>(x) half = CastLike(scale, h) z = Mul(h, half) }"""
    )
    assert ops(after) == ["Mul", "Cast", "Mul"]
    found, wanted = run(after, X), run(before, X)
    for name in ("y", "z"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_what_changes_nothing_goes_away() -> None:
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[2, 3, 4] y, float[2, 3, 4] z)
        { a = Identity(x) b = Cast<to = 1>(a) c = Transpose<perm = [0, 1, 2]>(b) d = Relu(c)
          e = Cast<to = 11>(d) f = Cast<to = 1>(e) y = Neg(f) z = Identity(d) }"""
    )
    assert ops(after) == ["Relu", "Cast", "Cast", "Neg", "Identity"]  # an output keeps its name
    np.testing.assert_array_equal(run(after, X)["y"], run(before, X)["y"])


def test_a_slice_of_all_goes_away_and_any_other_stays() -> None:
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[2, 3, 4] y, float[2, 3, 4] z, float[2, m, 4] w)
        <int64[1] none = {0}, int64[1] one = {1}, int64[1] back = {-1}, int64[1] two = {2},
         int64 end = {9223372036854775807}, int64[1] start = {-1}, int64[1] least =
         {-9223372036854775808}, int64[1] flat = {-1}>
        { e = Reshape(end, flat) a = Slice(x, none, e, one, one) y = Neg(a)
          b = Slice(x, start, least, one, back) z = Neg(b)
          c = Slice(x, none, e, one, two) w = Neg(c) }"""
    )
    assert ops(after) == ["Neg", "Slice", "Neg", "Slice", "Neg"]
    for name, found in run(after, X).items():
        np.testing.assert_array_equal(found, run(before, X)[name])


def test_weights_parameters_and_large_results_stay() -> None:
    _, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[2, 3, 2] y, float[300, 300] z, float[2] w)
        <float[2, 4] weight = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] v = {1, 2}, float one = {1},
         int64[2] big = {300, 300}, float zero = {0}>
        { t = Transpose<perm = [1, 0]>(weight) y = MatMul(x, t) e = Expand(zero, big) z = Relu(e)
          p = Add(v, one) w = Relu(p) }"""
    )
    assert ops(after) == ["Transpose", "MatMul", "Expand", "Relu", "Add", "Relu"]


def test_what_is_drawn_at_random_stays() -> None:
    _, after = folded(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2] x) => (float[2] y) <int64[1] two = {2}>
        { r = RandomUniform<shape = [2]>() s = RandomUniformLike<dtype = 1>(two) a = Add(r, s)
          y = Add(a, x) }"""
    )
    assert ops(after) == ["RandomUniform", "RandomUniformLike", "Add", "Add"]


def test_what_the_runtime_cannot_compute_stays() -> None:
    before, after = folded(
        """<ir_version: 8, opset_import: ["" : 18, "other" : 1]>
        g (float[2] x) => (float[2] y) <bfloat16 one = {1}>
        { a = Not(one) b = Cast<to = 1>(a) y = Add(x, b) }"""
    )
    assert ops(after) == ops(before)
