"""Groups along K: how rows are cut into tiles and groups, and how scales are found and stored.

What every format with scales per group shares. Tiles are small enough for the cache; a weight
that lies column by column is worked on as it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.formats.packing import is_turned

TILE = 1 << 19
"""Weights worked on at once (2 MB of float32): small enough for the cache, large enough for two
threads not to wait for the interpreter between numpy calls."""


class Tile(NamedTuple):
    """What is worked on at once: the groups `at` of `rows`; weights and codes `[rows, at, G]`."""

    rows: slice
    at: slice
    weights: Array
    codes: Array

    def check_overflow(self, ends: Array, stored: np.dtype[np.floating[Any]]) -> None:
        """Refuse groups whose scale, or scale times highest code (`ends`), is infinite."""
        overflowing(ends, stored, self.rows.start, self.at.start)


class ScaleOverflow(OverflowError):
    """A group whose scale the type that it is stored in cannot hold.

    row, group: where it is, counted in the rows that were given.
    """

    def __init__(self, row: int, group: int, stored: np.dtype[Any]) -> None:
        self.row, self.group, self.stored = row, group, stored
        super().__init__(f"row {row}, group {group}: {self.why}")

    @property
    def why(self) -> str:
        """What is wrong, wherever that is."""
        return f"its scale does not fit {self.stored}"

    def below(self, rows: int) -> ScaleOverflow:
        """The same with so many rows above."""
        return ScaleOverflow(rows + self.row, self.group, self.stored)


def overflowing(
    scales: Array, stored: np.dtype[np.floating[Any]], row: int = 0, group: int = 0
) -> None:
    """Refuse infinite scales `[n, nb, …]`, of rows from `row` and groups from `group` on.

    Raises:
        ScaleOverflow: names the first.
    """
    infinite = np.isinf(scales)
    if infinite.any():
        first = np.argwhere(infinite)[0]
        raise ScaleOverflow(int(first[0]) + row, int(first[1]) + group, stored)


def count_groups(k: int, group: int) -> int:
    """Groups in a row of length `k`; group 0 is the whole row."""
    return -(-k // group) if group else 1


def _tile_rows(width: int) -> int:
    return max(1, TILE // width)


def tiles(n: int, width: int) -> Iterator[slice]:
    """Slices of rows that hold at most TILE weights each, or one row."""
    step = _tile_rows(width)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def group_tiles(weights: Array, codes: Array, group: int) -> Iterator[Tile]:
    """Tiles of a weight `[n, k]` and its codes, in runs of memory that are as long as possible.

    Whole rows where they lie row by row; else few groups of many rows.
    """
    n, k = weights.shape
    for rows in tiles(n, (group or k) if is_turned(weights) else k):
        views = zip(group_views(weights[rows], group), group_views(codes[rows], group), strict=True)
        for (groups, at), (places, _) in views:
            for few in tiles(groups.shape[1], groups.shape[0] * groups.shape[2]):
                found = slice(at.start + few.start, at.start + few.stop)
                yield Tile(rows, found, groups[:, few], places[:, few])


def group_views(rows: Array, group: int) -> Iterator[tuple[Array, slice]]:
    """Views `[n, groups, G]` of `rows` and which groups they are: the whole ones, the partial."""
    n, k = rows.shape
    whole = k // group if group else 1
    end = whole * (group or k)
    if whole:
        yield rows[:, :end].reshape(n, whole, -1), slice(0, whole)
    if end < k:
        yield rows[:, None, end:], slice(whole, whole + 1)


def lying_like(groups: Array, work: Array) -> Array:
    """The first elements of `work` in the shape of `groups` `[n, nb, G]`, in the same order."""
    n, nb, group = groups.shape
    first = work[: groups.size]
    if is_turned(groups):
        return first.reshape(nb, group, n).transpose(2, 0, 1)
    return first.reshape(groups.shape)


def extremes(groups: Array, work: Array, *, absolute: bool = False) -> list[Array]:
    """Least and greatest of each of `groups` `[n, nb, G]`, or only the greatest magnitude.

    work: scratch that lies like the groups. The results are `[n, nb, 1]`.
    """
    reductions = (np.maximum,) if absolute else (np.minimum, np.maximum)
    n, nb, group = groups.shape
    if is_turned(groups):
        groups = np.absolute(groups, out=work) if absolute else groups
        return [reduction.reduce(groups, axis=2, keepdims=True) for reduction in reductions]
    m = n * nb
    groups, work = groups.reshape(m, group), work.reshape(-1)
    # numpy reduces short rows one by one, slowly: up to 32 long they are first laid side by side,
    # as columns of a width that keeps the copy in the first-level cache.
    whole = m // 256 * 256 if group <= 32 else 0
    columns = work[: whole * group].reshape(-1, group, 256)
    columns[...] = groups[:whole].reshape(-1, 256, group).transpose(0, 2, 1)
    rows = groups[whole:]
    if absolute:
        np.absolute(columns, out=columns)
        rows = np.absolute(rows, out=work[whole * group :].reshape(rows.shape))
    results = [np.empty(m, np.float32) for _ in reductions]
    for reduction, result in zip(reductions, results, strict=True):
        reduction.reduce(columns, axis=1, out=result[:whole].reshape(-1, 256))
        if whole < m:
            starts = np.arange(0, rows.size, group)
            reduction.reduceat(rows.reshape(-1), starts, out=result[whole:])
    return [result.reshape(n, nb, 1) for result in results]


def as_stored(steps: Array, span: Array, stored: np.dtype[np.floating[Any]]) -> Array:
    """float32 scales as they read back from `stored`: 0 where `span` is, else never subnormal."""
    tiny = np.float32(smallest_normal(stored))
    np.copyto(steps, np.copysign(tiny, steps), where=np.abs(steps) < tiny)
    steps = steps.astype(stored, copy=False).astype(np.float32, copy=False)
    np.copyto(steps, 0, where=span == 0)
    return steps


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """Of a float type, ml_dtypes' among them."""
    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


def lowest(dtype: np.dtype[Any]) -> float:
    """The most negative number of a float type, ml_dtypes' among them."""
    return float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]


def epsilon(dtype: np.dtype[Any]) -> float:
    """The step behind 1 of a float type, ml_dtypes' among them."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def divisors(steps: Array) -> Array:
    """The steps, and 1 for groups of zeros."""
    units: Array = steps + (steps == 0)
    return units


def check_scale_dtype(dtype: ir.DataType) -> None:
    """Raise InputError unless scales can be stored in `dtype`."""
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        raise InputError(f"scales in {dtype.name}: wanted FLOAT, FLOAT16 or BFLOAT16")


def read_scales(part: Array, n: int, nb: int) -> Array:
    """Scales `[n, nb]`, given as they are or as their bytes."""
    if part.dtype == np.uint8:
        part = part.reshape(-1).view(np.float16 if part.nbytes == 2 * n * nb else np.float32)
    return part.reshape(n, nb)
