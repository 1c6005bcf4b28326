"""Rotary embeddings: tables made of the angles of a graph, and what is no table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_caches
from fusing import CPU, Fused, fuse, run

from qgraph.errors import InputError
from qgraph.passes.cache_ranges import cached
from qgraph.passes.fuse_transformer import FuseTransformer
from qgraph.passes.fusion import POSITIONS

RNG = np.random.default_rng(0)
HEADS, SIZE = 2, 16
ROTARY = "RotaryEmbedding"
RATES = (100.0 ** (-np.arange(0, SIZE, 2) / SIZE)).astype(np.float32)

ANGLES = {
    "by position": "p3 = Unsqueeze(position_ids, last)  f = Cast<to = 1>(p3)  a = Mul(f, rates)",
    "by product": """p3 = Unsqueeze(position_ids, last)  f = Cast<to = 1>(p3)
        r2 = Unsqueeze(rates, first)  a = MatMul(f, r2)""",
    "by place": """shape = Shape(x)  n1 = Gather(shape, one)  n = Squeeze(n1)
        place = Range(zero_i, n, one_i)  row = Unsqueeze(place, first)  p3 = Unsqueeze(row, last)
        f = Cast<to = 1>(p3)  a = Mul(f, rates)""",
    "of unpadded tokens": """sum = CumSum(position_ids, one_i)  position = Sub(sum, one_i)
        p3 = Unsqueeze(position, last)  f = Cast<to = 1>(p3)  a = Mul(f, rates)""",
    "of rates for each row": """sizes = Shape(position_ids)  rows = Gather(sizes, first)
        dims = Concat<axis = 0>(rows, eight, one)  column = Unsqueeze(rates, one)
        expanded = Expand(column, dims)  rates3 = Cast<to = 1>(expanded)
        p3 = Unsqueeze(position_ids, one)  f = Cast<to = 1>(p3)  product = MatMul(rates3, f)
        a = Transpose<perm = [0, 2, 1]>(product)""",
    "looked up": "a = Gather<axis = 0>(angles, position_ids)",
    "by the length of the text": """p3 = Unsqueeze(position_ids, last)  f = Cast<to = 1>(p3)
        top = ReduceMax<keepdims = 0>(f)  long = Greater(top, forty)
        rates2 = Mul(rates, half)  used = Where(long, rates2, rates)  a = Mul(f, used)""",
}
TURNS = {
    "whole": """{h}s = Mul({h}h, c4)  {h}1 = Slice({h}h, first, eight, three)
        {h}2 = Slice({h}h, eight, sixteen, three)  {h}n = Neg({h}2)
        {h}r = Concat<axis = -1>({h}n, {h}1)  {h}u = Mul({h}r, s4)  {h}d = Add({h}s, {h}u)""",
    "split": """{h}s = Mul(c4, {h}h)  {h}1, {h}2 = Split<axis = 3>({h}h, halves)
        {h}n = Neg({h}2)  {h}r = Concat<axis = 3>({h}n, {h}1)  {h}u = Mul({h}r, s4)
        {h}d = Add({h}u, {h}s)""",
}


NEIGHBOURS = """{h}s = Mul({h}h, c4)  {h}1 = Slice({h}h, first, sixteen, three, two)
        {h}2 = Slice({h}h, one, sixteen, three, two)  {h}n = Neg({h}2)
        {h}a = Unsqueeze({h}n, fourth)  {h}b = Unsqueeze({h}1, fourth)
        {h}p = Concat<axis = -1>({h}a, {h}b)  {h}r = Reshape({h}p, flat4)
        {h}u = Mul({h}r, s4)  {h}d = Add({h}s, {h}u)"""
SIDE_BY_SIDE = "au = Unsqueeze(a, three) ap = Concat<axis = -1>(au, au) a2 = Reshape(ap, flat3)"
BEHIND = "a2 = Concat<axis = -1>(a, a)"


def text(angles: str, turn: str = TURNS["whole"], factor: float = 1.0, twice: str = BEHIND) -> str:
    """A causal attention from x `[batch, sequence, 32]` whose queries and keys are turned."""
    rates = ", ".join(f"{rate:.9g}" for rate in RATES)
    table = ", ".join(f"{p * rate:.9g}" for p in np.arange(64, dtype=np.float32) for rate in RATES)
    return f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[batch, sequence, 32] x, int64[batch, sequence] position_ids)
      => (float[batch, sequence, 32] y)
    <float[8] rates = {{{rates}}}, float[64, 8] angles = {{{table}}}, float factor = {{{factor}}},
     int64[4] split = {{0, 0, 2, 16}}, int64[3] joined = {{0, 0, 32}}, float four = {{4}},
     float half = {{0.5}}, float forty = {{40}}, float lowest = {{-3.4e38}}, int64[1] one = {{1}},
     int64[1] first = {{0}}, int64[1] last = {{2}}, int64[1] three = {{3}}, int64[1] eight = {{8}},
     int64[1] sixteen = {{16}}, int64[2] halves = {{8, 8}}, int64 one_i = {{1}},
     int64 zero_i = {{0}}, int64[1] two = {{2}}, int64[1] fourth = {{4}},
     int64[3] flat3 = {{0, 0, 16}}, int64[4] flat4 = {{0, 0, 0, 16}}>
    {{ {angles}
       {twice}  c = Cos(a2)  s = Sin(a2)  cf = Mul(c, factor)
       sf = Mul(s, factor)  c4 = Unsqueeze(cf, one)  s4 = Unsqueeze(sf, one)
       q = Sin(x)  k = Cos(x)  v = Neg(x)
       q4 = Reshape(q, split)  k4 = Reshape(k, split)  v4 = Reshape(v, split)
       qh = Transpose<perm = [0, 2, 1, 3]>(q4)  kh = Transpose<perm = [0, 2, 1, 3]>(k4)
       vh = Transpose<perm = [0, 2, 1, 3]>(v4)  {turn.format(h="q")}  {turn.format(h="k")}
       kt = Transpose<perm = [0, 1, 3, 2]>(kd)  raw = MatMul(qd, kt)  scores = Div(raw, four)
       size = Shape(x)  new = Gather(size, one)  pair = Concat<axis = 0>(new, new)
       lows = Expand(lowest, pair)  low = Trilu<upper = 1>(lows, one_i)
       masked = Add(scores, low)  p = Softmax<axis = -1>(masked)
       o = MatMul(p, vh)  ot = Transpose<perm = [0, 2, 1, 3]>(o)  y = Reshape(ot, joined) }}"""


