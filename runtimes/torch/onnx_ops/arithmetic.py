"""Element by element: arithmetic, comparisons, logic, bits."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops import unsigned
from qgraph.runtimes.torch.onnx_ops.host import (
    DTYPES,
    Number,
    Value,
    first,
    is_tensor,
    tensors,
    to_tensor,
    zip_host,
)
from qgraph.runtimes.torch.table import op

_NO_KERNELS = {torch.uint16, torch.uint32, torch.uint64}
"""Types that torch stores and does not compute with."""

Types: TypeAlias = tuple[int, ...]
"""The ONNX types of a node's inputs."""


def _binary(
    a: Value,
    b: Value,
    on_host: Callable[..., Number],
    on_tensors: Callable[..., Tensor],
    types: Types = (),
) -> Value:
    if not is_tensor(a) and not is_tensor(b):
        return zip_host(on_host, a, b, kind=first(types))
    a, b = tensors(a, b)
    narrow = a.dtype if is_tensor(a) else b.dtype
    if narrow not in _NO_KERNELS:
        return on_tensors(a, b)
    a, b = _both(a, b)
    if narrow == torch.uint64 and on_tensors in _UNSIGNED:
        return _UNSIGNED[on_tensors](a, b)
    a, b = a.to(torch.int64), b.to(torch.int64)
    result = on_tensors(a, b)
    return result if result.dtype == torch.bool else result.to(narrow)


@op("Add", host=True)
def add(a: Value, b: Value, *, types: Types = ()) -> Value:
    """A + b."""
    return _binary(a, b, operator.add, operator.add, types)


@op("Sub", host=True)
def sub(a: Value, b: Value, *, types: Types = ()) -> Value:
    """A - b."""
    return _binary(a, b, operator.sub, operator.sub, types)


@op("Mul", host=True)
def mul(a: Value, b: Value, *, types: Types = ()) -> Value:
    """A * b."""
    return _binary(a, b, operator.mul, operator.mul, types)


@op("Div", host=True)
def div(a: Value, b: Value, *, types: Types = ()) -> Value:
    """A / b; of integers rounded towards zero."""
    return _binary(a, b, _truncated, _quotient, types)


def _truncated(a: Number, b: Number) -> Number:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _quotient(a: Value, b: Value) -> Tensor:
    if (a if is_tensor(a) else b).is_floating_point():
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


@op("Mod", host=True)
def mod(a: Value, b: Value, *, fmod: int = 0, types: Types = ()) -> Value:
    """The remainder, with the sign of b, or with that of a where `fmod` is set."""
    if fmod:
        return _binary(a, b, lambda x, y: x - y * _truncated(x, y), torch.fmod, types)
    return _binary(a, b, operator.mod, torch.remainder, types)


@op("Pow", host=True, scalars=(1,))
def power(a: Value, b: Value, *, types: Types = ()) -> Value:
    """A to the power of b, in the dtype of a."""
    if not is_tensor(a) and not is_tensor(b):
        return zip_host(_power, a, b, kind=first(types))
    a, b = tensors(a, b)
    if is_tensor(b):
        return torch.pow(a, b).to(a.dtype) if is_tensor(a) else torch.pow(a, b)
    if not a.is_floating_point() and (isinstance(b, float) or b < 0):
        return torch.pow(a.double(), b).to(a.dtype)
    whole = isinstance(b, float) and b.is_integer() and abs(b) < 2**31
    return torch.pow(a, int(b) if whole else b)


def _power(a: Number, b: Number) -> Number:
    """A to the power of b, integers modulo 2^64.

    Raises:
        InputError: no number, or a traced size to a power that no int64 holds.
    """
    if isinstance(b, float):
        return _real_power(a, b)
    if b < 0:
        # Rounded towards zero; 0 has no such power, as the division says.
        return 0 if abs(a) > 1 else 1 // a**-b
    if type(a) is int and type(b) is int:
        return pow(a, b, 1 << 64)
    if b > 63:
        raise InputError(f"a traced size to the power of {b}: wanted at most 63")
    return a**b


def _real_power(a: Number, b: float) -> Number:
    try:
        result = a**b
    except OverflowError:
        result = math.inf
    if isinstance(result, complex) or (isinstance(result, float) and not math.isfinite(result)):
        raise InputError(f"{a} to the power of {b} is no integer: wanted a finite real number")
    return torch.sym_int(result)


@op("Max", host=True)
def maximum(*values: Value) -> Value:
    """The largest of the operands."""
    return functools.reduce(lambda a, b: _binary(a, b, _larger, _maximum), values)


@op("Min", host=True)
def minimum(*values: Value) -> Value:
    """The smallest of the operands."""
    return functools.reduce(lambda a, b: _binary(a, b, _smaller, _minimum), values)


def _larger(a: Number, b: Number) -> Number:
    return torch.sym_max(a, b)


def _smaller(a: Number, b: Number) -> Number:
    return torch.sym_min(a, b)


def _maximum(a: Value, b: Value) -> Tensor:
    return torch.maximum(*_both(a, b))


def _minimum(a: Value, b: Value) -> Tensor:
    return torch.minimum(*_both(a, b))


def _both(a: Value, b: Value) -> tuple[Tensor, Tensor]:
    """Both operands as tensors of one dtype."""
    if is_tensor(a):
        return a, to_tensor(b, a, a.dtype)
    return to_tensor(a, b, b.dtype), b


_UNSIGNED: dict[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]] = {
    operator.lt: unsigned.less,
    operator.le: unsigned.less_or_equal,
    operator.gt: unsigned.greater,
    operator.ge: unsigned.greater_or_equal,
    _quotient: unsigned.quotient,
    torch.fmod: unsigned.remainder,
    torch.remainder: unsigned.remainder,
    _maximum: unsigned.maximum,
    _minimum: unsigned.minimum,
}
"""Of those that differ between int64 and uint64."""


