"""How far a linear's outputs can be off: by its quantized weight, and by its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.formats.base import Array, Format

UNIT_ROUNDOFF = 2.0**-24
"""Of float32: the largest relative error of one rounding."""
INT8_HALF_STEP = 1 / 254
"""Of int8 activations, relative to the largest of their block: half of 1/127."""


def output_error_bound(
    weight: Array,
    fmt: Format,
    x: Array,
    *,
    scale_dtype: ir.DataType = ir.DataType.FLOAT,
    unit_roundoff: float = UNIT_ROUNDOFF,
) -> NDArray[np.float64]:
    """A bound on |y′ − y|, float64 `[…, N]`: y = x·Wᵀ exactly, y′ with W quantized, in floats.

    `product_bound` with the γ_K of sums in floats, Ŵ being what `fmt` makes of W.

    Args:
        weight: W, float32 `[N, K]`.
        fmt: the format that W is rounded to.
        x: activations, float `[…, K]`.
        scale_dtype: in which the format's float scales are stored.
        unit_roundoff: u, 2^-24 for sums in float32, 2^-11 in float16.

    Raises:
        InputError: x does not fit the weight, or rows are so long that K·u ≥ 1.
        ScaleOverflow: see `Format.quantize`.
    """
    n, k = weight.shape
    if x.shape[-1:] != (k,):
        raise InputError(f"activations {list(x.shape)} do not fit a weight [{n}, {k}]")
    gamma = summation_error(k, unit_roundoff)
    quantized = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, scale_dtype))
    return product_bound(weight, [quantized], x, gamma)


def summation_error(k: int, unit_roundoff: float = UNIT_ROUNDOFF) -> float:
    """γ_K = K·u/(1 − K·u): the error of a sum of K products in any order, relative to Σ|w||x|.

    Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1.

    Raises:
        InputError: K·u ≥ 1.
    """
    if k * unit_roundoff >= 1:
        raise InputError(f"K = {k} is too long for sums with a unit roundoff of {unit_roundoff:g}")
    return k * unit_roundoff / (1 - k * unit_roundoff)


def product_bound(
    weight: Array, addends: Sequence[Array], x: Array, gamma: float, block: int | None = None
) -> NDArray[np.float64]:
    """A bound on |y′ − x·Wᵀ|, float64 `[…, N]`, where y′ is x·Ŵᵀ as a kernel computes it.

    Δ|x| + γ(|W| + Δ)|x|, Δ = |W − Ŵ| elementwise: the weight's own error, and the kernel's. With
    Ŵ for W it is the kernel's alone. Where Ŵ is a sum whose addends are multiplied one by one,
    what they are together larger than Ŵ counts for the kernel as well.

    Args:
        weight: W, `[N, K]`.
        addends: Ŵ, or the matrices `[N, K]` whose sum it is: see `Format.addends`.
        x: `[…, K]`.
        gamma: the kernel's error relative to Σ|w||x|: see `summation_error`.
        block: where activations are rounded to int8, how many share a scale (0 for all K): that
            adds half a step of each, max|x|/254 over its block, times the first addend.
    """
    plain, sizes = weight.astype(np.float64), np.abs(x).astype(np.float64)
    reach = [np.abs(each.astype(np.float64)) for each in addends]
    quantized = sum(each.astype(np.float64) for each in addends)
    delta = np.abs(plain - quantized)
    counted = np.abs(plain) + delta + (sum(reach) - np.abs(quantized))
    bound: NDArray[np.float64] = sizes @ (delta + gamma * counted).T
    if block is not None:
        starts = np.arange(0, weight.shape[1], block or weight.shape[1])
        largest = np.maximum.reduceat(sizes, starts, axis=-1)
        bound += INT8_HALF_STEP * (largest @ np.add.reduceat(reach[0], starts, axis=1).T)
    return bound


LEVEL_4_ZEROS = 2.0**-22
"""What is left of zero points that a kernel takes away at the end of a sum in float32, relative."""


def zeros_bound(x: Array, scales: Array, block: int, slack: float) -> NDArray[np.float64]:
    """What a kernel's rounding may leave of zero points: `[M, N]`.

    It is most where all codes of a block are the zero point: the product is then zero, and what
    is taken away is not.

    Args:
        x: `[M, K]`. scales: `[N, nb]`, of blocks of `block` codes (0 for the whole row).
        slack: the error in units of a scale times Σ|x| of its block: the largest zero point, or
            the number of codes, times the rounding.
    """
    sizes, k = np.abs(x).astype(np.float64), x.shape[1]
    sums = np.add.reduceat(sizes, np.arange(0, k, block or k), axis=1)
    found: NDArray[np.float64] = slack * (sums @ np.abs(scales.astype(np.float64)).T)
    return found
