"""Linears that multiply quantized activations: what stands around their integer product.

`y = x · Wᵀ` with activations rounded to uint8 (zero point 128) is, by the scales of the activation:

int8         y = DynamicQuantizeMatMul(x, codes, scales)
int8-row     a = ReduceMax(Abs(x));  s = Max(a / 127, tiny)           one scale to a row of x
             q = QuantizeLinear(Div(x, s), 1, 128)
             y = Mul(MatMulIntegerToFloat(q, codes, 1, scales, 128), s)
int8-static  q = QuantizeLinear(x, s, z)
             y = MatMulIntegerToFloat(q, codes, s, scales, z)

Where some input columns stay in float their codes are zero, the scales of the activation are
taken without them, and `Add(…, MatMul(Gather <axis = -1> (x, columns), floats))` brings them in.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.activation_kinds import INT8, INT8_ROW, INT8_STATIC, TOP_CODE
from qgraph.formats.base import Array
from qgraph.kernel_ops import DYNAMIC_QUANTIZE_MATMUL, KERNEL_OPS, MATMUL_INTEGER_TO_FLOAT
from qgraph.scopes import is_onnx

ZERO_POINT = 128
"""Of uint8 activations whose range is symmetric. Signed ones have kernels 4 to 25 times slower."""
REACH = 127
"""Steps from the zero point to the largest |x| of a row."""
LEAST_STEP = 1e-30
"""The least step of a row: a row of zeros divides by it."""


@dataclasses.dataclass(frozen=True, eq=False)
class FloatPart:
    """Input columns that are multiplied in float.

    node: the MatMul. columns: the indices, int64 `[C]`. weight: float `[C, N]`.
    """

    node: ir.Node
    columns: ir.Value
    weight: ir.Value

    def add_to(self, rows: Array, start: int, stop: int) -> Array:
        """Rows `start:stop` `[n, K]` of the integer weight with what these columns add to them."""
        whole = rows.copy()
        columns, weight = self.columns.const_value, self.weight.const_value
        assert columns is not None and weight is not None
        whole[:, columns.numpy()] += weight.numpy()[:, start:stop].T
        return whole


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerProduct:
    """One linear of quantized activations.

    product: DynamicQuantizeMatMul or MatMulIntegerToFloat. activations: see `Recipe`.
    numbers: of the weight's codes: `int`, or `uint`, which has 128 added to them.
    symmetric: whether the weight's zero point is that.
    x: the float activation `[…, K]`. y: the result, where the float part is in, without what
        the graph adds behind it.
    quantizing: the nodes from x to the product's input, in order.
    """

    product: ir.Node
    activations: str
    numbers: Literal["int", "uint"]
    symmetric: bool
    x: ir.Value
    y: ir.Value
    quantizing: tuple[ir.Node, ...] = ()
    float_part: FloatPart | None = None

    @property
    def columns(self) -> Array:
        """The input columns that stay in float, int64."""
        part = self.float_part
        tensor = part.columns.const_value if part is not None else None
        return tensor.numpy() if tensor is not None else np.empty(0, np.int64)

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes from x to y, in an order in which they can run."""
        order: dict[int, ir.Node] = {}

        def visit(value: ir.Value | None) -> None:
            node = value.producer() if value is not None and value is not self.x else None
            if node is None or id(node) in order:
                return
            for each in node.inputs:
                visit(each)
            order[id(node)] = node

        visit(self.y)
        return tuple(order.values())

    def rounding(self, x: Array) -> Array:
        """A bound on |x − x̂|, float32 like x `[…, K]`: how far off the product reads each element.

        Half a step, and what arithmetic in float32 adds to it; more where a static range does not
        reach. x is the whole activation: a step may come from all of it.
        """
        plain = x.astype(np.float32)
        plain[..., self.columns] = 0
        if self.activations == INT8_STATIC:
            bound = self._static_rounding(plain)
        elif self.activations == INT8_ROW:
            steps = np.abs(plain).max(axis=-1, keepdims=True) / REACH
            bound = np.broadcast_to(_HALF * np.maximum(steps, LEAST_STEP), x.shape).copy()
        else:
            span = max(float(plain.max()), 0.0) - min(float(plain.min()), 0.0)
            bound = np.full(x.shape, _HALF * span / TOP_CODE, np.float32)
        bound[..., self.columns] = 0
        return bound

    def with_floats(self, rows: Array, start: int, stop: int) -> Array:
        """Rows `start:stop` `[n, K]` of the integer weight with the columns that stay in float."""
        return rows if self.float_part is None else self.float_part.add_to(rows, start, stop)

    @property
    def fitting_scale(self) -> float:
        """What numbers of about 1 are to be multiplied by so that a static range holds them."""
        if self.activations != INT8_STATIC:
            return 1.0
        return max(abs(end) for end in self.static_range) / 4

    def _static_rounding(self, x: Array) -> Array:
        low, high = self.static_range
        step = (high - low) / TOP_CODE
        outside = np.maximum(low - x, x - high)
        found: Array = np.maximum(outside, _HALF * step).astype(np.float32)
        return found

    @property
    def static_range(self) -> tuple[float, float]:
        """What the least and the largest code stand for; scale and zero point are constant."""
        quantize = self.quantizing[-1]
        scale, zero = (value.const_value for value in quantize.inputs[1:3] if value is not None)
        assert scale is not None and zero is not None
        step, at = float(scale.numpy().reshape(())), int(zero.numpy().reshape(()))
        return -at * step, (TOP_CODE - at) * step


