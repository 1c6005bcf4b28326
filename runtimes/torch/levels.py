"""Formats whose codes are numbers of a table, as torch reads them: FP8, NF4, FP4, MX and NVFP4.

Tables, order of codes and kind of scales are what the format itself says, so a new format of that
kind has a torch reference, and kernels, for free.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from qgraph.errors import InputError

if TYPE_CHECKING:
    from qgraph.formats.level_functions import Spelling

Order = Literal["low", "high", "halves"]
Numbers = Literal["table", "e2m1", "e4m3", "e5m2"]
Steps = Literal["float", "e8m0", "e4m3", "table"]
Third = Literal["tensor", "nested"]
_THIRD: dict[str | None, Third | None] = {None: None, "tensor": "tensor", "nested": "nested"}


class LevelCodes(NamedTuple):
    """What the name of a layout of levels says: `Nf4V1` is 4 bits, the first in the high half."""

    layout: str
    bits: int
    order: Order
    """Where the even codes of a block lie in bytes; "halves": its first half in the low halves."""
    numbers: Numbers
    """The kind of levels, "table" for those that have no name of their own."""
    steps: Steps
    """The kind of scales: floats, or bytes of that kind."""
    third: Third | None
    """What scales are multiplied by: a float for the tensor, or scale and mean for 256 of them."""
    shared_rows: int
    """Rows that share their scales: 1, 128, or 0 for all."""


@functools.cache
def level_codes(layout: str) -> LevelCodes | None:
    """The layout of levels called `layout`, or None if it is none."""
    spelling = _spelling(layout)
    if spelling is None or spelling.unpack or spelling.third not in _THIRD:
        return None
    from qgraph.formats import small_floats

    numbers: dict[int, Numbers] = {
        id(small_floats.E2M1): "e2m1",
        id(small_floats.E4M3): "e4m3",
        id(small_floats.E5M2): "e5m2",
    }
    steps: dict[int, Steps] = {
        id(None): "float",
        id(small_floats.E8M0): "e8m0",
        id(small_floats.E4M3): "e4m3",
    }
    return LevelCodes(
        layout,
        8 // spelling.planes,
        spelling.order,
        numbers.get(id(spelling.levels), "table"),
        steps.get(id(spelling.scale_levels), "table"),
        _THIRD[spelling.third],
        spelling.shared_rows,
    )


def _spelling(layout: str) -> Spelling | None:
    """How the format of a layout of levels spells itself."""
    from qgraph.formats.base import named
    from qgraph.formats.level_groups import LevelGroups

    found = named(f"Dequantize{layout}")
    return found.spelling() if isinstance(found, LevelGroups) else None


@functools.cache
def levels(layout: str, device: torch.device | None = None) -> Tensor:
    """float32 `[2^bits]`: what the codes of a layout stand for."""
    return _tables(layout)[0].to(device)


@functools.cache
def byte_levels(layout: str, device: torch.device | None = None) -> Tensor:
    """float32 `[256, codes in a byte]`: what a byte stands for, in the order of K if not halves."""
    with torch.inference_mode(False):
        table = levels(layout)
        byte = torch.arange(256)
        kind = level_codes(layout)
        if kind is None or kind.bits == 8:
            return table.unsqueeze(1).to(device)
        pair = (byte >> 4, byte & 15) if kind.order == "high" else (byte & 15, byte >> 4)
        return torch.stack([table[half] for half in pair], 1).to(device)


def in_order(pairs: Tensor, kind: LevelCodes) -> Tensor:
    """`[N, nb, block]` in the order of K, of `byte_levels` `[N, nb, bytes, codes in a byte]`."""
    return (pairs.transpose(2, 3) if kind.order == "halves" else pairs).flatten(2)


def steps(kind: LevelCodes, scales: Tensor, third: Tensor | None, at: Tensor) -> Tensor:
    """float32 `[r, nb]`, `[1, nb]` where all rows share them: the scales of the rows `at` `[r]`.

    Rounded as the format does: each step in float32.
    """
    part = scales if kind.shared_rows == 0 else scales[at // kind.shared_rows]
    if kind.steps == "float":
        found = part.to(torch.float32)
    else:
        found = _scale_levels(kind.layout, scales.device)[part.int()]
    if third is None:
        return found
    if kind.third == "tensor":
        return found * third.to(torch.float32)
    from qgraph.formats.bitsandbytes import NESTED

    blocks = scales.shape[1]
    columns = torch.arange(blocks, device=scales.device)
    nested = third.to(torch.float32)[(at.unsqueeze(1) * blocks + columns) // NESTED]
    return found * nested[..., 0] + nested[..., 1]


def all_steps(kind: LevelCodes, scales: Tensor, third: Tensor | None) -> Tensor:
    """`steps` of every row of scales, float32 `[rows of scales, nb]`."""
    rows = torch.arange(scales.shape[0], device=scales.device)
    return steps(kind._replace(shared_rows=min(1, kind.shared_rows)), scales, third, rows)


def check(kind: LevelCodes, scales: Tensor, third: Tensor | None, n: int, blocks: int) -> None:
    """Raise InputError unless scales and the third part are those of a weight `[n, …]`."""
    rows = -(-n // kind.shared_rows) if kind.shared_rows else 1
    floats = kind.steps == "float"
    right = scales.is_floating_point() if floats else scales.dtype == torch.uint8
    if tuple(scales.shape) != (rows, blocks) or not right:
        raise InputError(
            f"scales of {scales.dtype} {tuple(scales.shape)}: wanted "
            f"{'floats' if floats else 'uint8 codes'} of {(rows, blocks)} in {kind.layout}"
        )
    wanted: tuple[int, ...] | None = None
    if kind.third == "tensor":
        wanted = (1,)
    elif kind.third == "nested":
        from qgraph.formats.bitsandbytes import NESTED

        wanted = (-(-n * blocks // NESTED), 2)
    found = None if third is None else tuple(third.shape)
    if found != wanted:
        raise InputError(
            f"{kind.layout} has the third part {found or 'none'}: wanted {wanted or 'none'}"
        )


@functools.cache
def _tables(layout: str) -> tuple[Tensor, Tensor | None]:
    """The levels of codes and of scales."""
    spelling = _spelling(layout)
    assert spelling is not None
    with torch.inference_mode(False):
        scales = spelling.scale_levels
        return torch.tensor(spelling.levels), None if scales is None else torch.tensor(scales)


@functools.cache
def _scale_levels(layout: str, device: torch.device) -> Tensor:
    table = _tables(layout)[1]
    assert table is not None
    return table.to(device)
