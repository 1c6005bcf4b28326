"""QuantizeLinear and its kin."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.torch.onnx_ops.cast import convert
from qgraph.runtimes.torch.onnx_ops.host import DTYPES
from qgraph.runtimes.torch.onnx_ops.linear import matmul_integer
from qgraph.runtimes.torch.table import op

_RANGES = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT2: (-2, 1),
    ir.DataType.UINT2: (0, 3),
}


def _spread(part: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Scales or zero points in a shape that broadcasts with x: one, one per slice, or per block."""
    if part.numel() == 1 and part.ndim <= 1:
        return part.reshape(())
    axis = axis + x.ndim if axis < 0 else axis
    if part.ndim == x.ndim and block:
        return part.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return part.reshape([-1 if a == axis else 1 for a in range(x.ndim)])


@op("DequantizeLinear")
@op("DequantizeLinear", domain=CONTRIB)
def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """(x - zero) · scale, in the dtype of the scale."""
    steps = _spread(scale, x, axis, block_size)
    if x.dtype.is_floating_point or zero is None:
        values = x.to(steps.dtype)
    else:
        # Differences of 8 and 16 bits are exact in int32; 32-bit codes have no zero point.
        values = (x.to(torch.int32) - _spread(zero, x, axis, block_size).to(torch.int32)).to(
            steps.dtype
        )
    result = values * steps
    return result.to(DTYPES[output_dtype]) if output_dtype else result


@op("QuantizeLinear")
@op("QuantizeLinear", domain=CONTRIB)
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    types: tuple[int, ...],
) -> Tensor:
    """X / scale rounded to even, plus zero, within the range of the codes.

    Raises:
        InputError: codes of a type to which the executor does not round.
    """
    kind = types[2] if zero is not None else output_dtype
    if kind == ir.DataType.FLOAT4E2M1:
        raise InputError("QuantizeLinear to FLOAT4E2M1, to which the torch executor does not round")
    dtype = zero.dtype if zero is not None else DTYPES[output_dtype or ir.DataType.UINT8]
    wide = torch.float32 if x.dtype != torch.float64 else torch.float64
    ratio = x.to(wide) / _spread(scale, x, axis, block_size).to(wide)
    if dtype.is_floating_point:
        return convert(ratio, dtype, None, bool(saturate))
    if kind in _RANGES:
        least, most = _RANGES[ir.DataType(kind)]
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    offset = 0 if zero is None else _spread(zero, x, axis, block_size).to(wide)
    return torch.clamp(torch.round(ratio) + offset, least, most).to(dtype)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor, *, outputs: int) -> tuple[Tensor, ...]:
    """X in 8 bits over its own range with zero in it: codes, scale, zero point."""
    low = torch.clamp(x.min(), max=0.0)
    high = torch.clamp(x.max(), min=0.0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale).to(torch.float32)
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    codes = torch.clamp(torch.round(x / scale) + zero, 0, 255).to(torch.uint8)
    return (codes, scale, zero.to(torch.uint8))[:outputs]


@op("QLinearMatMul")
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    """A product of 8-bit matrices, in 8 bits again."""
    product = matmul_integer(a, b, a_zero, b_zero).to(torch.float32)
    ratio = product * (a_scale.float() * b_scale.float() / y_scale.float())
    limits = torch.iinfo(y_zero.dtype)
    return torch.clamp(torch.round(ratio) + y_zero, limits.min, limits.max).to(y_zero.dtype)
