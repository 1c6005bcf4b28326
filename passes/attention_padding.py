"""Which numbers of a padding let its tokens be seen: all but 0, or 1 alone, or all but one id.

A mask that is made of `attention_mask == 1`, or of `input_ids != 50`, must hide the same tokens
after it was fused, whatever numbers it is given: those around each constant that it is made with
are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import scalar
from qgraph.formats.base import Array
from qgraph.passes.fusion import Attributes, Builder
from qgraph.passes.matching import made_by

_TESTS: dict[str, Callable[[Array, float], Array]] = {
    "Equal": np.equal,
    "Greater": np.greater,
    "Less": np.less,
}
_NEAR = 1e-6
_BEYOND = 9.0


@dataclasses.dataclass(frozen=True)
class Kept:
    """A token is seen where `op` of its padding and `number` is true; false where `negated`.

    tried: the numbers that this was tried on.
    """

    op: str = "Equal"
    number: float = 0.0
    negated: bool = True
    tried: tuple[float, ...] = dataclasses.field(default=(0.0, 1.0), compare=False)

    def __call__(self, padding: Array) -> Array:
        """Which tokens are seen, bool."""
        found: Array = _TESTS[self.op](padding, self.number) != self.negated
        return found

    @property
    def open(self) -> list[float]:
        """The numbers tried that let a token be seen."""
        return [number for number in self.tried if self(np.asarray(number))]

    @property
    def words(self) -> str:
        """What is seen, as in "where it is 1"; empty where it is all but 0."""
        if self == NOT_ZERO:
            return ""
        verb = {"Equal": "", "Greater": "above ", "Less": "below "}[self.op]
        return f"where it is {'not ' if self.negated else ''}{verb}{self.number:g}"

    def tested(self, builder: Builder, padding: ir.Value) -> ir.Value:
        """Which tokens are seen, bool `[B, T]`, in the graph."""
        truth = ir.DataType.BOOL
        if self == NOT_ZERO:
            to: Attributes = {"to": truth.value}
            return builder.op("Cast", [padding], attributes=to, dtype=truth)
        assert padding.dtype is not None
        array = np.array(self.number, padding.dtype.numpy())
        number = builder.constant("padding_number", array)
        found = builder.op(self.op, [padding, number], dtype=truth)
        return builder.op("Not", [found], dtype=truth) if self.negated else found


NOT_ZERO = Kept()
"""What a mask of ones and zeros means."""


def tested_by(seen: ir.Value | None) -> tuple[ir.Value, Kept] | None:
    """The padding that `Kept.tested` made `seen` of, and by which test; None for another value."""
    cast = made_by(seen, "Cast")
    if cast is not None and cast.inputs[0] is not None:
        return cast.inputs[0], NOT_ZERO
    inverted = made_by(seen, "Not")
    test = made_by(inverted.inputs[0] if inverted is not None else seen, *_TESTS)
    number = scalar(test.inputs[1]) if test is not None and test.inputs[1] is not None else None
    if test is None or number is None or test.inputs[0] is None:
        return None
    return test.inputs[0], Kept(test.op_type, number, inverted is not None)


def critical(numbers: Iterable[float], dtype: ir.DataType | None) -> list[float]:
    """Numbers of this type below, at and above 0, 1 and each of `numbers`: `c - 1`, `c`, `c + 1`.

    Floats also take what is half way and what is very near; the ends tell a bound from a number.
    """
    if dtype is None or dtype == ir.DataType.BOOL:
        return [0.0, 1.0]
    steps, low, high = [-1.0, 0.0, 1.0], -np.inf, np.inf
    if dtype.is_floating_point():
        steps += [-0.5, 0.5, -_NEAR, _NEAR]
    else:
        limits = np.iinfo(dtype.numpy())
        low, high = float(limits.min), float(limits.max)
        numbers = [float(np.floor(number)) for number in numbers]
    centers = {0.0, 1.0, *numbers}
    found = {number + step for number in centers for step in steps}
    found |= {min(found) - _BEYOND, max(found) + _BEYOND}
    return sorted(number for number in found if low <= number <= high)


def pairs_of(numbers: Sequence[float], rows: int, length: int) -> Iterator[Array]:
    """Padding `[rows, length]` in which one number is everywhere but at the end, for each pair.

    The last pair fills up what is left of the last rows.
    """
    pairs = [(first, last) for first in numbers for last in numbers]
    for start in range(0, len(pairs), rows):
        chosen = (pairs[start : start + rows] + pairs[-1:] * rows)[:rows]
        made = np.repeat(np.array([first for first, _ in chosen])[:, None], length, 1)
        made[:, -1] = [last for _, last in chosen]
        yield made


def kept_of(seen: Array, numbers: Sequence[float]) -> Kept | str:
    """The test behind what a token sees of the first one and of itself; or why it is none.

    seen: bool `[n², 2]`, for each pair of numbers in the order of `pairs_of`: the first token's
        and its own. A token that sees nothing may be given anything to see, so a number hides
        where it does so while another one does not, or always.
    """
    first, own = seen.reshape(len(numbers), len(numbers), 2).transpose(2, 0, 1)
    hides = (first & ~own).any(axis=0) | ~own.any(axis=0)
    if hides.all():
        return "none of its numbers lets a token be seen"
    tests = [NOT_ZERO]
    tests += [
        Kept(op, number, negated)
        for number in numbers
        for op in _TESTS
        for negated in (False, True)
    ]
    array = np.array(numbers)
    for test in tests:
        if np.array_equal(test(array), ~hides):
            return dataclasses.replace(test, tried=tuple(numbers))
    hidden = ", ".join(f"{number:g}" for number in array[hides])
    return f"it hides {hidden}, which is neither a number nor a bound"
