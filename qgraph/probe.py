"""What the numeric check looks at: a node that reads a quantized weight, and its kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qgraph.block_sums import BlockSums
from qgraph.capabilities import FLOAT_ACTIVATIONS, INTEGERS
from qgraph.formats.base import Array, Part
from qgraph.integer_sites import IntegerProduct
from qgraph.kernel_ops import Kind as Kind
from qgraph.op_inputs import bare_name
from qgraph.stored_weight import StoredWeight
from qgraph.wording import counted


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """What decides which code a kernel runs; sites of one key are checked by one run.

    op: the operator with its domain. dtype: numpy's name of the activation type.
    level: accuracy level, 0 where the kernel has none. bias: whether the kernel adds one.
    numbers: the kind of number that the codes are, as the format names it.
    sums: whether minimums of groups, times sums of the activation, are added.
    activations: how the graph rounds what is multiplied, see `Recipe`.
    columns: how many input columns are multiplied in float all the same.
    """

    op: str
    n: int
    k: int
    bits: int
    block: int
    symmetric: bool
    dtype: str
    level: int = 0
    bias: bool = False
    numbers: str = "int"
    sums: bool = False
    activations: str = FLOAT_ACTIVATIONS
    columns: int = 0

    def __str__(self) -> str:
        codes = f"bits={self.bits}" if self.numbers in INTEGERS else self.numbers
        words = [bare_name(self.op), f"[{self.n}, {self.k}]", codes]
        words += [f"block={self.block or 'row'}", "" if self.symmetric else "asymmetric"]
        words += [self.dtype, f"level={self.level}" if self.level else "", "sums" * self.sums]
        words += [f"{self.activations} activations"] * (self.activations != FLOAT_ACTIVATIONS)
        words += [f"{counted(self.columns, 'column')} in float"] * bool(self.columns)
        return " ".join(word for word in [*words, "bias" if self.bias else ""] if word)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A node that reads a quantized weight, and the sites that stand for it.

    positions: input index → the part of the weight that is read there.
    x: the input index of the activation or the indices; None where there is none.
    bias: the input index of the bias, where the operator takes one.
    sums: what minimums of groups add to the node's result, where they do.
    integer: what stands around the node, where it multiplies quantized activations.
    constants: name → tensor, of what that reads besides the weight, as stored.
    """

    sites: tuple[str, ...]
    node: ir.Node
    key: KernelKey
    kind: Kind
    weight: StoredWeight
    positions: Mapping[int, Part]
    x: int | None
    bias: int | None = None
    sums: BlockSums | None = None
    integer: IntegerProduct | None = None
    constants: Mapping[str, ir.TensorProtocol] = dataclasses.field(default_factory=dict)


def given_bias(probe: Probe) -> Array:
    """A bias `[N]` of Gaussian values; what it is does not matter, that it is added does."""
    return np.random.default_rng(1).standard_normal(probe.key.n).astype(probe.key.dtype)


def dequantized_rows(probe: Probe) -> int:
    """Rows that a model without an activation dequantizes: the first block, or all columns."""
    codes = probe.weight.source.parts(probe.weight.layout)["codes"]
    return probe.weight.source.n if codes.axis else probe.weight.sample()[0][1]


def x_type(probe: Probe) -> ir.DataType:
    """The type of the activation, or of the indices."""
    assert probe.x is not None
    value = probe.node.inputs[probe.x] if probe.integer is None else probe.integer.x
    if value is not None and value.dtype is not None:
        return value.dtype
    return ir.DataType.INT64 if probe.kind == "gather" else probe.weight.source.scale_dtype
