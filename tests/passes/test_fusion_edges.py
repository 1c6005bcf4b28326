"""Where a fusion would change what a graph does: other lengths, far places, bodies, names."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attentions import MASKS, text
from fusing import fuse
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)


def x(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1, shape).astype(np.float32)


def of_another_text(body: str) -> str:
    body = body.replace("k = Cos(x)  v = Neg(x)", "k = Cos(e)  v = Neg(e)")
    return body.replace("int64[batch, sequence] mask", "float[batch, memory, 32] e, "
                        "int64[batch, memory] mask")  # fmt: skip


def test_attention_to_another_text_gets_an_op_that_takes_its_length() -> None:
    plain = fuse(of_another_text(text(MASKS["padding"])))
    assert plain.done == {"attention": 1}
    capped = fuse(of_another_text(text(MASKS["padding"], capped=True)))
    edge = "memory tokens are looked at by sequence, which GroupQueryAttention cannot"
    assert edge in capped.missed["attention"]
    for found in (plain, capped):
        for new, other in ((5, 5), (4, 9), (1, 3)):
            mask = np.ones((2, other), np.int64)
            mask[1, 2:] = 0
            feeds = {"x": x(2, new, 32), "e": x(2, other, 32), "mask": mask}
            assert found.difference(feeds) < 1e-5


def in_a_body(before: list[str], body: list[str], result: str) -> ir.Model:
    """A graph of x, z `[b, s, 32]` and c that goes on in the body of an If."""

    def nodes(texts: list[str]) -> list:
        parts = (each.split() for each in texts)
        return [
            helper.make_node(op, given.split(","), [made], name=made, **_ATTRIBUTES.get(made, {}))
            for made, op, given in parts
        ]

    def value(name: str) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", 32])

    yes = helper.make_graph(nodes(body), "yes", [], [value(result)])
    no = helper.make_graph(nodes(["n Identity x"]), "no", [], [value("n")])
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no, name="if")
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    constants = {
        "weight": np.ones(32, np.float32),
        "split": np.array([0, 0, 2, 16], np.int64),
        "joined": np.array([0, 0, 32], np.int64),
        "four": np.array(4, np.float32),
    }
    graph = helper.make_graph(
        [*nodes(before), chosen],
        "g",
        [value("x"), value("z"), condition],
        [value("y"), value("t")],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return ir.serde.deserialize_model(model)


_ATTRIBUTES = {
    "qh": {"perm": [0, 2, 1, 3]},
    "vh": {"perm": [0, 2, 1, 3]},
    "ot": {"perm": [0, 2, 1, 3]},
    "kt": {"perm": [0, 2, 3, 1]},
    "p": {"axis": -1},
}
_HEADS = [
    "q Sin x", "k Cos x", "v Neg x", "q4 Reshape q,split", "k4 Reshape k,split",
    "v4 Reshape v,split", "qh Transpose q4", "kt Transpose k4", "vh Transpose v4",
    "raw MatMul qh,kt", "scores Div raw,four", "p Softmax scores", "o MatMul p,vh",
]  # fmt: skip


@pytest.mark.parametrize(
    "before,body,result,fusion",
    [
        (["s Add x,z", "t Neg s"], ["ln LayerNormalization s,weight", "m Mul ln,ln"], "m",
         "skip_norm"),
        ([*_HEADS, "t Neg x"], ["ot Transpose o", "r Reshape ot,joined"], "r", "attention"),
    ],
)  # fmt: skip
def test_a_pattern_that_ends_in_another_body_stays(
    before: list[str], body: list[str], result: str, fusion: str
) -> None:
    found = fuse(in_a_body(before, body, result))
    assert fusion not in found.done
    assert "is made in another body than" in found.missed[fusion]
    feeds = {"x": x(2, 3, 32), "z": x(2, 3, 32)}
    assert found.difference({**feeds, "c": np.array(True)}) < 1e-5


CACHED = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[batch, {new}, 32] x, int64[batch, {mask}] mask, float[batch, 2, {past}, 16] pk,
       float[batch, 2, {past}, 16] pv) => (float[batch, {new}, 32] y, float[batch, 2, t, 16] rk,
       float[batch, 2, t, 16] rv)
    <int64[4] split = {{0, 0, 2, 16}}, int64[3] joined = {{0, 0, 32}}, float four = {{4}},
     float zero = {{0}}, float lowest = {{-3.4e38}}, int64[2] middle = {{1, 2}}>
    {{ b = Cast<to = 9>(mask)  b4 = Unsqueeze(b, middle)  low = Where(b4, zero, lowest)
       q = Sin(x)  k = Cos(x)  v = Neg(x)
       q4 = Reshape(q, split)  k4 = Reshape(k, split)  v4 = Reshape(v, split)
       qh = Transpose<perm = [0, 2, 1, 3]>(q4)  kh = Transpose<perm = [0, 2, 1, 3]>(k4)
       vh = Transpose<perm = [0, 2, 1, 3]>(v4)
       rk = Concat<axis = 2>(pk, kh)  rv = Concat<axis = 2>(pv, vh)
       kt = Transpose<perm = [0, 1, 3, 2]>(rk)  raw = MatMul(qh, kt)  scores = Div(raw, four)
       masked = Add(scores, low)  p = Softmax<axis = -1>(masked)  o = MatMul(p, rv)
       ot = Transpose<perm = [0, 2, 1, 3]>(o)  y = Reshape(ot, joined) }}"""


