"""Products with packed weights: the custom ops of the library "qgraph"."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

import qgraph.runtimes.torch.ops  # noqa: F401  (registers them)
from qgraph.errors import InputError
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.torch.fp8_products import TOP
from qgraph.runtimes.torch.onnx_ops.gathering import from_front
from qgraph.runtimes.torch.onnx_ops.host import DTYPES
from qgraph.runtimes.torch.table import op


@op("MatMulNBits", domain=CONTRIB)
def matmul_nbits(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Tensor:
    """X · Wᵀ + bias with W `[N, K]` packed in blocks along K; float activations at any level.

    Raises:
        InputError: columns in another order (`g_idx`), a weight packed for one machine, or one
            of another shape than the attributes say.
    """
    if g_idx is not None or weight_prepacked:
        what = "a g_idx" if g_idx is not None else "a prepacked weight"
        raise InputError(f"MatMulNBits with {what} runs on ONNX Runtime alone")
    wanted = (N, -(-K // block_size), block_size * bits // 8)
    if tuple(codes.shape) != wanted:
        raise InputError(
            f"MatMulNBits with codes of {tuple(codes.shape)}: wanted {wanted} for N = {N}, "
            f"K = {K}, bits = {bits}, block_size = {block_size}"
        )
    return torch.ops.qgraph.linear(
        x, codes, _rows(scales, N), _rows(zeros, N), bias, K, _name(bits, zeros)
    )


def _rows(part: Tensor | None, n: int) -> Tensor | None:
    """Scales or zero points as one row per row of W; older files store them flat."""
    return part.reshape(n, -1) if part is not None and part.ndim != 2 else part


def _name(bits: int, zeros: Tensor | None) -> str:
    return f"Int{bits}V1" if zeros is None else f"Uint{bits}V1"


@op("GatherBlockQuantized", domain=CONTRIB)
def gather_block_quantized(
    table: Tensor,
    ids: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
    types: tuple[int, ...] = (),
) -> Tensor:
    """Rows of a table `[N, K]`, dequantized: packed in bytes, or of a 4-bit type of ONNX.

    Without zero points the middle of the range is zero in packed codes, 0 in others.

    Raises:
        InputError: another axis, or codes of another type.
    """
    whole = table.ndim == 2 and gather_axis in (0, -2) and quantize_axis in (1, -1)
    alone = bool(types) and types[0] in (ir.DataType.INT4, ir.DataType.UINT4)
    if not whole or not (alone or table.dtype == torch.uint8) or scales.ndim != 2:
        raise InputError(
            "GatherBlockQuantized of anything but the rows of a matrix of bytes or of 4-bit codes "
            "runs on ONNX Runtime alone"
        )
    if alone:
        return _rows_of_codes(table, ids, scales, zeros, block_size)
    width = table.shape[1] * 8 // bits
    lacking = scales.shape[1] * block_size * bits // 8 - table.shape[1]
    codes = pad(table, (0, lacking)).reshape(*scales.shape, block_size * bits // 8)
    return torch.ops.qgraph.embedding(ids, codes, scales, zeros, width, _name(bits, zeros))


def _rows_of_codes(
    table: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor | None, block: int
) -> Tensor:
    """Rows of a table with one code in each byte, less their zero points, times their scales."""

    def rows(part: Tensor) -> Tensor:
        return embedding(from_front(ids, part.shape[0]), part)

    def columns(part: Tensor) -> Tensor:
        return rows(part).repeat_interleave(block, -1)[..., : table.shape[1]]

    steps = columns(scales)
    codes = rows(table).to(steps.dtype)
    return (codes if zeros is None else codes - columns(zeros).to(steps.dtype)) * steps


_BNB4 = ("Fp4V1", "Nf4V1")
"""By MatMulBnb4's quant_type."""


@op("MatMulBnb4", domain=CONTRIB)
def matmul_bnb4(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Tensor:
    """X · Wᵀ, W `[N, K]` in blocks of elements that follow each other, across rows too.

    Such weights are dequantized before they are multiplied. training_mode changes no number.

    Raises:
        InputError: the product of a backward pass (transB = 0), or an unknown quant_type.
    """
    if not transB:
        raise InputError("MatMulBnb4 with transB = 0, a backward pass, runs on ONNX Runtime alone")
    if quant_type not in (0, 1):
        raise InputError(f"MatMulBnb4: quant_type {quant_type}, wanted 0 (FP4) or 1 (NF4)")
    layout, blob = _BNB4[quant_type], codes.reshape(-1)
    if K % block_size == 0:
        blocks = blob.reshape(N, K // block_size, block_size // 2)
        return torch.ops.qgraph.linear(x, blocks, scales.reshape(N, -1), None, None, K, layout)
    count = -(-N * K // block_size)
    whole = pad(blob, (0, count * block_size // 2 - blob.shape[0]))
    row = whole.reshape(1, count, block_size // 2)
    flat = torch.ops.qgraph.dequantize(row, scales.reshape(1, -1), None, N * K, layout)
    return x @ flat.reshape(N, K).to(x.dtype).t()


@op("MatMulBlockQuantizedFp8Weight", domain=CONTRIB)
def matmul_fp8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    block_size: int = 128,
) -> Tensor:
    """X · Wᵀ + bias, W in E4M3 `[N, K]` with a scale for block_size columns of a row.

    X is rounded to x_scale times E4M3 first, saturating, where there is an x_scale.

    Raises:
        InputError: the weight is not E4M3, as after `module.to(dtype)`.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise InputError(
            f"MatMulBlockQuantizedFp8Weight: weight of {weight.dtype}, wanted float8_e4m3fn: "
            "do not cast the module"
        )
    if x_scale is not None:
        steps = (x.float() / x_scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn)
        x = (steps.float() * x_scale).to(x.dtype)
    n, k = weight.shape
    blocks = -(-k // block_size)
    codes = pad(weight.view(torch.uint8), (0, blocks * block_size - k))
    codes = codes.reshape(n, blocks, block_size)
    return torch.ops.qgraph.linear(x, codes, scales, None, bias, k, "Fp8E4m3V1")


@op("MatMulBlockQuantizedFp4Weight", domain=CONTRIB)
def matmul_fp4(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    block_size: int = 16,
) -> Tensor:
    """X · Wᵀ + bias, W in E2M1 `[N, K/2]`, scales E4M3 for block_size columns and one for all.

    x_scale changes no number, as the operator says.
    """
    n, nbytes = codes.shape
    blocks = scales.shape[1]
    wide = pad(codes, (0, blocks * block_size // 2 - nbytes)).reshape(n, blocks, -1)
    return torch.ops.qgraph.linear(
        x, wide, scales, tensor_scale.reshape(1), bias, 2 * nbytes, "Nvfp4V1"
    )


@op("Linear", domain="qgraph")
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    k: int,
    dtype: int,
    format: str,  # noqa: A002  (the op's word)
) -> Tensor:
    """X · Wᵀ, in the dtype of x, which `dtype` says as long as nobody casts the module."""
    return torch.ops.qgraph.linear(x, codes, scales, zeros, None, k, format)


@op("Dequantize", domain="qgraph")
def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    k: int,
    dtype: int,
    format: str,  # noqa: A002  (the op's word)
) -> Tensor:
    """W `[N, k]`, in the dtype of the scales, which `dtype` says as long as nobody casts them.

    Where scales are codes, in `dtype`.
    """
    w = torch.ops.qgraph.dequantize(codes, scales, zeros, k, format)
    return w if scales.is_floating_point() else w.to(DTYPES[ir.DataType(dtype)])
