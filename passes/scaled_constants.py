"""Constants divided in place: what a node reads, directly or through Cast and Add(w, 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.constants import FLOATS, drop_constant, open_array, scalar
from qgraph.rewrite import Rewriter

TOLERANCE = 2.0**-8
"""How far rounding may move a factor, relative to it. Normal numbers of float16 and bfloat16 are
nearer than this to what they stand for; subnormal ones may not be, and where 1 is added to what
is stored (Gemma), nor may factors near 0."""

Wide: TypeAlias = NDArray[np.float64]


class FoldRefused(Exception):
    """A constant does not hold what a fold would put there; `args[0]` says which and why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A float constant as a node reads it: `root + offset`.

    chain: the Cast, Identity and Add nodes between, root first.
    offset: the sum of the scalars that are added on the way (Gemma's norms read `w + 1`).
    """

    root: ir.Value
    chain: tuple[ir.Node, ...]
    offset: float

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The root's data."""
        tensor = self.root.const_value
        assert tensor is not None
        return tensor

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape that the node reads: scalars added on the way do not change it."""
        return tuple(int(d) for d in self.tensor.shape.numpy())

    @property
    def is_own(self) -> bool:
        """Whether nobody else reads the root, nor what lies between."""
        values = (self.root, *(node.outputs[0] for node in self.chain))
        return all(len(value.uses()) == 1 and not value.is_graph_output() for value in values)


def constant_of(value: ir.Value | None) -> Constant | None:
    """The constant behind `value`, or None if it is computed otherwise."""
    chain: list[ir.Node] = []
    offset = 0.0
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.domain != "":
            return None
        if node.op_type == "Add":
            added = _scalar_operand(node)
            if added is None:
                return None
            position, term = added
            offset += term
            value = node.inputs[1 - position]
        elif node.op_type == "Identity" or _casts_to_float(node):
            value = node.inputs[0]
        else:
            return None
        chain.insert(0, node)
    if value is None or value.const_value is None or value.const_value.dtype not in FLOATS:
        return None
    return Constant(value, tuple(chain), offset)


def _casts_to_float(node: ir.Node) -> bool:
    return node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to", 0)) in FLOATS


def _scalar_operand(node: ir.Node) -> tuple[int, float] | None:
    """Position and value of the operand that is a constant scalar of rank 0 or shape [1]."""
    for position in (1, 0):
        value = node.inputs[position]
        tensor = value.const_value if value is not None else None
        found = scalar(value)
        if found is not None and tensor is not None and len(tensor.shape) <= 1:
            return position, found
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """New data for a constant that input `index` of `node` reads; nothing is changed yet."""

    node: ir.Node
    index: int
    constant: Constant
    data: NDArray[Any]


def plan_change(
    node: ir.Node, index: int, change: Callable[[Wide], Wide], *, factor: bool
) -> Change:
    """Data with which `node` reads `change` of what it reads now, rounded to the constant's type.

    Args:
        node: the reader.
        index: its input that is the constant.
        change: from what is read now to what shall be read, float64.
        factor: the constant multiplies, so that each element must keep its relative precision;
            what is added need only stay finite.

    Raises:
        FoldRefused: an element overflows, becomes zero or loses its precision in that type.
    """
    constant = constant_of(node.inputs[index])
    assert constant is not None
    wanted = change(open_array(constant.tensor).astype(np.float64) + constant.offset)
    stored = rounded(
        wanted, constant.tensor.dtype, constant.root.name or "", constant.offset, factor=factor
    )
    return Change(node, index, constant, stored)


def rounded(
    wanted: Wide, dtype: ir.DataType, name: str, offset: float = 0.0, *, factor: bool
) -> NDArray[Any]:
    """`wanted − offset` in `dtype`.

    Raises:
        FoldRefused: see `plan_change`.
    """
    with np.errstate(over="ignore"):
        stored: NDArray[Any] = (wanted - offset).astype(dtype.numpy())
    error = np.abs(stored.astype(np.float64) + offset - wanted)
    good = error <= TOLERANCE * np.abs(wanted) if factor else np.isfinite(error)
    if not good.all():
        worst = float(wanted[~good].flat[0])
        raise FoldRefused(
            f"{name} would need the value {worst:g}, which {spell(dtype)} cannot hold"
        )
    return stored


def spell(dtype: ir.DataType) -> str:
    """The type by its usual name."""
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def apply_change(change: Change, rewriter: Rewriter) -> None:
    """Write the data: into the constant if only this node reads it, else into a copy for it."""
    constant, data = change.constant, change.data
    tensor = ir.tensor(data, dtype=constant.tensor.dtype, name=constant.root.name)
    if constant.is_own:
        for value in (constant.root, *(node.outputs[0] for node in constant.chain)):
            value.shape = ir.Shape(data.shape)
        constant.root.const_value = tensor
        return
    value = rewriter.initializer(f"{constant.root.name}/scaled", tensor)
    before = constant.root
    for node in constant.chain:
        copy = rewriter.node(
            node.op_type,
            [value if item is before else item for item in node.inputs],
            name=f"{node.name}/scaled",
            dtype=node.outputs[0].dtype,
            shape=data.shape,
        )
        copy.attributes.update(node.attributes)
        rewriter.insert_before(change.node, [copy])
        before, value = node.outputs[0], copy.outputs[0]
    change.node.replace_input_with(change.index, value)
    rewriter.drop_unused(constant.chain)
    drop_constant(constant.root)
