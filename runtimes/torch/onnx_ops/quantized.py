"""Products with packed weights: the custom ops of the library "qgraph"."""

from __future__ import annotations

import torch
from torch import Tensor

import qgraph.runtimes.torch.ops  # noqa: F401  (registers them)
from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.gathering import from_front
from qgraph.runtimes.torch.table import op


@op("MatMulNBits", domain="com.microsoft")
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
        InputError: columns in another order (`g_idx`), or a weight packed for one machine.
    """
    if g_idx is not None or weight_prepacked:
        what = "a g_idx" if g_idx is not None else "a prepacked weight"
        raise InputError(f"MatMulNBits with {what} runs on ONNX Runtime alone")
    return torch.ops.qgraph.linear(
        x, codes, _rows(scales, N), _rows(zeros, N), bias, K, _name(bits, zeros)
    )


def _rows(part: Tensor | None, n: int) -> Tensor | None:
    """Scales or zero points as one row per row of W; older files store them flat."""
    return part.reshape(n, -1) if part is not None and part.ndim != 2 else part


def _name(bits: int, zeros: Tensor | None) -> str:
    return f"Int{bits}V1" if zeros is None else f"Uint{bits}V1"


@op("GatherBlockQuantized", domain="com.microsoft")
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
) -> Tensor:
    """Rows of a table packed in bytes `[N, K·bits/8]`, dequantized.

    Raises:
        InputError: another axis, or codes that are not packed in bytes.
    """
    whole = table.ndim == 2 and gather_axis in (0, -2) and quantize_axis in (1, -1)
    if not whole or table.dtype != torch.uint8 or scales.ndim != 2:
        raise InputError(
            "GatherBlockQuantized of anything but the rows of a uint8 matrix runs on ONNX Runtime "
            "alone"
        )
    codes = table.reshape(scales.shape[0], scales.shape[1], block_size * bits // 8)
    width = scales.shape[1] * block_size
    return torch.ops.qgraph.embedding(
        from_front(ids, table.shape[0]), codes, scales, zeros, width, _name(bits, zeros)
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
    """W `[N, k]`, in the dtype of the scales, which `dtype` says as long as nobody casts them."""
    return torch.ops.qgraph.dequantize(codes, scales, zeros, k, format)
