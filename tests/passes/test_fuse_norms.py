"""RMSNorm and LayerNorm in every spelling, and with the addition in front of them."""

from __future__ import annotations

import numpy as np
import pytest
from fusing import Fused, fuse
from hypothesis import given, settings
from hypothesis import strategies as st

RNG = np.random.default_rng(0)
K = 16


def model(
    body: str, *, opset: int = 18, shape: str = "batch, sequence, 16", extra: str = ""
) -> str:
    """A graph from x to y with γ `g`, β `b` and constants `two`, `one`, `half`, `axes`, `eps`."""

    def vector(name: str, mean: float) -> str:
        return f"float[16] {name} = {{{', '.join(f'{v:.3f}' for v in RNG.normal(mean, 0.2, K))}}}"

    return f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g (float[{shape}] x{extra}) => (float[{shape}] y)
    <{vector("g", 1)}, {vector("b", 0)}, float two = {{2}}, float one = {{1}}, float half = {{0.5}},
     float minus = {{-0.5}}, float eps = {{0.00001}}, int64[1] axes = {{-1}},
     int64[1] last = {{2}}, int64[1] first = {{1}}>
    {{ {body} }}"""


def x(*shape: int) -> np.ndarray:
    return RNG.normal(0.3, 2, shape).astype(np.float32)


def mean(opset: int, what: str, axes: str = "axes") -> str:
    return f"ReduceMean({what}, {axes})" if opset >= 18 else f"ReduceMean<axes = [-1]>({what})"


SQUARES = {"Pow": "s = Pow(x, two)", "Mul": "s = Mul(x, x)"}
ROOTS = {
    "Reciprocal": "r = Sqrt(v)  i = Reciprocal(r)  n = Mul(x, i)",
    "one over": "r = Sqrt(v)  i = Div(one, r)  n = Mul(i, x)",
    "Div": "r = Sqrt(v)  n = Div(x, r)",
    "Pow half": "r = Pow(v, half)  n = Div(x, r)",
    "Pow minus half": "i = Pow(v, minus)  n = Mul(x, i)",
}


@pytest.mark.parametrize("opset", [13, 18, 23])
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
def test_rms_norm_in_every_spelling(opset: int, square: str, root: str) -> None:
    body = f"{SQUARES[square]} m = {mean(opset, 's')} v = Add(eps, m) {ROOTS[root]} y = Mul(g, n)"
    found = fuse(model(body, opset=opset))
    assert found.ops == {"SimplifiedLayerNormalization": 1}
    assert found.difference({"x": x(2, 3, K)}) < 1e-5
    (node,) = found.after.model.graph
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-5)
    assert node.outputs[0].name == "y"


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("root", ROOTS)
def test_layer_norm_in_every_spelling(opset: int, root: str) -> None:
    spelled = ROOTS[root].replace("(x, ", "(c, ").replace(", x)", ", c)")
    body = (
        f"a = {mean(opset, 'x')} c = Sub(x, a) s = Pow(c, two) m = {mean(opset, 's')} "
        f"v = Add(m, eps) {spelled} w = Mul(n, g) y = Add(w, b)"
    )
    found = fuse(model(body, opset=opset))
    assert found.ops == {"LayerNormalization": 1}
    assert found.done == {"layer_norm": 1}
    assert found.difference({"x": x(2, 3, K)}) < 1e-5


RMS = "s = Pow(x, two) m = ReduceMean(s, axes) v = Add(m, eps) r = Sqrt(v) n = Div(x, r) "


def test_a_norm_without_scale_gets_ones() -> None:
    found = fuse(model(RMS.replace("n = ", "y = ")))
    assert found.ops == {"SimplifiedLayerNormalization": 1}
    assert found.difference({"x": x(2, 3, K)}) < 1e-5


def test_one_plus_weight_is_a_scale() -> None:
    found = fuse(model(RMS + "h = Add(g, one) y = Mul(n, h)"))
    assert found.ops == {"SimplifiedLayerNormalization": 1, "Add": 1}
    assert found.difference({"x": x(2, 3, K)}) < 1e-5


def test_heads_are_normalized_in_their_four_axes() -> None:
    found = fuse(model(RMS + "y = Mul(n, g)", shape="batch, sequence, 4, 16"))
    assert found.ops == {"SimplifiedLayerNormalization": 1}
    assert found.difference({"x": x(2, 3, 4, K)}) < 1e-5


def test_float32_that_was_float16_on_the_way_is_as_exact_as_that() -> None:
    """As where the result is rounded to bytes: what is fused differs by float16's rounding."""
    found = fuse("""<ir_version: 8, opset_import: ["" : 18]>
    g (float16[batch, sequence, 4] x) => (float[batch, sequence, 4] y)
    <float[4] g = {1.5, 0.5, 1.0, 2.0}, float two = {2}, float eps = {0.00001},
     int64[1] axes = {-1}>
    { c = Cast <to = 1> (x) s = Pow(c, two) m = ReduceMean(s, axes) v = Add(m, eps) r = Sqrt(v)
      n = Div(c, r) t = Mul(g, n) h = Cast <to = 10> (t) y = Cast <to = 1> (h) }""")
    assert found.done["rms_norm"] == 1
    assert 1e-5 < found.difference({"x": x(2, 3, 4).astype(np.float16)}) < 2e-3


