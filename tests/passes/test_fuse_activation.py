"""GELU, its approximations and SiLU in the spellings of exporters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fusing import fuse
from hypothesis import given, settings
from hypothesis import strategies as st

RNG = np.random.default_rng(0)


def model(body: str, opset: int = 18, dtype: str = "float") -> str:
    numbers = {
        "one": 1, "half": 0.5, "two": 2, "three": 3, "root": math.sqrt(2), "over": math.sqrt(0.5),
        "rough": 0.7071, "c": 0.044715, "k": math.sqrt(2 / math.pi), "quick": 1.702, "other": 0.05,
    }  # fmt: skip
    spelled = {
        name: int(np.float16(value).view(np.uint16)) if dtype == "float16" else f"{value:.9g}"
        for name, value in numbers.items()
    }
    constants = ", ".join(f"{dtype} {name} = {{{value}}}" for name, value in spelled.items())
    return f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g ({dtype}[n, 8] x) => ({dtype}[n, 8] y) <{constants}> {{ {body} }}"""


X = {"x": (3 * RNG.standard_normal((40, 8))).astype(np.float32)}

ERF = {
    "halved last": "d = Div(x, root) e = Erf(d) a = Add(e, one) p = Mul(x, a) y = Mul(p, half)",
    "halved first": "d = Mul(x, over) e = Erf(d) a = Add(one, e) h = Mul(half, x) y = Mul(h, a)",
    "halved sum": "d = Div(x, root) e = Erf(d) a = Add(e, one) q = Mul(a, half) y = Mul(q, x)",
    "divided": "d = Mul(over, x) e = Erf(d) a = Add(e, one) p = Mul(a, x) y = Div(p, two)",
}
INNER = {
    "Pow": "u = Pow(x, three)",
    "Mul": "q = Mul(x, x) u = Mul(q, x)",
}
TANH = "v = Mul(c, u) w = Add(x, v) i = Mul(w, k) t = Tanh(i) a = Add(t, one) "
ENDS = {"last": "p = Mul(x, a) y = Mul(p, half)", "first": "h = Mul(x, half) y = Mul(h, a)"}


@pytest.mark.parametrize("opset", [13, 20, 23])
@pytest.mark.parametrize("spelling", ERF)
def test_gelu(spelling: str, opset: int) -> None:
    found = fuse(model(ERF[spelling], opset))
    assert found.ops == {"Gelu": 1}
    assert found.difference(X) < 1e-5
    (node,) = found.after.model.graph
    assert node.domain == "com.microsoft"


@pytest.mark.parametrize("spelling", ERF)
def test_gelu_in_float16(spelling: str) -> None:
    """√2 and √½ are not what they are in float32; its tanh is told apart still."""
    found = fuse(model(ERF[spelling], dtype="float16"))
    assert found.ops == {"Gelu": 1}
    assert found.difference({"x": X["x"].astype(np.float16)}) < 2e-3
    bent = fuse(model(INNER["Pow"] + TANH + ENDS["last"], dtype="float16"))
    assert bent.ops == {"FastGelu": 1}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("end", ENDS)
def test_gelu_by_tanh(inner: str, end: str) -> None:
    found = fuse(model(INNER[inner] + TANH + ENDS[end]))
    assert found.ops == {"FastGelu": 1}
    assert found.difference(X) < 1e-5


def test_gelu_by_tanh_factored_out() -> None:
    body = "q = Mul(x, x) v = Mul(c, q) w = Add(one, v) z = Mul(x, w) i = Mul(k, z) t = Tanh(i) "
    found = fuse(model(body + "a = Add(one, t) h = Mul(half, x) y = Mul(h, a)"))
    assert found.ops == {"FastGelu": 1}
    assert found.difference(X) < 1e-5


@pytest.mark.parametrize(
    "body,factor",
    [
        ("s = Sigmoid(x) y = Mul(x, s)", 1.0),
        ("s = Sigmoid(x) y = Mul(s, x)", 1.0),
        ("i = Mul(x, quick) s = Sigmoid(i) y = Mul(x, s)", 1.702),
    ],
)
def test_silu_and_quick_gelu(body: str, factor: float) -> None:
    found = fuse(model(body))
    assert found.ops == {"QuickGelu": 1}
    assert found.difference(X) < 1e-5
    (node,) = found.after.model.graph
    assert node.attributes["alpha"].as_float() == pytest.approx(factor)


def test_a_gate_keeps_its_product() -> None:
    found = fuse(model("u = Mul(x, two) s = Sigmoid(x) g = Mul(x, s) y = Mul(g, u)"))
    assert found.ops == {"QuickGelu": 1, "Mul": 2}
    assert found.difference(X) < 1e-5


def test_a_factor_in_front_stays_where_it_is_no_part() -> None:
    found = fuse(model("z = Mul(x, two) s = Sigmoid(z) y = Mul(z, s)"))
    assert found.ops == {"QuickGelu": 1, "Mul": 1}
    assert found.difference(X) < 1e-5


@pytest.mark.parametrize(
    "body",
    [
        ERF["halved last"].replace("root", "two"),
        INNER["Pow"] + TANH.replace("Mul(c, u)", "Mul(other, u)") + ENDS["last"],
        ERF["halved last"].replace("half", "two"),
    ],
)
def test_other_functions_are_named_and_stay(body: str) -> None:
    found = fuse(model(body))
    assert not {"Gelu", "FastGelu"} & set(found.ops)
    assert "is another function of x" in found.missed["activation"]
    assert found.difference(X) < 1e-6


def test_a_sigmoid_that_others_read_stays() -> None:
    found = fuse(model("s = Sigmoid(x) p = Mul(x, s) y = Add(p, s)"))
    assert "QuickGelu" not in found.ops
    assert found.difference(X) < 1e-6


def test_rounded_constants_are_within_the_tolerance_or_stay() -> None:
    found = fuse(model(ERF["halved first"].replace("over", "rough")))
    assert found.ops["Gelu"] in (0, 1)
    assert found.difference(X) < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    scale=st.sampled_from(["root", "two", "one", "rough"]),
    shift=st.sampled_from(["one", "half", "two"]),
    end=st.sampled_from(["half", "one", "other"]),
    order=st.booleans(),
    seed=st.sampled_from(["Erf", "Tanh", "Sigmoid"]),
)
def test_variants_agree_or_are_left_alone(
    scale: str, shift: str, end: str, order: bool, seed: str
) -> None:
    pair = "x, a" if order else "a, x"
    body = (
        f"d = Div(x, {scale}) e = {seed}(d) a = Add(e, {shift}) p = Mul({pair}) y = Mul(p, {end})"
    )
    found = fuse(model(body))
    fused = {"Gelu", "FastGelu", "QuickGelu"} & set(found.ops)
    if (seed, scale, shift, end) == ("Erf", "root", "one", "half"):
        assert fused == {"Gelu"}
    if (seed, scale, shift, end) == ("Tanh", "two", "one", "half"):  # x times the logistic of x
        assert fused == {"QuickGelu"}
    assert not fused or (shift, end) == ("one", "half")
    assert found.difference(X) < 1e-4
