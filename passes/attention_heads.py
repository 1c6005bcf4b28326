"""Walking back from the two products of an attention to what its heads are made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from qgraph.constants import small_ints
from qgraph.passes.fusion import Builder
from qgraph.passes.matching import made_by, number

HEADS_FIRST = (0, 2, 1, 3)
"""The permutation between `[B, S, H, D]` and `[B, H, S, D]`."""
_VIEWS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Tile", "Identity")


@dataclasses.dataclass(frozen=True)
class Scaled:
    """value: what is left after the views and factors in front of it. factor: their product."""

    value: ir.Value
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Heads:
    """Where heads come from: `value` is `[B, S, H·D]`, `[B, S, H, D]` or `[B, H, S, D]`.

    layout: "packed", "tokens first" or "heads first".
    """

    value: ir.Value
    layout: str

    def packed(self, builder: Builder) -> ir.Value:
        """`[B, S, H·D]`."""
        if self.layout == "packed":
            return self.value
        value, dims = self.value, self._dims
        if self.layout == "heads first":
            dims = [dims[axis] for axis in HEADS_FIRST]
            value = builder.op("Transpose", [value], attributes={"perm": [*HEADS_FIRST]},
                               dtype=value.dtype, shape=dims)  # fmt: skip
        shape = [*dims[:2], math.prod(size for size in dims[2:] if isinstance(size, int))]
        return builder.op("Reshape", [value, joined(builder)], dtype=value.dtype, shape=shape)

    @property
    def _dims(self) -> list[int | str | None]:
        """Of `value`, which has four; numbers of heads and of their elements are fixed in them."""
        dims = self.value.shape or ()
        return [dim if isinstance(dim, int) else dim.value for dim in dims]


def joined(builder: Builder) -> ir.Value:
    """The shape operand that joins heads and their elements: (0, 0, -1)."""
    return builder.shared(
        "joined heads", lambda b: [b.constant("joined_heads", np.array([0, 0, -1], np.int64))]
    )[0]


def unviewed(value: ir.Value | None, factors: bool = True) -> Scaled | None:
    """Walk back through views, and factors that are one constant."""
    found = [*_back(value, factors)]
    return found[-1] if found else None


def _back(value: ir.Value | None, factors: bool) -> Iterator[Scaled]:
    """`value`, and what it is a view of or a multiple of, each with the factor on the way."""
    factor = 1.0
    while value is not None:
        yield Scaled(value, factor)
        node = value.producer()
        if node is None or node.domain:
            return
        if node.op_type in _VIEWS:
            value = node.inputs[0]
            continue
        scaled = scaling(node) if factors else None
        if scaled is None:
            return
        value, factor = scaled.value, factor * scaled.factor


def scaling(node: ir.Node | None) -> Scaled | None:
    """The operand and the factor of a multiplication with, or a division by, one constant."""
    if node is None or node.domain or node.op_type not in ("Mul", "Div"):
        return None
    first, second = node.inputs
    by = number(second)
    if by is not None and first is not None and by != 0:
        return Scaled(first, by if node.op_type == "Mul" else 1.0 / by)
    by = number(first)
    if by is not None and second is not None and node.op_type == "Mul":
        return Scaled(second, by)
    return None


def heads_of(
    value: ir.Value, count: int | None, size: int, factors: bool = True
) -> tuple[Heads, float] | None:
    """Where the heads in `value` come from, and the factors on the way.

    count, size: how many heads there are, where it is known, and the elements of each.
    factors: whether there may be any.
    """
    found, factor = None, 1.0
    for each in _back(value, factors):
        if each.factor != factor:  # what was found before is not yet multiplied
            found, factor = None, each.factor
        layout = _layout(each.value, count, size)
        found = Heads(each.value, layout) if layout else found
    return None if found is None else (found, factor)


def _layout(value: ir.Value, count: int | None, size: int) -> str:
    """How heads lie in `value`; "" where it holds them in no known order."""
    dims = value.shape
    if dims is None:
        return ""
    if len(dims) == 3 and isinstance(dims[2], int) and dims[2] % size == 0:
        return "packed" if count is None or dims[2] == count * size else ""
    if len(dims) == 4 and dims[3] == size:
        if isinstance(dims[2], int) and dims[2] == count and not isinstance(dims[1], int):
            return "tokens first"
        if isinstance(dims[1], int) and (count is None or dims[1] == count):
            return "heads first"
    return ""


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions, where it is known."""
    return None if value is None or value.shape is None else len(value.shape)


def fixed(value: ir.Value | None, axis: int) -> int | None:
    """The size of an axis, where it is fixed; else as the Reshape that makes it says."""
    if value is None:
        return None
    shape = value.shape
    if shape is not None and isinstance(size := shape[axis], int):
        return size
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Transpose":
        perm = [int(each) for each in node.attributes["perm"].as_ints()]
        return fixed(node.inputs[0], perm[axis])
    if node.op_type == "Reshape":
        target = node.inputs[1]
        parts = made_by(target, "Concat")
        sizes = [small_ints(part) for part in parts.inputs] if parts else [small_ints(target)]
        flat = [size for part in sizes for size in (part if part is not None else [0])]
        return flat[axis] if axis < len(flat) and flat[axis] > 0 else None
    return None