def test_half_precision_is_cast_within() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float16[batch, sequence, 4] x) => (float16[batch, sequence, 4] y)
    <float16[4] g = {15872, 14336, 15360, 16384}, float two = {2}, float eps = {0.00001},
     int64[1] axes = {-1}>
    { wide = Cast<to = 1>(x) s = Pow(wide, two) m = ReduceMean(s, axes) v = Add(m, eps)
      r = Sqrt(v) i = Reciprocal(r) n = Mul(wide, i) h = Cast<to = 10>(n) y = Mul(g, h) }"""
    found = fuse(text)
    assert found.ops == {"SimplifiedLayerNormalization": 1}
    assert found.difference({"x": x(2, 3, 4).astype(np.float16)}) < 5e-3


@pytest.mark.parametrize(
    "body,edge",
    [
        (RMS.replace("(s, axes)", "(s, first)") + "y = Mul(n, g)", "over other axes"),
        (RMS.replace("Add(m, eps)", "Max(m, eps)") + "y = Mul(n, g)", "no ε is added to m"),
        (RMS.replace("Sqrt(v)", "Exp(v)") + "y = Mul(n, g)", "no square root is taken of v"),
        (RMS.replace("Div(x, r)", "Div(s, r)") + "y = Mul(n, g)", "x is not what is divided by r"),
        (RMS.replace("Div(x, r)", "Div(r, x)") + "y = Mul(n, g)", "x is not what is divided by r"),
        (RMS.replace("Add(m, eps)", "Add(m, x)") + "y = Mul(n, g)", "is no constant ε"),
    ],
)
def test_what_is_nearly_a_norm_stays_with_the_edge_that_differs(body: str, edge: str) -> None:
    found = fuse(model(body))
    assert "SimplifiedLayerNormalization" not in found.ops
    assert edge in found.missed["norm"]
    assert [step.reason for step in found.steps] == ["FUSION_MISSED"]


def test_a_normalized_value_that_others_read_stays() -> None:
    """n is read twice: the norm ends there, and γ is multiplied behind it."""
    found = fuse(model(RMS + "w = Mul(n, g) y = Add(w, n)"))
    assert found.ops == {"SimplifiedLayerNormalization": 1, "Mul": 1, "Add": 1}
    assert found.difference({"x": x(2, 3, K)}) < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    opset=st.sampled_from([13, 17, 18, 23]),
    axis=st.sampled_from(["axes", "last", "first"]),
    epsilon=st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 0.1, 3.0]),
    square=st.sampled_from(["Pow(x, two)", "Mul(x, x)", "Pow(x, one)", "Abs(x)", "Mul(x, x2)"]),
    root=st.sampled_from(list(ROOTS.values())),
    scale=st.sampled_from(["Mul(n, g)", "Add(n, g)", "Mul(n, n)", "Mul(n, two)", "Div(n, g)"]),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_variants_agree_or_are_left_alone(
    opset: int, axis: str, epsilon: float, square: str, root: str, scale: str, size: float
) -> None:
    axis = axis if opset >= 18 else "axes"
    body = (
        f"x2 = Mul(x, half) s = {square} m = {mean(opset, 's', axis)} v = Add(m, eps) {root} "
        f"y = {scale}"
    )
    text = model(body, opset=opset).replace("{0.00001}", f"{{{epsilon:.12f}}}")
    found = fuse(text)
    values = (size * RNG.standard_normal((2, 3, K))).astype(np.float32)
    if square == "Pow(x, one)":
        values = np.abs(values)
    assert found.difference({"x": values}) < 1e-4
    norms = found.ops["SimplifiedLayerNormalization"]
    is_square = square in ("Pow(x, two)", "Mul(x, x)")
    assert norms == int(is_square and axis != "first")
    assert found.done["rms_norm"] == norms


SKIP = (
    "t = Add(x, z) s = Pow(t, two) m = ReduceMean(s, axes) v = Add(m, eps) r = Sqrt(v) "
    "i = Reciprocal(r) n = Mul(t, i) "
)
Z = ", float[batch, sequence, 16] z"


def two(rows: tuple[int, ...] = (2, 3, K)) -> dict[str, np.ndarray]:
    return {"x": x(2, 3, K), "z": x(*rows)}


def test_the_addition_in_front_goes_into_the_norm_and_its_sum_stays() -> None:
    found = fuse(model(SKIP + "w = Mul(n, g) y = Add(w, t)", extra=Z))
    assert found.ops == {"SkipSimplifiedLayerNormalization": 1, "Add": 1}
    assert found.difference(two()) < 1e-5
    node = next(iter(found.after.model.graph))
    assert [output.name for output in node.outputs] == ["w", "", "", "t"]


def test_a_sum_that_nobody_else_reads_goes_away() -> None:
    found = fuse(model(SKIP + "y = Mul(n, g)", extra=Z))
    assert found.ops == {"SkipSimplifiedLayerNormalization": 1}
    assert found.difference(two()) < 1e-5
    assert len(next(iter(found.after.model.graph)).outputs) == 1


def test_a_bias_in_front_of_the_residual_goes_in_too() -> None:
    body = SKIP.replace("Add(x, z)", "Add(f, z)")
    found = fuse(model(f"f = Add(x, b) {body} w = Mul(n, g) y = Add(w, t)", extra=Z))
    assert found.ops == {"SkipSimplifiedLayerNormalization": 1, "Add": 1}
    assert found.difference(two()) < 1e-5


def layer_norm(inputs: str) -> str:
    return (
        f"f = Add(x, b) t = Add(f, z) y = LayerNormalization<axis = -1, epsilon = 0.01>({inputs})"
    )


@pytest.mark.parametrize("inputs", ["t, g, b", "t, g"])
def test_the_layer_norm_of_opset_17(inputs: str) -> None:
    found = fuse(model(layer_norm(inputs), opset=17, extra=Z))
    assert found.ops == {"SkipLayerNormalization": 1}
    assert found.difference(two()) < 1e-5


def test_the_rms_norm_of_opset_23() -> None:
    body = "t = Add(x, z) y = RMSNormalization<axis = -1, epsilon = 0.001>(t, g)"
    found = fuse(model(body, opset=23, extra=Z))
    assert found.ops == {"SkipSimplifiedLayerNormalization": 1}
    assert found.difference(two()) < 1e-5


def test_rows_that_repeat_over_the_batch_are_a_skip() -> None:
    found = fuse(model(SKIP + "y = Mul(n, g)", extra=", float[1, sequence, 16] z"))
    assert found.ops == {"SkipSimplifiedLayerNormalization": 1}
    assert found.difference(two((1, 3, K))) < 1e-5


@pytest.mark.parametrize(
    "extra,rows",
    [
        (", float[batch, 1, 16] z", (2, 1, K)),
        (", float[16] z", (K,)),
        (", float[p, q, 16] z", (2, 3, K)),
    ],
)
def test_shapes_that_may_differ_are_not_added_within(extra: str, rows: tuple[int, ...]) -> None:
    found = fuse(model(SKIP + "y = Mul(n, g)", extra=extra))
    assert found.ops == {"SimplifiedLayerNormalization": 1, "Add": 1}
    assert "may differ in shape" in found.missed["skip_norm"]
    assert found.difference(two(rows)) < 1e-5


def test_the_option_leaves_all_as_it_is() -> None:
    found: Fused = fuse(model(SKIP + "y = Mul(n, g)", extra=Z), fuse=False)
    assert found.steps == []
    assert found.ops["Pow"] == 1