def feeds(rows: int, new: int, top: int = 60) -> dict[str, np.ndarray]:
    return {
        "x": RNG.normal(0, 1, (rows, new, 32)).astype(np.float32),
        "position_ids": RNG.integers(0, top, (rows, new)),
    }


def rotates(found: Fused) -> bool:
    (node,) = [n for n in found.after.model.graph if n.op_type == "GroupQueryAttention"]
    return bool(node.attributes.get_int("do_rotary", 0))


@pytest.mark.parametrize("angles", ["by place", "by position", "looked up"])
def test_neighbours_that_are_turned_together(angles: str) -> None:
    found = fuse(text(ANGLES[angles], NEIGHBOURS, twice=SIDE_BY_SIDE))
    assert found.done["attention"] == 1 and "rotary" not in found.missed
    names = {"GroupQueryAttention": "rotary_interleaved", ROTARY: "interleaved"}
    turning = [
        node
        for node in found.after.model.graph
        if node.op_type == ROTARY or node.attributes.get_int("do_rotary", 0)
    ]
    told = [node.attributes.get_int(names[node.op_type], 0) for node in turning]
    assert set(told) == {1}
    for given in (feeds(2, 7), feeds(1, 40), feeds(1, 1)):
        assert found.difference(given) < 1e-5


def test_neighbours_with_angles_of_halves_stay_as_they_are() -> None:
    found = fuse(text(ANGLES["by position"], NEIGHBOURS))
    assert found.missed["rotary"].endswith("the two halves of the angles differ")
    assert found.difference(feeds(2, 7)) < 1e-5


@pytest.mark.parametrize("neighbours", [False, True])
def test_heads_that_are_turned_in_a_wider_type_are_told_of(neighbours: bool) -> None:
    """And a quantized cache knows which of their channels are turned together."""
    turn, twice = (NEIGHBOURS, SIDE_BY_SIDE) if neighbours else (TURNS["whole"], BEHIND)
    turn = turn.replace("{h}d =", "{h}w =")
    turn += " {h}half = Cast<to = 10>({h}w) {h}d = Cast<to = 1>({h}half)"
    found = fuse(text(ANGLES["by position"], turn, twice=twice))
    (step,) = [each for each in found.steps if each.rule == "rotary"]
    assert step.detail.endswith("qd is turned in FLOAT, and rounded behind it")
    assert found.difference(feeds(2, 7)) < 2e-3
    (node,) = [n for n in found.after.model.graph if n.op_type == "GroupQueryAttention"]
    pairs = [[2 * at, 2 * at + 1] if neighbours else [at, at + 8] for at in range(8)]
    assert cached(node).pairs.tolist() == pairs


