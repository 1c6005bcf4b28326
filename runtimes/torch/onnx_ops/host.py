"""Host values (see `qgraph.runtimes.torch.table`), and the way from them to tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor

from qgraph.errors import InputError

Number: TypeAlias = Any
"""int, bool, float, SymInt or SymBool."""
Value: TypeAlias = Any
"""A tensor, a host value or a list of tensors."""

DTYPES: dict[int, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ir.DataType.FLOAT8E8M0: torch.float8_e8m0fnu,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    # Torch computes with no type below a byte: one value lies in each byte.
    ir.DataType.INT4: torch.int8,
    ir.DataType.INT2: torch.int8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.UINT2: torch.uint8,
    ir.DataType.FLOAT4E2M1: torch.float8_e4m3fn,
}
"""ONNX's element types in torch."""

_WIDTHS: dict[int, tuple[int, bool]] = {
    kind: (torch.iinfo(dtype).bits, dtype.is_signed)
    for kind, dtype in DTYPES.items()
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
}
_WIDTHS |= {
    ir.DataType.INT4: (4, True),
    ir.DataType.INT2: (2, True),
    ir.DataType.UINT4: (4, False),
    ir.DataType.UINT2: (2, False),
}
"""Bits and sign of integer types."""


def is_tensor(value: Value) -> bool:
    """Whether a value is a tensor; else it is a host value."""
    return isinstance(value, Tensor)


def device_of(like: Tensor | None) -> torch.device:
    """Where new tensors belong."""
    return torch.device("cpu") if like is None else like.device


def to_tensor(value: Value, like: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A value as a tensor: int64, bool or float32 where `dtype` is None; tensors stay as are."""
    if isinstance(value, Tensor):
        return value
    if dtype is None:
        first = (value[0] if value else 0) if isinstance(value, tuple) else value
        if isinstance(first, (bool, torch.SymBool)):
            dtype = torch.bool
        else:
            dtype = torch.float32 if isinstance(first, (float, torch.SymFloat)) else torch.int64
    device = device_of(like)
    if not isinstance(value, tuple):
        # torch.tensor would make a traced size a constant.
        return torch.full((), value, dtype=dtype, device=device)
    if torch.compiler.is_compiling() and value:
        return torch.stack([torch.full((), item, dtype=dtype, device=device) for item in value])
    return torch.tensor(value, dtype=dtype, device=device)


def ints(value: Value) -> tuple[Number, ...]:
    """A shape, axes or counts as a tuple; a tensor's elements are read from its memory."""
    if isinstance(value, Tensor):
        return tuple(value.reshape(-1).tolist())
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def number(value: Value) -> Number:
    """One number, from any value that holds one."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        (value,) = value
    return value


def axes_of(value: Value, rank: int) -> tuple[int, ...]:
    """Axes counted from the front."""
    return tuple(axis + rank if axis < 0 else axis for axis in ints(value))


def tensors(a: Value, b: Value, like: Tensor | None = None) -> tuple[Value, Value]:
    """Two operands of which one is a tensor: a tuple becomes one too, of its dtype and device."""
    if isinstance(a, tuple):
        a = _beside(a, b, like)
    elif isinstance(b, tuple):
        b = _beside(b, a, like)
    return a, b


def _beside(value: tuple[Number, ...], other: Value, like: Tensor | None) -> Tensor:
    known = isinstance(other, Tensor)
    return to_tensor(value, other if known else like, other.dtype if known else None)


def first(types: tuple[int, ...]) -> int:
    """The ONNX type of a node's first input; 0 where it is not known, or is one of floats."""
    return types[0] if types else 0


def wrapped(item: Number, kind: int) -> Number:
    """An integer modulo the width of the ONNX type `kind`, int64 where that is none.

    Symbolic ones stay as they are: sizes and what exporters make of them stay below 2^31.
    """
    if type(item) is not int or torch.compiler.is_dynamo_compiling():
        return item
    bits, signed = _WIDTHS.get(kind, (64, True))
    low = item & ((1 << bits) - 1)
    return low - (1 << bits) if signed and low >> (bits - 1) else low


def zip_host(function: Callable[..., Number], *operands: Value, kind: int = 0) -> Value:
    """`function` of host values element by element: numbers and tuples, broadcast as in ONNX.

    kind: the ONNX type of the results, whose width they keep.

    Raises:
        InputError: a division by zero.
    """
    try:
        return _zipped(lambda *row: wrapped(function(*row), kind), operands)
    except ZeroDivisionError as error:
        raise InputError(f"division of integers by zero: {operands[0]} by {operands[1]}") from error


def _zipped(function: Callable[..., Number], operands: Sequence[Value]) -> Value:
    lengths = [len(item) for item in operands if isinstance(item, tuple)]
    if not lengths:
        return function(*operands)
    length = max(lengths) if 0 not in lengths else 0
    columns = [_column(item, length) for item in operands]
    return tuple(function(*row) for row in zip(*columns, strict=True))


def _column(value: Value, length: int) -> Sequence[Number]:
    if not isinstance(value, tuple):
        return (value,) * length
    return value * length if len(value) == 1 else value
