"""The values of FP8 (E4M3FN, E5M2), E2M1 and E8M0 by code, and codes of scales in E4M3 and E8M0.

Open Compute Project, "8-bit Floating Point Specification" and "Microscaling Formats (MX)
Specification v1.0".
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from qgraph.formats.base import Array


def _by_code(dtype: Any, bits: int) -> Array:
    """float32 `[2^bits]`, read-only; NaN and infinities as the type has them."""
    values: Array = np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32)
    values.setflags(write=False)
    return values


E4M3 = _by_code(ml_dtypes.float8_e4m3fn, 8)
E5M2 = _by_code(ml_dtypes.float8_e5m2, 8)
E2M1 = _by_code(ml_dtypes.float4_e2m1fn, 4)
E8M0 = _by_code(ml_dtypes.float8_e8m0fnu, 8)

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_NORMAL = 2.0**-6
"""The smallest normal number."""


def finite(values: Array) -> Array:
    """The values, NaN in place of infinities."""
    return np.where(np.isfinite(values), values, np.float32(np.nan))


def e4m3_scale(values: Array) -> Array:
    """Codes, uint8, of scales >= 0 rounded to nearest, from the smallest normal number to 448.

    NaN stays NaN.
    """
    clipped = np.clip(values, np.float32(E4M3_NORMAL), np.float32(E4M3_MAX))
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e8m0_scale(amax: Array, top_exponent: int) -> Array:
    """Codes, uint8, of 2^(floor(log2(amax)) - top_exponent), clamped to 2^-127 … 2^127.

    `top_exponent` is that of the elements' largest binade. NaN and infinity become NaN (255).
    """
    exponents = np.frexp(amax)[1] - 1 - top_exponent
    codes = np.clip(np.where(amax > 0, exponents, -127), -127, 127) + 127
    return np.where(np.isfinite(amax), codes, 255).astype(np.uint8)
