"""Attentions spelled out in ONNX's text: two heads of 16, with every kind of mask."""

from __future__ import annotations

import numpy as np

HEADS, SIZE = 2, 16
LOW = -3.4e38

SCALES = {
    "scores divided": "raw = MatMul(qh, kt)  scores = Div(raw, four)",
    "scores multiplied": "raw = MatMul(qh, kt)  scores = Mul(quarter, raw)",
    "queries divided": "qs = Div(qh, four)  scores = MatMul(qs, kt)",
    "both by the root": "qs = Mul(qh, half)  ks = Mul(kt, half)  scores = MatMul(qs, ks)",
}
"""Ways to 1 / √16."""

PLACES = """
    shape = Shape(x)  new1 = Gather(shape, one)  new = Squeeze(new1)
    place = Range(zero_i, new, one_i)  row = Unsqueeze(place, first)
    column = Unsqueeze(place, one)  causal = LessOrEqual(row, column)
"""
"""`causal` `[S, S]` of a graph without a cache."""

MASKS = {
    "none": ("", "masked = Identity(scores)"),
    "added": (PLACES + "low = Where(causal, zero, lowest)", "masked = Add(scores, low)"),
    "added first": (PLACES + "low = Where(causal, zero, lowest)", "masked = Add(low, scores)"),
    "chosen": (PLACES, "masked = Where(causal, scores, lowest)"),
    "dropped": (PLACES + "hidden = Not(causal)", "masked = Where(hidden, ten_thousand, scores)"),
    "triangle": (
        "shape = Shape(x)  new1 = Gather(shape, one)  pair = Concat<axis = 0>(new1, new1) "
        "lows = Expand(lowest, pair)  low = Trilu<upper = 1>(lows, one_i)",
        "masked = Add(scores, low)",
    ),
    "padding": (
        "seen = Cast<to = 1>(mask)  unseen = Sub(unit, seen)  low0 = Mul(unseen, ten_thousand) "
        "low = Unsqueeze(low0, middle)",
        "masked = Add(scores, low)",
    ),
    "causal and padding": (
        PLACES + "seen = Cast<to = 9>(mask)  seen4 = Unsqueeze(seen, middle) "
        "both = And(causal, seen4)  low = Where(both, zero, lowest)",
        "masked = Add(scores, low)",
    ),
    "one after the other": (
        PLACES + "seen = Cast<to = 9>(mask)  seen4 = Unsqueeze(seen, middle) ",
        "less = Where(causal, scores, lowest)  masked = Where(seen4, less, lowest)",
    ),
}
"""What is computed once, and the step on the scores; by what it hides."""


def window(length: int) -> tuple[str, str]:
    """A causal mask that ends `length` tokens back."""
    body = f"""width = Constant<value_int = {length}>()  start = Sub(column, width)
        inside = Greater(row, start)  both = And(causal, inside)
        low = Where(both, zero, lowest)"""
    return PLACES + body, "masked = Add(scores, low)"


def text(
    mask: tuple[str, str] = MASKS["none"],
    scale: str = SCALES["scores divided"],
    *,
    guard: bool = False,
    capped: bool = False,
    opset: int = 17,
) -> str:
    """A graph from x `[batch, sequence, 32]` (and a mask) to y, queries, keys and values in x."""
    once, step = mask
    inputs = "float[batch, sequence, 32] x"
    if "mask" in once.split() or "(mask)" in once:
        inputs += ", int64[batch, sequence] mask"
    cap = "c0 = Div(scores, fifty)  c1 = Tanh(c0)  capped = Mul(c1, fifty)" if capped else ""
    if capped:
        step = step.replace("scores", "capped")
    kept = "nan = IsNaN(p0)  p = Where(nan, zero, p0)" if guard else "p = Identity(p0)"
    return f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g ({inputs}) => (float[batch, sequence, 32] y)
    <int64[4] split = {{0, 0, 2, 16}}, int64[3] joined = {{0, 0, 32}}, float four = {{4}},
     float quarter = {{0.25}}, float half = {{0.5}}, float zero = {{0}}, float unit = {{1}},
     float lowest = {{{LOW}}}, float ten_thousand = {{-10000}}, float fifty = {{50}},
     int64[1] one = {{1}}, int64[1] first = {{0}}, int64[2] middle = {{1, 2}},
     int64 one_i = {{1}}, int64 zero_i = {{0}}>
    {{ {once}
       q = Sin(x)  k = Cos(x)  v = Neg(x)
       q4 = Reshape(q, split)  k4 = Reshape(k, split)  v4 = Reshape(v, split)
       qh = Transpose<perm = [0, 2, 1, 3]>(q4)  kt = Transpose<perm = [0, 2, 3, 1]>(k4)
       vh = Transpose<perm = [0, 2, 1, 3]>(v4)
       {scale}  {cap}  {step}
       p0 = Softmax<axis = -1>(masked)  {kept}
       o = MatMul(p, vh)  ot = Transpose<perm = [0, 2, 1, 3]>(o)  y = Reshape(ot, joined) }}"""


def computed(x: np.ndarray, seen: np.ndarray, cap: float = 0.0) -> np.ndarray:
    """What such a graph computes, in float64; `seen` is bool `[B, 1, S, S]`."""
    rows, new, _ = x.shape
    q, k, v = (
        each(x.astype(np.float64)).reshape(rows, new, HEADS, SIZE).transpose(0, 2, 1, 3)
        for each in (np.sin, np.cos, np.negative)
    )
    scores = q @ k.transpose(0, 1, 3, 2) / 4
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.where(seen, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(rows, new, HEADS * SIZE)
