"""Numbers of ours as the blocks of GGUF's types: the inverse of `gguf_blocks`, and what fits.

Types of 32 weights store scales and minimums in float16. K types store those of 256 weights as
multiples of one float16 each: of 63 at most, of 15 in Q2_K, from −32 to 31 in Q3_K and from −128
to 127 in Q6_K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qgraph.checkpoints.gguf_blocks import BLOCK_TYPES, HALF, BlockType
from qgraph.formats.base import Array
from qgraph.formats.packing import pack_bits


class Grid(NamedTuple):
    """Weights in float64, whatever a type holds of them: scale·code + least.

    codes: int8 `[m, size]`, or uint8, of which 0 stands for `least`.
    scales, least: float64 `[m, size / group]`; least is None where there are no minimums.
    slack: how far `least` may be from the number that float32 rounded to it, as `least`.
    """

    codes: Array
    scales: Array
    least: Array | None = None
    slack: Array | None = None

    def values(self) -> Array:
        """The weights, float64 `[m, groups, group]`."""
        found = self.codes.reshape(*self.scales.shape, -1) * self.scales[..., None]
        return found if self.least is None else found + self.least[..., None]


class Target(NamedTuple):
    """A type that is written.

    fit: the nearest that the type holds, in as many groups; the same where it holds all.
    pack: blocks u8 `[m, nbytes]` of what `fit` gives.
    moves: whether weights that the type does not hold are moved to it, or else refused.
    """

    type: BlockType
    fit: Callable[[Grid], Grid]
    pack: Callable[[Grid], Array]
    moves: bool = True


def as_half(values: Array) -> Array:
    """Numbers as float16 has them, float64; infinite where it has none so large."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float64)


def _halves(grid: Grid) -> Grid:
    """Scales and minimums in float16."""
    least = None if grid.least is None else as_half(grid.least)
    return Grid(grid.codes, as_half(grid.scales), least)


