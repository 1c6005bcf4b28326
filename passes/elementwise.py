"""Element-wise expressions of one value, evaluated to see which function they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.matching import number

POINTS: Array = np.array(
    [-30.0, -6.5, -3.0, -1.7, -1.0, -0.62, -0.11, 0.0, 0.07, 0.5, 1.0, 1.41, 2.2, 3.7, 7.0, 25.0]
)
"""Where functions are compared."""
_MAX_NODES = 16
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-np.clip(x, -700, 700)))
    return found


_OPS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Erf": _erf,
    "Tanh": np.tanh,
    "Sigmoid": _sigmoid,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Reciprocal": np.reciprocal,
    "Cast": np.asarray,
    "Identity": np.asarray,
}
ELEMENTWISE = frozenset(_OPS)


def evaluate(value: ir.Value, x: ir.Value) -> Array | None:
    """`value` as a function of `x` at POINTS, float64; None where it depends on anything else."""
    budget = [_MAX_NODES]
    with np.errstate(all="ignore"):
        return _evaluate(value, x, budget)


def _evaluate(value: ir.Value | None, x: ir.Value, budget: list[int]) -> Array | None:
    if value is x:
        return POINTS
    constant = number(value)
    if constant is not None:
        return np.array(constant)
    node = value.producer() if value is not None else None
    budget[0] -= 1
    if node is None or node.domain or node.op_type not in _OPS or budget[0] < 0:
        return None
    given = [_evaluate(each, x, budget) for each in node.inputs]
    if any(each is None for each in given):
        return None
    found: Array = _OPS[node.op_type](*given)
    return found


def gelu(x: Array) -> Array:
    """X · Φ(x), Φ the normal distribution's cumulative function."""
    found: Array = x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return found


def gelu_tanh(x: Array) -> Array:
    """The approximation of `gelu` by a hyperbolic tangent."""
    found: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


def swish(factor: float) -> Callable[[Array], Array]:
    """The function x · σ(c x), c being `factor`; SiLU where that is 1."""
    return lambda x: x * _sigmoid(factor * x)
