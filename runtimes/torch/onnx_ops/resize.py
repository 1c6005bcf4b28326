"""Resize: each axis on its own, as a weighted sum of the elements near each place."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import Number, Value, axes_of, ints
from qgraph.runtimes.torch.table import op


@dataclasses.dataclass(frozen=True)
class _How:
    """The attributes that every axis shares; words as in ONNX."""

    mode: str
    coordinates: str
    nearest: str
    antialias: bool
    cubic: float
    outside: bool
    extrapolation: float


@op("Resize", hosts=(1, 2, 3))
def resize(
    x: Tensor,
    roi: Value = None,
    scales: Value = None,
    sizes: Value = None,
    *,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    opset: int,
) -> Tensor:
    """X with other sizes, its elements nearest or interpolated linearly or by cubics (Keys, 1981).

    Raises:
        InputError: an unknown mode.
    """
    if opset < 11:
        # Opset 10: (x, scales), places counted from zero.
        roi, scales, coordinate_transformation_mode, nearest_mode = None, roi, "asymmetric", "floor"
    how = _How(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        bool(antialias),
        cubic_coeff_a,
        bool(exclude_outside),
        extrapolation_value,
    )
    where = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    factors, wanted = _targets(x, where, scales, sizes, keep_aspect_ratio_policy)
    region = ints(roi) if roi is not None else ()
    kept, dtype = x, x.dtype
    work = x if x.is_floating_point() or mode == "nearest" else x.to(torch.float32)
    for i, axis in enumerate(where):
        window = (region[i], region[len(where) + i]) if region else (0.0, 1.0)
        if how.coordinates == "tf_crop_and_resize" or not _stays(kept, axis, factors[i], wanted[i]):
            work = _along(work, axis, factors[i], wanted[i], window, how)
    if work.dtype != dtype:
        limits = torch.iinfo(dtype)
        work = torch.round(work).clamp(limits.min, limits.max).to(dtype)
    return work


def _stays(x: Tensor, axis: int, factor: Number, size: Number) -> bool:
    return isinstance(factor, float) and factor == 1.0 and bool(size == x.shape[axis])


def _targets(
    x: Tensor, where: tuple[int, ...], scales: Value, sizes: Value, policy: str
) -> tuple[list[Number], list[Number]]:
    """The factor and the size of each axis."""
    have = [x.shape[axis] for axis in where]
    if sizes is None or len(ints(sizes)) == 0:
        factors = [float(factor) for factor in ints(scales)]
        return factors, [_floor(n * factor) for n, factor in zip(have, factors, strict=True)]
    wanted = list(ints(sizes))
    factors = [want / n for want, n in zip(wanted, have, strict=True)]
    if policy != "stretch":
        one = min(factors) if policy == "not_larger" else max(factors)
        factors = [one] * len(factors)
        wanted = [math.floor(one * n + 0.5) for n in have]
    return factors, wanted


def _floor(value: Number) -> Number:
    return math.floor(value)


def _along(
    x: Tensor, axis: int, factor: Number, size: Number, window: tuple[float, float], how: _How
) -> Tensor:
    length = x.shape[axis]
    places = _places(x.device, length, factor, size, window, how.coordinates)
    if how.mode == "nearest":
        result = x.index_select(axis, _nearest(places, how.nearest).clamp(0, length - 1))
    else:
        result = _interpolated(x, axis, places, factor, how)
    if how.coordinates != "tf_crop_and_resize":
        return result
    outside = (places < 0) | (places > length - 1)
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    return torch.where(outside.reshape(shape), how.extrapolation, result).to(x.dtype)


def _places(
    device: torch.device,
    length: Number,
    factor: Number,
    size: Number,
    window: tuple[float, float],
    coordinates: str,
) -> Tensor:
    """Where each of the `size` elements lies in the axis of `length`, float64."""
    steps = torch.arange(size, device=device, dtype=torch.float64)
    if coordinates == "asymmetric":
        return steps / factor
    if coordinates == "align_corners":
        return steps * 0 if size == 1 else steps * (length - 1) / (length * factor - 1)
    if coordinates == "half_pixel":
        return (steps + 0.5) / factor - 0.5
    if coordinates == "pytorch_half_pixel":
        return steps * 0 if size == 1 else (steps + 0.5) / factor - 0.5
    if coordinates == "half_pixel_symmetric":
        adjusted = size / (length * factor)
        return length / 2 * (1 - adjusted) + (steps + 0.5) / factor - 0.5
    if coordinates == "tf_crop_and_resize":
        start, end = window
        if size == 1:
            return steps * 0 + 0.5 * (start + end) * (length - 1)
        return (length - 1) * (start + steps * (end - start) / (size - 1))
    raise InputError(f"Resize: coordinate_transformation_mode {coordinates!r} is unknown")


def _nearest(places: Tensor, mode: str) -> Tensor:
    if mode == "round_prefer_floor":
        rounded = torch.ceil(places - 0.5)
    elif mode == "round_prefer_ceil":
        rounded = torch.floor(places + 0.5)
    elif mode == "floor":
        rounded = torch.floor(places)
    elif mode == "ceil":
        rounded = torch.ceil(places)
    else:
        raise InputError(f"Resize: nearest_mode {mode!r} is unknown")
    return rounded.to(torch.int64)


def _interpolated(x: Tensor, axis: int, places: Tensor, factor: Number, how: _How) -> Tensor:
    length = x.shape[axis]
    shrink = min(1.0, factor) if how.antialias else 1.0
    reach = 1 if how.mode == "linear" else 2
    before = math.floor(-reach / shrink) + 1
    count = 2 - 2 * before if how.antialias else 2 * reach
    floor = torch.floor(places)
    ratio = places - floor
    taps = [before + step for step in range(count)]
    kernel = _linear if how.mode == "linear" else _cubic
    weights = [kernel((tap - ratio).abs() * shrink, how.cubic) for tap in taps]
    spots = [floor.to(torch.int64) + tap for tap in taps]
    if how.outside:
        weights = [
            torch.where((spot < 0) | (spot >= length), 0.0, weight)
            for spot, weight in zip(spots, weights, strict=True)
        ]
    if how.outside or how.antialias:
        total = sum(weights[1:], weights[0])
        weights = [weight / total for weight in weights]
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    parts = [
        x.index_select(axis, spot.clamp(0, length - 1)) * weight.reshape(shape).to(x.dtype)
        for spot, weight in zip(spots, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])


def _linear(distance: Tensor, unused: float) -> Tensor:
    return (1 - distance).clamp(0, 1)


def _cubic(distance: Tensor, a: float) -> Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


@op("Upsample", hosts=(1,))
def upsample(x: Tensor, scales: Value = None, *, mode: str = "nearest") -> Tensor:
    """X enlarged, places counted from zero."""
    kind = "linear" if mode in ("linear", "bilinear") else mode
    return resize(
        x,
        None,
        scales,
        mode=kind,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        opset=11,
    )


@op("GridSample")
def grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Tensor:
    """X at the places of a grid, each from -1 to 1."""
    kinds = {"linear": "bilinear", "bilinear": "bilinear", "cubic": "bicubic", "bicubic": "bicubic"}
    return torch.nn.functional.grid_sample(
        x,
        grid,
        mode=kinds.get(mode, mode),
        padding_mode=padding_mode,
        align_corners=bool(align_corners),
    )


@op("AffineGrid", hosts=(1,))
def affine_grid(theta: Tensor, size: Value, *, align_corners: int = 0) -> Tensor:
    """The grid that an affine map makes of a picture of some size."""
    return torch.nn.functional.affine_grid(theta, list(ints(size)), bool(align_corners))