def _to_planes(codes: Array, bits: int, run: int) -> Array:
    """Codes u8 `[m, size]` as bytes that lie in planes: see `gguf_blocks`."""
    planes = codes.reshape(len(codes), -1, 8 // bits, run).swapaxes(2, 3)
    return pack_bits(np.ascontiguousarray(planes).reshape(len(codes), -1), bits)


def _raised(grid: Grid, by: int) -> Array:
    """Signed codes as u8 from 0 on."""
    found: Array = grid.codes.view(np.uint8) + np.uint8(by)
    return found


def _half_bytes(values: Array) -> Array:
    """Float16 numbers `[m, x]` as bytes `[m, 2x]`."""
    return np.ascontiguousarray(values.astype(HALF)).view(np.uint8)


def _heads(grid: Grid) -> list[Array]:
    """Scale and minimum of blocks that have one of each."""
    return [_half_bytes(each) for each in (grid.scales, grid.least) if each is not None]


def _q4(grid: Grid, by: int) -> Array:
    return np.concatenate([*_heads(grid), _to_planes(_raised(grid, by), 4, 16)], axis=1)


def _q5(grid: Grid, by: int) -> Array:
    codes = _raised(grid, by)
    high, low = pack_bits(codes >> np.uint8(4), 1), _to_planes(codes & np.uint8(15), 4, 16)
    return np.concatenate([*_heads(grid), high, low], axis=1)


def _q8_0(grid: Grid) -> Array:
    return np.concatenate([*_heads(grid), grid.codes.view(np.uint8)], axis=1)


def steps(values: Array, most: int, slack: Array | None = None) -> tuple[Array, Array]:
    """A float16 for each row of numbers ≥ 0, and how often each number has it.

    Of the float16 numbers that make the largest number one of its 1st to `most`-th multiples: one
    of which all numbers are multiples, within `slack` if not exactly; else the one whose multiples
    are nearest to them.

    Args:
        values: float64 `[m, x]`.
        slack: float64 `[m, x]`.

    Returns:
        float64 `[m, 1]`, and whole numbers up to `most` as float64 `[m, x]`.
    """
    top = values.max(axis=1, keepdims=True)
    found, counts = np.zeros_like(top), np.zeros_like(values)
    error = np.where(top > 0, np.inf, 0.0)[:, 0]
    for multiple in range(most, 0, -1):
        rows = np.flatnonzero(error)
        if not len(rows):
            break
        half, wanted = as_half(top[rows] / multiple), values[rows]
        times = np.divide(wanted, half, out=np.zeros_like(wanted), where=half > 0)
        times = np.clip(np.rint(times), 0, most)
        far = np.abs(times * half - wanted)
        worst = far.max(axis=1)
        if slack is not None:  # less than any grid that is merely near, more than an exact one
            near = (far <= slack[rows]).all(axis=1)
            worst = np.where(near & (worst > 0), np.finfo(np.float64).tiny, worst)
        better = worst < error[rows]
        at = rows[better]
        error[at], found[at], counts[at] = worst[better], half[better], times[better]
    return found, counts


def signed_steps(values: Array, most: int, slack: Array | None = None) -> tuple[Array, Array]:
    """`steps` of numbers that have one sign in each row, which the float16 then has."""
    sign = np.where((values < 0).any(axis=1, keepdims=True), -1.0, 1.0)
    found, counts = steps(np.abs(values), most, slack)
    return sign * found, counts


def on_grid(grid: Grid, bits: int, most: int) -> Grid:
    """The nearest whose scales, and whose minimums, are multiples of one number in each block.

    Groups that run the other way than the largest of their block are turned around; codes change
    only in groups whose scale or minimum did.
    """
    assert grid.least is not None
    codes = grid.codes.reshape(*grid.scales.shape, -1)
    top = (1 << bits) - 1
    # What `gguf_entries.moved` makes of a group without a scale goes back to what it was.
    constant = (codes == 1).all(axis=2) & (grid.least == 0)
    scales = np.where(constant, 0, grid.scales)
    least = np.where(constant, grid.scales, grid.least)
    forward = _sign(scales)
    turned = scales * forward < 0
    codes = np.where(turned[..., None], top - codes, codes)
    least, scales = np.where(turned, least + top * scales, least), forward * np.abs(scales)
    below = _sign(-least)
    new_scales = _product(signed_steps(scales, most))
    below_zero = np.where(-least * below > 0, -least, 0)
    new_least = -_product(signed_steps(below_zero, most, grid.slack))
    slack = 0 if grid.slack is None else grid.slack
    moved = (new_scales != scales) | (np.abs(new_least - least) > slack)
    values = codes * scales[..., None] + (least - new_least)[..., None]
    units = np.where(new_scales == 0, 1, new_scales)[..., None]
    nearest = np.where(new_scales[..., None] == 0, 0, np.clip(np.rint(values / units), 0, top))
    found = np.where(moved[..., None], nearest, codes).astype(np.uint8)
    return Grid(found.reshape(grid.codes.shape), new_scales, new_least)


def _sign(values: Array) -> Array:
    """That of the largest magnitude in each row, `[m, 1]`."""
    least, most = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    return np.where(-least > most, -1.0, 1.0)


def _product(pair: tuple[Array, Array]) -> Array:
    found: Array = pair[0] * pair[1]
    return found


def _k_heads(grid: Grid, most: int) -> tuple[list[Array], Array, Array]:
    """The two float16 numbers of blocks that are on the grid, and the multiples u8 of both."""
    assert grid.least is not None
    (d, scales), (low, least) = signed_steps(grid.scales, most), signed_steps(-grid.least, most)
    return [_half_bytes(d), _half_bytes(low)], scales.astype(np.uint8), least.astype(np.uint8)


def to_sixes(scales: Array, minimums: Array) -> Array:
    """The inverse of `gguf_blocks._sixes`: u8 `[m, 12]`."""
    low = scales[:, 4:] & np.uint8(15) | (minimums[:, 4:] & np.uint8(15)) << np.uint8(4)
    tops = [each[:, :4] | each[:, 4:] >> np.uint8(4) << np.uint8(6) for each in (scales, minimums)]
    return np.concatenate([*tops, low], axis=1)


def _q4_k(grid: Grid) -> Array:
    heads, scales, least = _k_heads(grid, 63)
    return np.concatenate([*heads, to_sixes(scales, least), _to_planes(grid.codes, 4, 32)], axis=1)


def _q5_k(grid: Grid) -> Array:
    heads, scales, least = _k_heads(grid, 63)
    high = _to_planes(grid.codes >> np.uint8(4), 1, 32)
    low = _to_planes(grid.codes & np.uint8(15), 4, 32)
    return np.concatenate([*heads, to_sixes(scales, least), high, low], axis=1)


def _q2_k(grid: Grid) -> Array:
    heads, scales, least = _k_heads(grid, 15)
    packed = scales | least << np.uint8(4)
    return np.concatenate([packed, _to_planes(grid.codes, 2, 32), *heads], axis=1)


def both_signs(scales: Array, most: int) -> tuple[Array, Array]:
    """A float16 `[m, 1]` and multiples, −most to most − 1, int8 `[m, x]`, nearest to scales."""
    d, counts = steps(np.abs(scales), most)
    signs = np.sign(scales)
    # −most is a multiple and most is none, so the number takes the sign that makes it so.
    d = np.where(((counts == most) & (signs > 0)).any(axis=1, keepdims=True), -d, d)
    times = np.clip(counts * signs * np.where(d < 0, -1, 1), -most, most - 1)
    return d, times.astype(np.int8)


def _on_signed_grid(grid: Grid, most: int) -> Grid:
    d, times = both_signs(grid.scales, most)
    return Grid(grid.codes, d * times)


def _q3_k(grid: Grid) -> Array:
    d, times = both_signs(grid.scales, 32)
    codes, small = _raised(grid, 4), times.view(np.uint8) + np.uint8(32)
    high, low = _to_planes(codes >> np.uint8(2), 1, 32), _to_planes(codes & np.uint8(3), 2, 32)
    packed = [_to_planes(small & np.uint8(15), 4, 8), _to_planes(small >> np.uint8(4), 2, 4)]
    return np.concatenate([high, low, *packed, _half_bytes(d)], axis=1)


def _q6_k(grid: Grid) -> Array:
    d, times = both_signs(grid.scales, 128)
    codes = _raised(grid, 32)
    low, high = _to_planes(codes & np.uint8(15), 4, 64), _to_planes(codes >> np.uint8(4), 2, 32)
    return np.concatenate([low, high, times.view(np.uint8), _half_bytes(d)], axis=1)


_TYPES = {each.name: each for each in BLOCK_TYPES.values()}
TARGETS = (
    Target(_TYPES["Q4_0"], _halves, functools.partial(_q4, by=8)),
    Target(_TYPES["Q4_1"], _halves, functools.partial(_q4, by=0)),
    Target(_TYPES["Q4_K"], functools.partial(on_grid, bits=4, most=63), _q4_k),
    Target(_TYPES["Q5_0"], _halves, functools.partial(_q5, by=16)),
    Target(_TYPES["Q8_0"], _halves, _q8_0),
    Target(_TYPES["Q5_1"], _halves, functools.partial(_q5, by=0)),
    Target(_TYPES["Q5_K"], functools.partial(on_grid, bits=5, most=63), _q5_k),
    Target(_TYPES["Q2_K"], functools.partial(on_grid, bits=2, most=15), _q2_k),
    Target(_TYPES["Q3_K"], functools.partial(_on_signed_grid, most=32), _q3_k, moves=False),
    Target(_TYPES["Q6_K"], functools.partial(_on_signed_grid, most=128), _q6_k, moves=False),
)
"""Every type that is written; of those of one format, the one that is preferred first."""
