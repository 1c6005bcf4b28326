"""Which GGUF type holds a weight of ours, and the weight as its blocks.

A weight is written in a type that holds it exactly, where one does; what came from a GGUF file
always has one. Of others the codes stay, and scales and minimums are rounded to float16, which
moves weights by at most 2^-11 of their size where scales are above 6e-5, float16's smallest normal
number. Only where a K type is asked for does a weight move to the grid of one; its error is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import Entry
from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.gguf_entries import GgufEntry
from qgraph.checkpoints.gguf_packing import TARGETS, Grid, Target
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.formats.minimums import MINIMUMS
from qgraph.lost_weights import LOST
from qgraph.quant_tensor import square_sum

_BY_NAME = {each.type.name: each for each in TARGETS}
WRITTEN = tuple(_BY_NAME)
"""The names of the types that weights of ours are written in."""
ASKED_FOR = tuple(
    each.type.name
    for each in TARGETS
    if each.moves and each.type.bits == parse(each.type.format).bits
)
"""Those that weights rounded to nearest in a format of ours have a place in."""

_LOST = 2.0**-23
"""What float32 may take from a number, doubled: the nearest float16 number may lie on its other
side."""


class Choice(NamedTuple):
    """The type of a weight; error: ‖W − W'‖/‖W‖ of what that makes of it, 0 where it holds it."""

    type: BlockType
    error: float = 0.0


class NoType(InputError):
    """No type holds a weight; the text says why."""


class _Fit(NamedTuple):
    """How far a type is from some rows: Σ(w − w')² and Σw²; both are 0 where it holds them."""

    error_sq: float
    norm_sq: float
    exact: bool


def choose(entry: Entry, wanted: str | None = None) -> Choice:
    """The type for a weight, by all of its rows.

    Args:
        entry: the weight.
        wanted: the type where several hold weights of its format.

    Raises:
        NoType: none holds it, and none is near.
    """
    if isinstance(entry, GgufEntry):
        return Choice(entry.type)
    targets = _targets(entry)
    for target in targets:
        if target.type.name == wanted:
            return Choice(target.type, _error(entry, target))
    reasons: list[str] = []
    movable = [target for target in targets if target.moves]
    found = _first(entry, targets, _exactly, reasons) or _first(entry, movable, _error, reasons)
    if found is None:
        raise NoType(reasons[-1] if reasons else _off_grid(targets))
    return found


def encode(entry: Entry, kind: BlockType, start: int, stop: int) -> Array:
    """Rows `start:stop` as blocks of the type that `choose` gave, u8 `[n, K / size · nbytes]`."""
    if isinstance(entry, GgufEntry):
        return entry.packed(start, stop).reshape(stop - start, -1)
    target = _BY_NAME[kind.name]
    found = target.fit(_grid(entry.rows(start, stop), entry.format, target))
    return target.pack(found).reshape(stop - start, -1)


def format_of(kind: str) -> str:
    """The format of ours that a type holds, spelled with its group."""
    found = _BY_NAME[kind].type
    return parse(found.format, group=found.group).spell()


def _targets(entry: Entry) -> list[Target]:
    """The types of the entry's format whose blocks divide its rows.

    Raises:
        NoType: there are none.
    """
    fmt = entry.format
    if entry.order is not None:
        raise NoType("it is in act order, for which GGUF has no place")
    if entry.experts is not None:
        raise NoType("it has an expert axis, wanted a matrix")
    found = [target for target in TARGETS if _key(fmt) == _type_key(target.type)]
    if not found:
        known = sorted({format_of(name) for name in WRITTEN})
        raise NoType(f"it is {fmt.spell()}, wanted {', '.join(known[:-1])} or {known[-1]}")
    fitting = [target for target in found if entry.k % target.type.size == 0]
    if not fitting:
        size = min(target.type.size for target in found)
        raise NoType(f"its rows are {entry.k} long, wanted a multiple of {size}")
    return fitting


def _key(fmt: Format) -> tuple[str, int, int]:
    return fmt.numbers, fmt.bits, fmt.group


def _type_key(kind: BlockType) -> tuple[str, int, int]:
    fmt = parse(kind.format)
    return fmt.numbers, fmt.bits, kind.group


def _first(
    entry: Entry,
    targets: Sequence[Target],
    error: Callable[[Entry, Target], float | None],
    reasons: list[str],
) -> Choice | None:
    """The first type with an error; why others have none is added to `reasons`."""
    for target in targets:
        try:
            found = error(entry, target)
        except NoType as reason:
            reasons.append(str(reason))
            continue
        if found is not None:
            return Choice(target.type, found)
    return None