@pytest.mark.parametrize(
    "names,edge",
    [
        ({"new": "n", "mask": "n", "past": "n"}, "one name stands for several of the lengths"),
        ({"new": "new", "mask": "new", "past": "past"}, "needs a name of its own"),
    ],
)
def test_one_name_for_several_lengths_is_told(names: dict[str, str], edge: str) -> None:
    found = fuse(CACHED.format(**names))
    assert edge in found.missed["attention"]
    feeds = {"x": x(2, 3, 32), "pk": x(2, 2, 4, 16), "pv": x(2, 2, 4, 16)}
    assert found.difference({**feeds, "mask": np.ones((2, 7), np.int64)}) < 1e-5


GUARDS = {
    "zeros like it": "size = Shape(p0)  z = ConstantOfShape(size)  n = IsNaN(p0) "
    "p = Where(n, z, p0)",
    "zeros expanded": "size = Shape(p0)  z = Expand(zero, size)  n = IsNaN(p0) p = Where(n, z, p0)",
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_of_zeros_in_any_spelling(guard: str) -> None:
    found = fuse(text(MASKS["causal and padding"]).replace("p = Identity(p0)", GUARDS[guard]))
    assert found.done == {"attention": 1}
    assert "a token that sees nothing gets a mean of values" in found.steps[-1].detail
    mask = np.array([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert found.difference({"x": x(2, 5, 32), "mask": mask}) < 1e-5


def test_what_stands_behind_a_softmax_is_told() -> None:
    found = fuse(text().replace("p = Identity(p0)", "p = Sqrt(p0)"))
    assert found.ops["Softmax"] == 1
    assert "Sqrt" in found.missed["attention"]
    assert "between the softmax and the product" in found.missed["attention"]


def test_values_that_are_scaled_stay_so() -> None:
    found = fuse(text(scale="raw = MatMul(qh, kt)  scores = Div(raw, four)").replace(
        "v = Neg(x)", "v0 = Neg(x)  v = Mul(v0, fifty)"))  # fmt: skip
    assert found.done == {"attention": 1}
    assert found.difference({"x": x(2, 5, 32)}) < 1e-5


def test_a_bias_whose_axes_are_not_known_is_given_to_each_query() -> None:
    body = text(("hide = Identity(bias)", "masked = Add(scores, hide)"))
    body = body.replace("float[batch, sequence, 32] x)", "float[batch, sequence, 32] x, "
                        "float[rows, heads, queries, keys] bias)")  # fmt: skip
    found = fuse(body)
    assert found.done == {"attention": 1}
    for shape in ((1, 1, 1, 5), (2, 1, 5, 5), (2, 2, 1, 5)):
        assert found.difference({"x": x(2, 5, 32), "bias": x(*shape)}) < 1e-5


def test_fractions_of_sizes_are_not_rounded() -> None:
    found = fuse("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 5, 32] x, float[2, 3] z) => (float[N, M] y)
        <int64[1] one = {1}, int64[1] zero = {0}, int64[1] rest = {-1}>
        { s = Shape(x)  n = Gather(s, one)  nf = Cast<to = 1>(n)  sz = Shape(z)
          two = Gather(sz, zero)  tf = Cast<to = 1>(two)  half = Div(nf, tf)
          back = Mul(half, tf)  whole = Cast<to = 7>(back)
          shape = Concat<axis = 0>(whole, rest)  y = Reshape(x, shape) }""")
    assert found.difference({"x": x(1, 5, 32), "z": x(2, 3)}) == 0
