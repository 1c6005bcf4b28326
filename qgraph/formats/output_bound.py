"""How far a linear's outputs can move when its weight is quantized."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.formats.base import Array, Format

UNIT_ROUNDOFF = 2.0**-24
"""Of float32: the largest relative error of one rounding."""


def output_error_bound(
    weight: Array,
    fmt: Format,
    x: Array,
    *,
    scale_dtype: ir.DataType = ir.DataType.FLOAT,
    unit_roundoff: float = UNIT_ROUNDOFF,
) -> NDArray[np.float64]:
    """A bound on |y′ − y|, float64 `[…, N]`: y = x·Wᵀ exactly, y′ with W quantized, in floats.

    |y′ − y| ≤ Δ|x| + γ_K (|W| + Δ)|x|, with Δ = |W − Ŵ| elementwise and γ_K = K·u/(1 − K·u): the
    weight's own error, and that of a product of length K summed in any order (Higham, "Accuracy
    and Stability of Numerical Algorithms", section 3.1).

    Args:
        weight: W, float32 `[N, K]`.
        fmt: the format that W is rounded to.
        x: activations, float `[…, K]`.
        scale_dtype: in which the format's float scales are stored.
        unit_roundoff: u, 2^-24 for sums in float32, 2^-11 in float16.

    Raises:
        InputError: x does not fit the weight, or rows are so long that K·u ≥ 1.
        OverflowError: see `Format.quantize`.
    """
    n, k = weight.shape
    if x.shape[-1:] != (k,):
        raise InputError(f"activations {list(x.shape)} do not fit a weight [{n}, {k}]")
    if k * unit_roundoff >= 1:
        raise InputError(f"K = {k} is too long for sums with a unit roundoff of {unit_roundoff:g}")
    gamma = k * unit_roundoff / (1 - k * unit_roundoff)
    quantized = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, scale_dtype))
    plain, sizes = weight.astype(np.float64), np.abs(x).astype(np.float64)
    delta = np.abs(plain - quantized)
    bound: NDArray[np.float64] = sizes @ (delta + gamma * (np.abs(plain) + delta)).T
    return bound
