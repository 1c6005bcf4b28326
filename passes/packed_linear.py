"""What a linear of packed weights is made of: its product, and what follows up to its output."""

from __future__ import annotations

import dataclasses
from typing import Literal

import onnx_ir as ir

from qgraph.activation_kinds import INT8_ROW
from qgraph.integer_sites import IntegerProduct, integer_product
from qgraph.kernel_ops import (
    DYNAMIC_QUANTIZE_MATMUL,
    KERNEL_OPS,
    MATMUL_INTEGER_TO_FLOAT,
    MATMUL_NBITS,
)
from qgraph.passes.fusion import MICROSOFT
from qgraph.passes.matching import only_reader

NUMBERS = ("K", "bits", "block_size", "accuracy_level")
"""Attributes of kernels, besides N."""
_MOST_BEHIND = 4


_MERGED = (MATMUL_NBITS, MATMUL_INTEGER_TO_FLOAT, DYNAMIC_QUANTIZE_MATMUL)
OPS = {KERNEL_OPS[name].op_type: KERNEL_OPS[name] for name in _MERGED}
"""Ops whose weights are put together row by row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Behind:
    """A node behind a product: what it does, and what it reads besides.

    rows: times the scale of each row. floats: plus the product of `gathered`, the columns that
    stay in float, whose weight `other` is. cast: to another type. bias: plus a constant `[N]`.
    """

    kind: Literal["rows", "floats", "cast", "bias"]
    node: ir.Node
    other: ir.Value | None = None
    gathered: ir.Value | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """One linear: its product, and what follows up to its output."""

    product: ir.Node
    behind: tuple[Behind, ...]
    integer: IntegerProduct | None

    @property
    def name(self) -> str:
        """The site's name."""
        return str(self.product.name)

    @property
    def output(self) -> ir.Value:
        """What its readers read."""
        last = self.behind[-1].node if self.behind else self.product
        return last.outputs[0]

    @property
    def activation(self) -> ir.Value:
        """What it multiplies, in float."""
        value = self.product.inputs[0] if self.integer is None else self.integer.x
        assert value is not None
        return value

    @property
    def rows(self) -> int:
        """The weight's rows, channels of the output."""
        op = OPS[self.product.op_type]
        codes, axis = op.read(self.product, "codes"), op.row_axis("codes")
        size = codes.shape[axis] if codes is not None and codes.shape is not None else 0
        return size if isinstance(size, int) else 0

    @property
    def bias(self) -> ir.Value | None:
        """What the product itself adds."""
        return OPS[self.product.op_type].read(self.product, "bias")

    @property
    def kind(self) -> tuple[object, ...]:
        """What two linears must have in common to be one, besides what they read."""
        op = OPS[self.product.op_type]
        numbers = (self.product.attributes.get_int(name, 0) for name in NUMBERS)
        present = (op.read(self.product, part) is not None for part in op.parts)
        behind = (
            (each.kind, each.node.outputs[0].dtype, each.kind == "floats" and columns_of(each))
            for each in self.behind
        )
        return (self.product.op_type, *numbers, *present, self.bias is None, *behind)

    @property
    def shared(self) -> tuple[ir.Value | None, ...]:
        """What does not belong to rows of the weight: the activation, rounded, and its scales."""
        op = OPS[self.product.op_type]
        own = {op.bias, *op.parts.values()}
        given = {at: v for at, v in enumerate(self.product.inputs) if v is not None}
        read = [value for at, value in given.items() if at not in own]
        behind = (e.other if e.kind == "rows" else e.gathered for e in self.behind)
        return (*read, *behind)


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies by packed weights of a kind that can be put together."""
    return node.domain == MICROSOFT and node.op_type in OPS


def linear_of(value: ir.Value | None) -> Linear | None:
    """The linear whose output `value` is; None where more is between, or none is there."""
    behind: list[ir.Node] = []
    node = value.producer() if value is not None else None
    while node is not None and not is_product(node):
        known = not node.domain and node.op_type in ("Mul", "Add", "Cast")
        if not known or len(behind) == _MOST_BEHIND:
            return None
        behind.append(node)
        read = next((v for v in node.inputs if v is not None and v.const_value is None), None)
        node = read.producer() if read is not None else None
    if node is None:
        return None
    integer = integer_product(node)
    if integer is None and OPS[node.op_type].is_integer:
        return None
    product = Linear(node, (), integer)
    found = [_behind(each, product) for each in reversed(behind)]
    if not all(found):
        return None
    return dataclasses.replace(product, behind=tuple(each for each in found if each is not None))


def bias_of_site(node: ir.Node) -> ir.Value | None:
    """The constant `[N]` that a product adds, or that is added to it; None where there is none."""
    linear = linear_of(node.outputs[0]) if is_product(node) else None
    if linear is None or linear.bias is not None:
        return linear.bias if linear is not None else None
    value = linear.integer.y if linear.integer is not None else linear.output
    while (reader := only_reader(value)) is not None and reader.op_type in ("Cast", "Add"):
        if reader.op_type == "Add":
            found = _behind(reader, linear)
            return found.other if found is not None and found.kind == "bias" else None
        value = reader.outputs[0]
    return None


def _behind(node: ir.Node, linear: Linear) -> Behind | None:
    integer = linear.integer
    if node.op_type == "Cast":
        return Behind("cast", node)
    for other in node.inputs:
        if other is None:
            continue
        if node.op_type == "Add" and other.is_initializer():
            fits = other.shape is not None and list(other.shape) == [linear.rows]
            return Behind("bias", node, other) if fits else None
        if integer is None:
            continue
        if node.op_type == "Mul" and integer.activations == INT8_ROW:
            scaled = linear.product.outputs[0]
            if scaled in node.inputs and other is not scaled:
                return Behind("rows", node, other)
        part = integer.float_part
        if node.op_type == "Add" and part is not None and other is part.node.outputs[0]:
            return Behind("floats", node, part.weight, part.node.inputs[0])
    return None


def columns_of(behind: Behind) -> int:
    """How many input columns stay in float."""
    shape = behind.other.shape if behind.other is not None else None
    return int(shape[0]) if shape is not None and isinstance(shape[0], int) else 0
