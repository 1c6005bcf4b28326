"""The ops that read packed weights: what each reads and where, how its weight lies, since when.

One entry an op: from it follow which nodes are sites, what a file's nodes must have, which inputs a
check and a lowering look at, and which release of ONNX Runtime runs it. A new op takes an entry
here, what its kernels take in the runtime that has them, and a pass that writes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from qgraph.op_inputs import CONTRIB, OpInputs

if TYPE_CHECKING:
    import onnx_ir as ir

    from qgraph.ort_versions import Version

MATMUL_NBITS = "com.microsoft::MatMulNBits"
GATHER_BLOCK_QUANTIZED = "com.microsoft::GatherBlockQuantized"
DEQUANTIZE_LINEAR = "ai.onnx::DequantizeLinear"
MATMUL_BNB4 = "com.microsoft::MatMulBnb4"
MATMUL_FP8 = "com.microsoft::MatMulBlockQuantizedFp8Weight"
MATMUL_FP4 = "com.microsoft::MatMulBlockQuantizedFp4Weight"
DYNAMIC_QUANTIZE_MATMUL = "com.microsoft::DynamicQuantizeMatMul"
MATMUL_INTEGER_TO_FLOAT = "com.microsoft::MatMulIntegerToFloat"
OWN_LINEAR = "qgraph::Linear"
"""The portable form, where a runtime has a kernel for it as a whole."""
OWN_DEQUANTIZE = "qgraph::Dequantize"
"""The plain function in front of the op, where a runtime computes it once, at load."""

Kind = Literal["linear", "gather", "dequantize"]
Read = Literal[
    "x", "x_scale", "x_zero", "codes", "scales", "zeros", "tensor", "weight_zero", "order", "bias"
]
PackedPart = Literal["codes", "scales", "zeros", "tensor"]
_PARTS: tuple[PackedPart, ...] = ("codes", "scales", "zeros", "tensor")


@dataclasses.dataclass(frozen=True)
class Since:
    """The first release with a kernel for some weights.

    bits, level, dtype: of which weights, accuracy level and type of activations; None is any.
    """

    release: Version
    bits: int | None = None
    level: int | None = None
    dtype: str | None = None

    def holds(self, bits: int, level: int, dtype: str) -> bool:
        """Whether it is said of these."""
        wanted = ((self.bits, bits), (self.level, level), (self.dtype, dtype))
        return all(own is None or own == given for own, given in wanted)


@dataclasses.dataclass(frozen=True)
class KernelOp(OpInputs[Read]):
    """One op that reads a packed weight.

    name: with its domain. Our functions' begin so, and end in a format.
    kind: what it gives: a product, rows that indices pick, or the whole weight as floats.
    inputs: what they are, in order. `x` is the activation, or the indices; `x_scale` and `x_zero`
        are of its codes. Parts of the weight are called as formats call them; of a function of
        ours `zeros` is whatever part is the third. `weight_zero` is the zero point of codes in
        whole bytes, which no format packs. `order` says which group each column belongs to.
    least: how many of them a node has at the least.
    attributes: those that are read or written here; None where a node must have it, else what it
        is where the node has none.
    layout: the kind of `Layout` in which it reads weights; empty where that is the format's own.
    format: of an op for one format, that one.
    since: the first releases of ONNX Runtime with its kernels, of which the first that holds
        counts; where none does, the oldest that was tried has them.
    """

    kind: Kind
    least: int
    attributes: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    layout: Literal["", "blocks", "qdq", "flat", "own", "kn"] = ""
    format: str = ""
    since: tuple[Since, ...] = ()

    @functools.cached_property
    def parts(self) -> Mapping[PackedPart, int]:
        """By part of the weight the input that holds it, in the order of the inputs."""
        return {part: self.inputs.index(part) for part in _PARTS if part in self.inputs}

    @property
    def x(self) -> int | None:
        """The input of the activation, or of the indices; None where there is none."""
        return self.at("x")

    @property
    def bias(self) -> int | None:
        """The input of the bias; None where it adds none."""
        return self.at("bias")

    @property
    def defaults(self) -> dict[str, int]:
        """What attributes are that a node may leave out."""
        return {name: value for name, value in self.attributes.items() if value is not None}

    @property
    def required(self) -> tuple[str, ...]:
        """Attributes that a node must have."""
        return tuple(name for name, default in self.attributes.items() if default is None)

    @property
    def is_integer(self) -> bool:
        """Whether it multiplies activations of bytes, by codes `[K, N]` of bytes."""
        return self.layout == "kn"

    def row_axis(self, part: PackedPart) -> int:
        """The axis of a part along which the rows of the weight lie."""
        return 1 if self.is_integer and part == "codes" else 0

    def number(self, node: ir.Node, attribute: str) -> int:
        """What a node says of an attribute, or what holds where it says nothing; else 0."""
        return node.attributes.get_int(attribute, self.defaults.get(attribute, 0))


_SIZES = {"K": None, "N": None, "block_size": None}
_OPS = (
    KernelOp(
        MATMUL_NBITS, ("x", "codes", "scales", "zeros", "order", "bias"), "linear", 3,
        {**_SIZES, "bits": 4, "accuracy_level": 0}, "blocks",
        since=(
            Since((1, 28), bits=2, dtype="float16"),
            Since((1, 24), bits=2),
            Since((1, 22), bits=8, level=4),  # computed in int8, which came first
            Since((1, 23), bits=8),
        ),
    ),
    KernelOp(
        MATMUL_BNB4, ("x", "codes", "scales"), "linear", 3, {**_SIZES, "quant_type": None}, "flat",
    ),
    KernelOp(
        MATMUL_FP8, ("x", "codes", "scales", "x_scale", "bias"), "linear", 3,
        {"block_size": 128}, "own", "fp8-e4m3", (Since((1, 29)),),
    ),
    KernelOp(
        MATMUL_FP4, ("x", "codes", "scales", "tensor", "x_scale", "bias"), "linear", 4,
        {"block_size": 16}, "own", "nvfp4", (Since((1, 29)),),
    ),
    KernelOp(
        DYNAMIC_QUANTIZE_MATMUL, ("x", "codes", "scales", "weight_zero", "bias"), "linear", 3,
        layout="kn",
    ),
    KernelOp(
        MATMUL_INTEGER_TO_FLOAT,
        ("x", "codes", "x_scale", "scales", "x_zero", "weight_zero", "bias"), "linear", 4,
        layout="kn",
    ),
    KernelOp(
        GATHER_BLOCK_QUANTIZED, ("codes", "x", "scales", "zeros"), "gather", 3,
        {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}, "blocks",
        since=(Since((1, 27), bits=2), Since((1, 23))),  # of codes in bytes
    ),
    KernelOp(DEQUANTIZE_LINEAR, ("codes", "scales", "zeros"), "dequantize", 2, layout="qdq"),
    KernelOp(OWN_DEQUANTIZE, ("codes", "scales", "zeros"), "dequantize", 2),
    KernelOp(OWN_LINEAR, ("x", "codes", "scales", "zeros"), "linear", 2),
)  # fmt: skip
KERNEL_OPS: Mapping[str, KernelOp] = {op.name: op for op in _OPS}
CONTRIB_OPS: Mapping[str, KernelOp] = {
    op.op_type: op for op in _OPS if op.name.startswith(f"{CONTRIB}::")
}
"""ONNX Runtime's own, by their names without the domain."""
INTEGER_MATMULS = tuple(op.name for op in _OPS if op.is_integer)
"""Products of uint8 activations and int8 weights `[K, N]`, one scale to a row of the weight."""
NBITS = KERNEL_OPS[MATMUL_NBITS]
_OWN = (KERNEL_OPS[OWN_DEQUANTIZE], KERNEL_OPS[OWN_LINEAR])


def reading_op(node: ir.Node) -> KernelOp | None:
    """How a node reads a packed weight; None where it is no op that does."""
    name = f"{node.domain or 'ai.onnx'}::{node.op_type}"
    found = KERNEL_OPS.get(name)
    return found or next((op for op in _OWN if name.startswith(op.name)), None)