@pytest.mark.parametrize("turn", TURNS)
def test_positions_by_place_go_into_the_attention(turn: str) -> None:
    found = fuse(text(ANGLES["by place"], TURNS[turn]))
    assert rotates(found)
    assert found.ops["Neg"] == 1  # the values'
    assert found.difference(feeds(1, 1)) < 1e-5
    assert found.difference(feeds(2, 9)) < 1e-5


@pytest.mark.parametrize("step", ["Min(place, far)", "Mod(place, far)", "Clip(place, zero_i, far)"])
def test_places_that_are_clamped_or_wrapped_further_on_are_not_counted_by_the_op(step: str) -> None:
    bent = ANGLES["by place"].replace("Unsqueeze(place", "Unsqueeze(bent")
    bent = bent.replace("row =", f"far = Constant<value_int = 20>()  bent = {step}  row =")
    found = fuse(text(bent))
    assert found.done["attention"] == 1
    assert not rotates(found)
    assert "says no positions" in found.missed["rotary"]
    assert found.difference(feeds(2, 9)) < 1e-5
    assert found.difference(feeds(2, 40)) < 1e-5


def test_a_factor_of_the_angles_goes_into_the_tables() -> None:
    found = fuse(text(ANGLES["by place"], factor=1.25))
    assert rotates(found)
    assert found.difference(feeds(2, 9)) < 1e-5


@pytest.mark.parametrize("angles", [name for name in ANGLES if name != "by place"])
def test_without_a_cache_other_positions_are_right_in_any_case(angles: str) -> None:
    """The kernel counts a first prompt's positions itself: others must not be left to it."""
    found = fuse(text(ANGLES[angles]))
    assert found.done["attention"] == 1
    assert not rotates(found)
    assert found.ops["RotaryEmbedding"] == 2 * (angles != "by the length of the text")
    assert found.difference(feeds(2, 9)) < 1e-5
    assert found.difference({**feeds(2, 9), "position_ids": np.ones((2, 9), np.int64)}) < 1e-5


def test_angles_by_the_length_of_the_text_stay_in_the_graph() -> None:
    found = fuse(text(ANGLES["by the length of the text"]))
    assert "depend on the positions of others" in found.missed["rotary"]
    for top in (30, 60):
        assert found.difference(feeds(2, 9, top)) < 1e-5


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_rates_go_into_the_tables(kind: str, tmp_path: Path) -> None:
    found = fuse(tiny_caches.export(kind, tmp_path / "model.onnx"))
    assert found.done["attention"] == tiny_caches.LAYERS
    tables = {
        (node.inputs[7], node.inputs[8])
        for node in found.after.model.graph
        if node.op_type == "GroupQueryAttention"
    }
    assert len(tables) == 1  # one pair for all layers
    mask = np.ones((2, 40), np.int64)
    given = tiny_caches.feeds(mask, 4)
    given["position_ids"] = np.array([[0, 9, 300, 511], [77, 78, 79, 80]])
    old, new = (run(each.model, given) for each in (found.before, found.after))
    assert np.abs(old["logits"] - new["logits"]).max() < 1e-4 * np.abs(old["logits"]).max()


def test_a_position_beyond_the_table_is_refused(tmp_path: Path) -> None:
    found = fuse(tiny_caches.export("llama", tmp_path / "model.onnx"))
    session = CPU.open(found.after.model, threads=1)
    given = tiny_caches.feeds(np.ones((1, 3), np.int64), 1)
    given["position_ids"] = np.array([[POSITIONS - 1]])
    assert np.isfinite(session.run(given)["logits"]).all()
    given["position_ids"] = np.array([[POSITIONS]])
    with pytest.raises(Exception, match=f"out of range \\[0, {POSITIONS}\\)"):
        session.run(given)


def test_how_far_tables_reach_is_an_option(tmp_path: Path) -> None:
    path = tiny_caches.export("llama", tmp_path / "model.onnx")
    found = fuse(path, options={"fuse_transformer.positions": "40000"})
    (done,) = {step.detail for step in found.steps if step.rule == "attention"}
    assert "rotary embedding of 40000 positions" in done
    given = tiny_caches.feeds(np.ones((1, 3), np.int64), 1)
    given["position_ids"] = np.array([[POSITIONS + 7000]])
    assert found.difference(given) < 1e-4
    with pytest.raises(InputError, match=r"positions=0: rotary tables have 1 to"):
        FuseTransformer(positions=0)


def test_the_file_holds_no_table(tmp_path: Path) -> None:
    found = fuse(tiny_caches.export("llama", tmp_path / "model.onnx"))
    sizes = [
        v.const_value.size for v in found.after.model.graph.initializers.values() if v.const_value
    ]
    assert max(sizes) == 96 * 64  # the embedding
