"""What the tests of linears share: shapes, and weights."""

from __future__ import annotations

from typing import Any

import numpy as np

K, N = 40, 24
X = f"float[M, {K}] x"
Y = f"float[M, {N}] y"


def weight(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)
