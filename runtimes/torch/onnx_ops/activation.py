"""Element by element: functions of one float tensor, and the activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.runtimes.torch.table import op

_UNARY: dict[str, Callable[..., Tensor]] = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.linalg.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": functional.mish,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}


def _enter(name: str, compute: Callable[..., Tensor]) -> None:
    @op(name)
    def function(x: Tensor) -> Tensor:
        return compute(x)

    # The names under which torch.fx prints the calls.
    function.__name__ = function.__qualname__ = name.lower()


for _name, _function in _UNARY.items():
    _enter(_name, _function)


@op("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether an element is one of the infinities asked for."""
    found = torch.isinf(x)
    if not detect_negative:
        found = found & (x > 0)
    return found if detect_positive else found & (x < 0)


@op("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return functional.softplus(x)


@op("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """X · Φ(x), or its approximation by tanh."""
    return functional.gelu(x, approximate=approximate)


@op("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """X, times alpha below zero."""
    return functional.leaky_relu(x, alpha)


@op("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """X, times slope below zero."""
    return torch.where(x < 0, x * slope, x)


@op("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X, alpha (exp(x) - 1) below zero."""
    return functional.elu(x, alpha)


@op("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X, alpha (exp(x / alpha) - 1) below zero."""
    return functional.celu(x, alpha)


@op("Selu")
def selu(
    x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    """Gamma times ELU."""
    return gamma * functional.elu(x, alpha)


@op("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X above alpha, else zero."""
    return functional.threshold(x, alpha, 0.0)


@op("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """Alpha x + beta between 0 and 1."""
    return torch.clamp(alpha * x + beta, 0, 1)


@op("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Zero between -lambd and lambd, moved by bias towards it elsewhere."""
    below, above = x < -lambd, x > lambd
    return torch.where(below, x + bias, torch.where(above, x - bias, 0)).to(x.dtype)


@op("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X · sigmoid(alpha x)."""
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@op("Softmax")
def softmax(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
    """Exponentials that sum to one along an axis; before opset 13 over all axes from it on."""
    return _along(x, axis, opset, torch.softmax)


@op("LogSoftmax")
def log_softmax(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
    """The logarithm of Softmax."""
    return _along(x, axis, opset, torch.log_softmax)


@op("Hardmax")
def hardmax(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
    """One at the first largest element along an axis, else zero."""
    return _along(x, axis, opset, _first_largest)


def _first_largest(x: Tensor, axis: int) -> Tensor:
    first = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter_(axis, first, 1.0)


def _along(
    x: Tensor, axis: int | None, opset: int, function: Callable[[Tensor, int], Tensor]
) -> Tensor:
    if opset >= 13:
        return function(x, -1 if axis is None else axis)
    start = (1 if axis is None else axis) % max(1, x.ndim)
    return function(x.flatten(start), -1).reshape(x.shape)