@op("Sum")
def total(*values: Tensor) -> Tensor:
    """The sum of the operands."""
    return functools.reduce(operator.add, values)


@op("Mean")
def mean(*values: Tensor) -> Tensor:
    """The mean of the operands."""
    return functools.reduce(operator.add, values) / len(values)


@op("Neg", host=True)
def neg(x: Value, *, types: Types = ()) -> Value:
    """-x."""
    return -x if is_tensor(x) else zip_host(operator.neg, x, kind=first(types))


@op("Abs", host=True)
def absolute(x: Value, *, types: Types = ()) -> Value:
    """|x|."""
    if not is_tensor(x):
        return zip_host(abs, x, kind=first(types))
    return torch.abs(x) if x.dtype.is_signed else x


@op("Sign")
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    return torch.sign(x)


@op("Clip", scalars=(1, 2))
def clip(x: Tensor, min: Value = None, max: Value = None) -> Tensor:  # noqa: A002  (ONNX's names)
    """X between `min` and `max`, attributes before opset 11; `max` where they cross."""
    if is_tensor(min) or is_tensor(max):
        lowest = None if min is None else to_tensor(min, x, x.dtype)
        highest = None if max is None else to_tensor(max, x, x.dtype)
        return torch.clamp(x, lowest, highest)
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        # A bound of the type that the graph was written in may lie beyond this one.
        limit = torch.finfo(x.dtype).max
        min = None if min is None or min < -limit else min  # noqa: A001
        max = None if max is None or max > limit else max  # noqa: A001
    return x if min is None and max is None else torch.clamp(x, min, max)


def _logical(a: Value, b: Value, function: Callable[[Any, Any], Any]) -> Value:
    if not is_tensor(a) and not is_tensor(b):
        return zip_host(lambda x, y: function(bool(x), bool(y)), a, b)
    return function(*tensors(a, b))


@op("Equal", host=True)
def equal(a: Value, b: Value) -> Value:
    """A == b."""
    return _binary(a, b, operator.eq, operator.eq)


@op("Less", host=True)
def less(a: Value, b: Value) -> Value:
    """A < b."""
    return _binary(a, b, operator.lt, operator.lt)


@op("LessOrEqual", host=True)
def less_or_equal(a: Value, b: Value) -> Value:
    """A <= b."""
    return _binary(a, b, operator.le, operator.le)


@op("Greater", host=True)
def greater(a: Value, b: Value) -> Value:
    """A > b."""
    return _binary(a, b, operator.gt, operator.gt)


@op("GreaterOrEqual", host=True)
def greater_or_equal(a: Value, b: Value) -> Value:
    """A >= b."""
    return _binary(a, b, operator.ge, operator.ge)


@op("And", host=True)
def logical_and(a: Value, b: Value) -> Value:
    """Both."""
    return _logical(a, b, operator.and_)


@op("Or", host=True)
def logical_or(a: Value, b: Value) -> Value:
    """Either."""
    return _logical(a, b, operator.or_)


@op("Xor", host=True)
def logical_xor(a: Value, b: Value) -> Value:
    """One, not both."""
    return _logical(a, b, operator.xor)


@op("Not", host=True)
def logical_not(x: Value) -> Value:
    """Not x."""
    return torch.logical_not(x) if is_tensor(x) else zip_host(operator.not_, x)


@op("Where", host=True)
def where(condition: Value, a: Value, b: Value, *, types: Types = ()) -> Value:
    """A where the condition holds, else b."""
    if not is_tensor(condition) and not is_tensor(a) and not is_tensor(b):
        return zip_host(
            lambda c, x, y: x if c else y, condition, a, b, kind=types[1] if types else 0
        )
    if not is_tensor(condition) and not isinstance(condition, tuple):
        a, b = _both(a, b) if is_tensor(a) or is_tensor(b) else (a, b)
        a, b = torch.broadcast_tensors(a, b)
        return a if condition else b
    condition = to_tensor(condition, a if is_tensor(a) else b)
    if not is_tensor(a) and not is_tensor(b):
        # Numbers would be of torch's default type.
        kind = DTYPES.get(types[1]) if types else None
        a, b = to_tensor(a, condition, kind), to_tensor(b, condition, kind)
        return torch.where(condition, a, b)
    return torch.where(condition, *tensors(a, b))


@op("BitwiseAnd")
def bitwise_and(a: Tensor, b: Tensor) -> Tensor:
    """Bits in both."""
    return torch.bitwise_and(a, b)


@op("BitwiseOr")
def bitwise_or(a: Tensor, b: Tensor) -> Tensor:
    """Bits in either."""
    return torch.bitwise_or(a, b)


@op("BitwiseXor")
def bitwise_xor(a: Tensor, b: Tensor) -> Tensor:
    """Bits in one, not both."""
    return torch.bitwise_xor(a, b)


@op("BitwiseNot")
def bitwise_not(x: Tensor) -> Tensor:
    """All bits turned."""
    if x.dtype in _NO_KERNELS:
        return torch.bitwise_not(x.to(torch.int64)).to(x.dtype)
    return torch.bitwise_not(x)


@op("BitShift")
def bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    """X shifted by y bits, zeros following."""
    wide = x.to(torch.int64)
    shifted = wide << y.to(torch.int64) if direction == "LEFT" else wide >> y.to(torch.int64)
    if x.dtype == torch.uint64:
        top = shifted & ~(torch.tensor(-1, device=x.device) << (64 - y.to(torch.int64)))
        shifted = shifted if direction == "LEFT" else torch.where(y == 0, wide, top)
    return shifted.to(x.dtype)
