"""Changes of element type."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import (
    DTYPES,
    Number,
    Value,
    is_tensor,
    to_tensor,
    zip_host,
)
from qgraph.runtimes.torch.table import op

_SMALL = {ir.DataType.INT4: (4, True), ir.DataType.UINT4: (4, False)}
_SMALL |= {ir.DataType.INT2: (2, True), ir.DataType.UINT2: (2, False)}
_OF_HOSTS = {ir.DataType.INT32, ir.DataType.INT64}
"""Types that integers keep on the host: those that shapes and bounds have."""
_READ_ONLY = {ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E8M0}
_FLOAT8 = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}


@op("Cast", host=True, scalars=(0,))
def cast(
    x: Value, *, to: int, saturate: int = 1, round_mode: str = "up", like: Tensor | None
) -> Value:
    """X in another element type; integers and booleans of host values stay on the host.

    Raises:
        InputError: a type that torch has not, or to which it does not round as ONNX does.
    """
    dtype = DTYPES.get(to)
    if dtype is None or to in _READ_ONLY:
        raise InputError(
            f"Cast to {ir.DataType(to).name}, to which the torch executor does not round"
        )
    if is_tensor(x):
        return convert(x, dtype, _SMALL.get(ir.DataType(to)), bool(saturate))
    if dtype.is_floating_point or dtype.is_complex:
        return to_tensor(x, like, dtype)
    if dtype == torch.bool:
        return zip_host(bool, x)
    if to in _OF_HOSTS and isinstance(x, float) and abs(x) < 1 << 31:
        return int(x)  # a bound of Range must not become data
    if to not in _OF_HOSTS or isinstance(x, float):
        # A size that torch traces cannot be cut to fewer bits; floats beyond the range torch can.
        return cast(to_tensor(x, like, _wide(x)), to=to, saturate=saturate, like=like)
    return zip_host(_int_of, x, kind=to)


def _wide(value: Value) -> torch.dtype | None:
    return torch.float64 if isinstance(value, float) else None


def _int_of(value: Number) -> Number:
    """A number as an integer; symbolic ones stay as they are."""
    return int(value) if isinstance(value, bool) else value


@op("CastLike", host=True, scalars=(0,))
def cast_like(
    x: Value,
    target: Value,
    *,
    saturate: int = 1,
    round_mode: str = "up",
    types: tuple[int, ...] = (),
    like: Tensor | None,
) -> Value:
    """X in the element type of `target`."""
    known = DTYPES.get(types[1]) if types else None
    if is_tensor(target) and (known is None or known != target.dtype):
        # Not known, or the module was cast: the type is that of the tensor.
        return convert(to_tensor(x, target), target.dtype, None, bool(saturate))
    if known is None:
        first = target[0] if isinstance(target, tuple) and target else target
        boolean = isinstance(first, (bool, torch.SymBool))
        return cast(x, to=ir.DataType.BOOL if boolean else ir.DataType.INT64, like=like)
    return cast(x, to=types[1], saturate=saturate, like=like)


def convert(
    x: Tensor, dtype: torch.dtype, small: tuple[int, bool] | None, saturate: bool
) -> Tensor:
    """X as `dtype`; `small` has the bits and the sign of an integer type below a byte."""
    if x.dtype == dtype and small is None:
        return x
    if small is not None:
        return _narrow(x, *small).to(dtype)
    if dtype in _FLOAT8 and x.dtype not in _FLOAT8:
        limit = torch.finfo(dtype).max
        wide = x.float()
        if saturate:
            return wide.clamp(-limit, limit).to(dtype)
        if dtype == torch.float8_e4m3fn:
            # What rounds beyond 448, half a step above it, is no number here; torch has 448.
            wide = torch.where(wide.abs() > 464, float("nan"), wide)
        return wide.to(dtype)
    return x.to(dtype)


def _narrow(x: Tensor, bits: int, signed: bool) -> Tensor:
    """The low bits of whole numbers, as ONNX truncates integers; floats are rounded first."""
    whole = (torch.round(x.float()) if x.is_floating_point() else x).to(torch.int64)
    low = whole & ((1 << bits) - 1)
    return torch.where(low >= 1 << (bits - 1), low - (1 << bits), low) if signed else low