_HALF = np.float32(0.5001)


def integer_product(node: ir.Node) -> IntegerProduct | None:
    """The linear whose product `node` is; None where it is none, or does not read a constant."""
    read = _READ.get(f"{node.domain}::{node.op_type}")
    weight = node.inputs[1] if read is not None and len(node.inputs) > 2 else None
    if read is None or weight is None or weight.const_value is None:
        return None
    return read(node)


def _dynamic(node: ir.Node) -> IntegerProduct | None:
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return None
    found = IntegerProduct(node, INT8, *_weight_of(node), x, y)
    mask = x.producer()
    if mask is not None and is_onnx(mask, "Mul") and mask.inputs[0] is not None:
        masked = dataclasses.replace(found, x=mask.inputs[0], quantizing=(mask,))
        with_part = _with_float_part(masked)
        if with_part.float_part is not None:
            return with_part
    return found


def _quantized(node: ir.Node) -> IntegerProduct | None:
    codes = node.inputs[0]
    quantize = codes.producer() if codes is not None else None
    value = quantize.inputs[0] if quantize is not None and quantize.inputs else None
    if quantize is None or value is None:
        return None
    kind = _weight_of(node)
    found = IntegerProduct(node, INT8, *kind, value, node.outputs[0], (quantize,))
    if quantize.op_type == "DynamicQuantizeLinear":
        return found
    if quantize.op_type != "QuantizeLinear":
        return None
    row = _by_row(found, value.producer())
    if row is None and any(v is None or v.const_value is None for v in quantize.inputs[1:3]):
        return None
    return _with_float_part(row or dataclasses.replace(found, activations=INT8_STATIC))


def _by_row(found: IntegerProduct, divide: ir.Node | None) -> IntegerProduct | None:
    """Where the activation is divided by what multiplies the product."""
    uses = list(found.y.uses())
    if divide is None or not is_onnx(divide, "Div") or len(uses) != 1:
        return None
    (x, scale), times = divide.inputs, uses[0].node
    if times.op_type != "Mul" or x is None or scale not in times.inputs:
        return None
    return dataclasses.replace(
        found, activations=INT8_ROW, x=x, y=times.outputs[0],
        quantizing=(divide, *found.quantizing),
    )  # fmt: skip


def _with_float_part(found: IntegerProduct) -> IntegerProduct:
    uses = list(found.y.uses())
    add = uses[0].node if len(uses) == 1 and not found.y.is_graph_output() else None
    if add is None or add.op_type != "Add" or len(add.inputs) != 2:
        return found
    other = next(value for value in add.inputs if value is not found.y)
    product = other.producer() if other is not None else None
    if product is None or not is_onnx(product, "MatMul"):
        return found
    gathered, weight = product.inputs
    gather = gathered.producer() if gathered is not None else None
    if gather is None or not is_onnx(gather, "Gather"):
        return found
    if gather.attributes.get_int("axis", 0) != -1:
        return found
    source, columns = gather.inputs
    constant = columns is not None and columns.const_value is not None
    if source is not found.x or not constant or weight is None or weight.const_value is None:
        return found
    assert columns is not None
    part = FloatPart(product, columns, weight)
    return dataclasses.replace(found, y=add.outputs[0], float_part=part)


def _weight_of(node: ir.Node) -> tuple[Literal["int", "uint"], bool]:
    """The numbers of the weight's codes, and whether its zero point is theirs."""
    op = KERNEL_OPS[f"{node.domain}::{node.op_type}"]
    codes, zeros = op.read(node, "codes"), op.read(node, "weight_zero")
    unsigned = codes is not None and codes.dtype == ir.DataType.UINT8
    if zeros is None:
        return "uint" if unsigned else "int", not unsigned
    tensor = zeros.const_value
    middle = ZERO_POINT if unsigned else 0
    known = tensor is not None and tensor.size <= _MOST_ZEROS
    same = known and tensor is not None and bool((tensor.numpy() == middle).all())
    return "uint" if unsigned else "int", same


_MOST_ZEROS = 1 << 20
"""Zero points that are looked at: one for each row of the weight, at most."""
_READ = {DYNAMIC_QUANTIZE_MATMUL: _dynamic, MATMUL_INTEGER_TO_FLOAT: _quantized}
