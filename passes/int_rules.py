"""What ops make of sizes: the elements of vectors and scalars of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import onnx_ir as ir

from qgraph.passes.dims import LONGEST, Known, Size, Sizes

Rule: TypeAlias = Callable[[Known, ir.Node], Sizes | None]
"""From what a node reads to its first output; None where that is not known."""


def _shape_op(known: Known, node: ir.Node) -> Sizes | None:
    shape = known.shape(node, 0)
    if shape is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get("end")
    return shape[start : end.as_int() if end is not None else None]


def _gathered(known: Known, node: ir.Node) -> Sizes | None:
    found, at = known.ints(node, 0), known.numbers(node, 1)
    if found is None or at is None or node.attributes.get_int("axis", 0) != 0:
        return None
    return [found[each] for each in at] if all(-len(found) <= a < len(found) for a in at) else None


def _sliced_ints(known: Known, node: ir.Node) -> Sizes | None:
    found, start, end = known.ints(node, 0), known.numbers(node, 1), known.numbers(node, 2)
    step = known.numbers(node, 4) or [1]
    if found is None or start is None or end is None or len(start) != 1 or not step[0]:
        return None
    last = None if step[0] < 0 and end[0] < -(2**31) else end[0]  # backwards, to the first one
    return found[slice(start[0], last, step[0])]


def _joined(known: Known, node: ir.Node) -> Sizes | None:
    found: list[Size | None] = []
    for index in range(len(node.inputs)):
        part = known.ints(node, index) or blank(known.shape(node, index))
        if part is None:
            return None
        found += part
    return found


def blank(shape: Sizes | None) -> list[Size | None] | None:
    """Unknown elements of a vector whose length is known."""
    length = shape[0].number if shape is not None and len(shape) == 1 and shape[0] else None
    return [None] * length if length is not None and length <= LONGEST else None


def _kept(known: Known, node: ir.Node) -> Sizes | None:
    return known.ints(node, 0)


def _filled(known: Known, node: ir.Node) -> Sizes | None:
    length = known.numbers(node, 0)
    attribute = node.attributes.get("value")
    number = int(attribute.as_tensor().numpy().reshape(-1)[0]) if attribute is not None else 0
    return [Size.of(number)] * length[0] if length and len(length) == 1 else None


def _arithmetic(combine: Callable[[Size, Size], Size | None]) -> Rule:
    def rule(known: Known, node: ir.Node) -> Sizes | None:
        first, second = known.ints(node, 0), known.ints(node, 1)
        if not first or not second:
            return None
        count = max(len(first), len(second))
        if any(len(each) not in (1, count) for each in (first, second)):
            return None
        pairs = zip(first * (count // len(first)), second * (count // len(second)), strict=True)
        return [None if a is None or b is None else combine(a, b) for a, b in pairs]

    return rule


def _divided(known: Known, node: ir.Node) -> Sizes | None:
    """The quotient, of integers rounded down where both are numbers; floats may have a fraction."""
    dtype = node.outputs[0].dtype
    whole = dtype is not None and dtype.is_integer()

    def divide(a: Size, b: Size) -> Size | None:
        if a.number is not None and b.number is not None and a.number >= 0 < b.number:
            return Size.of(a.number // b.number) if whole or not a.number % b.number else None
        return a.over(b)

    return _arithmetic(divide)(known, node)


def _equal(a: Size, b: Size) -> Size | None:
    """1 where two sizes are one, 0 where they cannot be: sizes of axes are not negative."""
    if a == b:
        return Size.of(1)
    known = a.number is not None and b.number is not None
    negative = [x.number is not None and x.number < 0 for x in (a, b)]
    apart = (negative[0] and b.is_positive) or (negative[1] and a.is_positive)
    return Size.of(0) if known or apart else None


def _chosen(known: Known, node: ir.Node) -> Sizes | None:
    which, yes, no = (known.ints(node, index) for index in range(3))
    if not which or not yes or not no:
        return None
    count = max(len(which), len(yes), len(no))
    if any(len(each) not in (1, count) for each in (which, yes, no)):
        return None
    rows = zip(*(each * (count // len(each)) for each in (which, yes, no)), strict=True)
    return [None if w is None else (a if w.number else b) for w, a, b in rows]


INTS: dict[str, Rule] = {
    "Shape": _shape_op,
    "Gather": _gathered,
    "Slice": _sliced_ints,
    "Concat": _joined,
    "Cast": _kept,
    "Identity": _kept,
    "Squeeze": _kept,
    "Unsqueeze": _kept,
    "Reshape": _kept,
    "ConstantOfShape": _filled,
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _divided,
    "Equal": _arithmetic(_equal),
    "Where": _chosen,
}
"""Ops whose results are sizes; of what has more axes the elements are in order."""