def _exactly(entry: Entry, target: Target) -> float | None:
    """0 where a type holds a weight exactly; the first rows that it does not hold end the search.

    Raises:
        NoType: codes or scales are beyond the type.
    """
    kind, fmt = target.type, entry.format
    half = entry.scale_dtype == ir.DataType.FLOAT16 and kind.half_scales and fmt.symmetric
    if half and kind.bits == fmt.bits:  # the type is all that the weight is
        return 0.0
    return 0.0 if all(_fit(entry, target, *rows).exact for rows in entry.blocks()) else None


def _error(entry: Entry, target: Target) -> float:
    """‖W − W'‖/‖W‖.

    Raises:
        NoType: codes or scales are beyond the type, or below it.
    """
    fits = [_fit(entry, target, *rows) for rows in entry.blocks()]
    error, norm = sum(fit.error_sq for fit in fits), sum(fit.norm_sq for fit in fits)
    found = math.sqrt(error / norm) if error else 0.0
    if found > LOST:
        raise NoType(
            f"WEIGHT_LOST: as {target.type.name} it is {found:.0%} off, for its scales are below "
            "what float16 holds"
        )
    return found


def _fit(entry: Entry, target: Target, start: int, stop: int) -> _Fit:
    own = _grid(entry.rows(start, stop), entry.format, target)
    found = target.fit(own)
    for grid in (found.scales, found.least):
        if grid is not None and not np.isfinite(grid).all():
            worst = max(np.abs(own.scales).max(), np.abs(own.values()).max())
            raise NoType(
                f"its scales and minimums go up to {worst:g}, and GGUF stores them in float16, up "
                "to 65504"
            )
    values = own.values()
    far = np.abs(found.values() - values)
    if (far.max(axis=2) <= _rounding(own)).all():
        return _Fit(0.0, square_sum(values), True)
    return _Fit(square_sum(far), square_sum(values), False)


def _rounding(grid: Grid) -> Array:
    """How far weights may be off that have the same numbers: what was lost to float32 before."""
    size = np.abs(grid.scales) if grid.least is None else np.abs(grid.scales) + np.abs(grid.least)
    return 2.0**-40 * size + (0 if grid.slack is None else grid.slack)


def _grid(weight: QuantizedWeight, fmt: Format, target: Target) -> Grid:
    """Rows of a weight in the blocks of a type, codes counted as the type does.

    Raises:
        NoType: it has codes that the type has not.
    """
    kind = target.type
    codes = np.ascontiguousarray(weight.codes)
    span = 1 << kind.bits
    first = -(span >> 1) if fmt.symmetric else (1 << (fmt.bits - 1)) - (span >> 1)
    if codes.size and not first <= codes.min() <= codes.max() < first + span:
        raise NoType(
            f"its codes run from {codes.min()} to {codes.max()}, and those of {kind.name} from "
            f"{first} to {first + span - 1}"
        )
    groups = kind.size // kind.group
    scales = weight.scales.astype(np.float64).reshape(-1, groups)
    if fmt.symmetric:
        return Grid(codes.reshape(-1, kind.size), scales)
    least, slack = _least(weight, fmt, first)
    codes = (codes - np.uint8(first)).reshape(-1, kind.size)
    return Grid(codes, scales, least.reshape(-1, groups), slack.reshape(-1, groups))


def _least(weight: QuantizedWeight, fmt: Format, first: int) -> tuple[Array, Array]:
    """What the code `first` stands for in each group, and how far float32 may have moved that."""
    scales = weight.scales.astype(np.float64)
    if MINIMUMS in weight.more:
        middle = weight.more[MINIMUMS]
        wide = middle.astype(np.float64)
        lost = _LOST if middle.dtype == np.float32 else 0.0
        return wide - scales * ((1 << (fmt.bits - 1)) - first), lost * np.abs(wide)
    assert weight.zeros is not None
    found = -scales * (weight.zeros.astype(np.float64) - first)
    lost = _LOST if weight.zeros.dtype == np.float32 else 0.0
    return found, lost * np.abs(scales * weight.zeros)


def _off_grid(targets: Sequence[Target]) -> str:
    names = " or ".join(target.type.name for target in targets)
    return f"its scales are not multiples of one number in each 256 weights, as {names} has them"
