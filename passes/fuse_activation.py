"""GELU, its approximations and SiLU, however they are spelled: by what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.elementwise import ELEMENTWISE, POINTS, evaluate, gelu, gelu_tanh, swish
from qgraph.passes.fusion import MICROSOFT, Attributes, Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import made_by, number, only_reader, other_operand

_TOLERANCE = 2e-5
"""How far constants may be rounded: exporters write √½ as 0.7071."""
_HALF_TOLERANCE = 1e-4
"""And where they are float16: √2 is 1.4141 there. GELU and its tanh differ by 4.7e-4."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """A function, and the op that computes it."""

    function: Callable[[Array], Array]
    op: str
    attributes: Attributes
    words: str


_KNOWN = (
    _Known(gelu, "Gelu", {}, "x · Φ(x)"),
    _Known(gelu_tanh, "FastGelu", {}, "x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2"),
    _Known(swish(1.0), "QuickGelu", {"alpha": 1.0}, "x · σ(x)"),
    _Known(swish(1.702), "QuickGelu", {"alpha": 1.702}, "x · σ(1.702 x)"),
)
_SEEDS = {"Erf": "x · Φ(x)", "Tanh": _KNOWN[1].words}
"""Ops that stand in an activation's middle, and what is nearest where it is none of the known."""


def activation(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """GELU by Erf, by Tanh, and x · σ(c x)."""
    for seed in context.nodes("Erf", "Tanh", "Sigmoid"):
        if seed.graph is None or seed.domain:
            continue
        ends = list(_ends(seed))
        found = next(_matches(ends), None)
        if found is not None:
            x, end, known = found
            if context.has(f"{MICROSOFT}::{known.op}"):
                yield _candidate(x, end, known)
        elif ends and seed.op_type in _SEEDS:
            product = ends[0][1].producer()
            assert product is not None
            edge = f"{ends[0][1].name} is another function of {ends[0][0].name}"
            yield Miss("activation", product, _SEEDS[seed.op_type], edge)


def _ends(seed: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Pairs (x, result): the product in which the seed meets x, then with factors behind it."""
    value = seed.outputs[0]
    while (node := only_reader(value)) is not None and node.op_type in ELEMENTWISE:
        operands = [each for each in node.inputs if each is not value]
        value = node.outputs[0]
        if node.op_type == "Mul" and operands and number(operands[0]) is None:
            break
    else:
        return
    x = operands[0]
    while x is not None:
        result: ir.Value | None = value
        while result is not None:
            yield x, result
            result = _factored(result)
        x = _unfactored(x)


def _factored(value: ir.Value) -> ir.Value | None:
    """`value` times a constant, where that is all that reads it."""
    node = only_reader(value)
    if node is None or node.op_type not in ("Mul", "Div"):
        return None
    return node.outputs[0] if number(other_operand(node, value)) is not None else None


def _unfactored(value: ir.Value) -> ir.Value | None:
    """What `value` is a constant times, or a sum of which it is one factor's operand."""
    node = made_by(value, "Mul", "Div")
    if node is None:
        return None
    first, second = node.inputs[0], node.inputs[1]
    if number(second) is not None:
        return first
    return second if number(first) is not None and node.op_type == "Mul" else None


def _matches(
    ends: Sequence[tuple[ir.Value, ir.Value]],
) -> Iterator[tuple[ir.Value, ir.Value, _Known]]:
    for x, end in ends:
        found = evaluate(end, x)
        if found is None or found.shape != POINTS.shape:
            continue
        most = _HALF_TOLERANCE if x.dtype == ir.DataType.FLOAT16 else _TOLERANCE
        for known in _KNOWN:
            if np.allclose(found, known.function(POINTS), rtol=most, atol=most):
                yield x, end, known


def _candidate(x: ir.Value, end: ir.Value, known: _Known) -> Candidate:
    node = end.producer()
    assert node is not None

    def build(builder: Builder, given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        attributes = dict(known.attributes)
        return [builder.op(known.op, given, domain=MICROSOFT, attributes=attributes, like=end)]

    op = f"{MICROSOFT}::{known.op}"
    return Candidate("activation", node, (x,), (end,), op, build, reason=known.words)
