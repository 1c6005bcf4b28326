"""What the layouts of integer codes share: which of our formats holds a weight, and its groups."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from qgraph import registry
from qgraph.checkpoints.base import ONE_PER_EXPERT, Entry
from qgraph.checkpoints.tensors import Stored, StoredTensor
from qgraph.errors import InputError
from qgraph.formats.base import GROUPS, Array, Format, QuantizedWeight
from qgraph.formats.grouping import count_groups
from qgraph.formats.integer_groups import IntegerGroups
from qgraph.wording import counted

_HELD = {1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
"""Bits of a code → those of the format that holds it exactly."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """How codes of `bits` bits with a scale for `span` columns lie in a format of ours.

    repeats: groups of the format that have one scale of the checkpoint.
    middle: the zero point of symmetric codes as the checkpoint has them, unsigned.
    """

    format: Format
    bits: int
    span: int
    repeats: int

    @property
    def middle(self) -> int:
        """See the class."""
        return 1 << (self.bits - 1)

    @property
    def note(self) -> tuple[str, ...]:
        """What is said of codes that are held in more bits."""
        if self.bits == self.format.bits:
            return ()
        return (f"{self.bits}-bit codes are held in {self.format.bits} bits, exactly",)

    def codes(self, unsigned: Array) -> Array:
        """Unsigned codes of the checkpoint, uint8, as the format has them."""
        if self.format.symmetric:
            return (unsigned - np.uint8(self.middle)).view(np.int8)
        return unsigned

    def spread(self, values: Array, k: int) -> Array:
        """Scales or zero points `[n, ceil(K/span)]` as the format has them, `[n, nb]`."""
        nb = count_groups(k, self.format.group)
        return np.repeat(values, self.repeats, axis=1)[:, :nb] if self.repeats > 1 else values


class GridEntry(Protocol):
    """An entry of integer codes."""

    @property
    def name(self) -> str:
        """See `Entry`."""

    @property
    def k(self) -> int:
        """See `Entry`."""

    @property
    def grid(self) -> Grid:
        """How its codes lie in the format."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GroupedEntry(Entry):
    """A weight of integer codes in groups, in act order or not.

    group_of: the group of each column of the parameter, int `[K]`.
    """

    grid: Grid
    group_of: Array

    @abstractmethod
    def _codes(self, start: int, stop: int) -> Array:
        """Unsigned codes uint8 `[n, K]`, columns as the parameter has them."""

    @abstractmethod
    def _scales(self, start: int, stop: int) -> Array:
        """`[n, nb]`, floats as stored."""

    @abstractmethod
    def _zeros(self, start: int, stop: int) -> Array:
        """Zero points of the unsigned codes, uint8 `[n, nb]`."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        codes = self._codes(start, stop)
        codes = self.grid.codes(codes if self.order is None else codes[:, self.order])
        scales = self.grid.spread(self._scales(start, stop), self.k)
        if self.format.symmetric:
            return QuantizedWeight(codes, scales)
        return QuantizedWeight(codes, scales, self.grid.spread(self._zeros(start, stop), self.k))

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: (code − zero)·scale, each of its column's group."""
        codes = self._codes(start, stop).astype(np.float32)
        zeros = self._zeros(start, stop).astype(np.float32)
        scales = self._scales(start, stop).astype(np.float32)
        found: Array = (codes - zeros[:, self.group_of]) * scales[:, self.group_of]
        return found


def grid(name: str, bits: int, span: int, k: int, symmetric: bool) -> Grid:
    """The format that holds integer codes with one scale for `span` columns of `k`.

    Raises:
        InputError: no group of ours divides the span.
    """
    if bits not in _HELD:
        raise InputError(f"{name} has codes of {bits} bits, wanted 1 to 8")
    held: Format = registry.load("format", f"{'int' if symmetric else 'uint'}{_HELD[bits]}")
    if span >= k:
        return Grid(dataclasses.replace(held, group=0), bits, k, 1)
    fitting = [group for group in GROUPS if group and span % group == 0]
    if not fitting:
        sizes = ", ".join(str(group) for group in GROUPS if group)
        raise InputError(f"{name} has groups of {span}, wanted a multiple of one of {sizes}")
    group = max(fitting)
    return Grid(dataclasses.replace(held, group=group), bits, span, span // group)


def packed_modules(stored: Stored, suffixes: Collection[str]) -> dict[str, dict[str, StoredTensor]]:
    """The modules that have `qweight` or `qzeros` (one alone is found when it is read)."""
    return {
        name: parts
        for name, parts in stored.modules(suffixes).items()
        if "qweight" in parts or "qzeros" in parts
    }


def groups(
    scales: StoredTensor, g_idx: StoredTensor | None, k: int, nb: int, said: Any
) -> tuple[Array, Array | None, int]:
    """The group of each of `k` columns `[K]`, the order that makes groups contiguous, their length.

    scales: for messages.
    g_idx: names the group of each column; None where columns follow each other. The order is None
        where they lie so already.
    said: the group size of the configuration. Where it makes `nb` groups it counts: the last
        group may be shorter, which no tensor tells.

    Raises:
        InputError: groups of unequal length (the last may be shorter), or not `nb` of them.
    """
    columns = np.arange(k, dtype=np.int64)
    if g_idx is None:
        size = _size(said)
        span = size if size and -(-k // size) == nb else -(-k // nb)
        if -(-k // span) != nb:
            raise InputError(
                f"{scales.path}: {scales.name} has {counted(nb, 'group')}, which "
                f"{counted(k, 'input')} cannot be cut into"
            )
        return columns // span, None, span
    group_of = g_idx.array().astype(np.int64)
    order = np.argsort(group_of, kind="stable")
    span = int((group_of == group_of.min()).sum())
    if group_of.min() != 0 or not np.array_equal(group_of[order], columns // span):
        raise InputError(
            f"{g_idx.path}: {g_idx.name} puts {k} columns into groups {int(group_of.min())} to "
            f"{int(group_of.max())}, not of equal length: wanted {counted(nb, 'group')} of "
            f"{-(-k // nb)}"
        )
    if -(-k // span) != nb:
        raise InputError(
            f"{g_idx.path}: {g_idx.name} names {counted(-(-k // span), 'group')} of "
            f"{counted(span, 'column')}, and there are {nb} scales for each row"
        )
    return group_of, None if np.array_equal(order, columns) else order, span


def _size(said: Any) -> int:
    """The group size that a configuration names; 0 where it names none."""
    return said if type(said) is int and said > 0 else 0


def contradictions(said_bits: Any, said_size: Any, entries: Sequence[GridEntry]) -> list[str]:
    """Where a configuration contradicts the tensors, which are right; each kind once."""
    found: dict[str, str] = {}
    for entry in entries:
        bits, span = entry.grid.bits, entry.grid.span
        if said_bits not in (None, bits):
            found.setdefault("bits", f"{said_bits!r} bits, and {entry.name} has {bits}")
        whole = said_size in (None, 0, -1)
        wide = entry.k if said_size == -1 else span if whole else min(_size(said_size), entry.k)
        if wide != min(span, entry.k):
            text = f"group_size {said_size!r}, and {entry.name} has groups of {span}"
            found.setdefault("group", text)
    return [f"the configuration says {text}: the tensors count" for text in found.values()]


def integer_reason(entry: Entry, bits: tuple[int, ...], *, zeros: bool) -> str | None:
    """Why a weight is not codes of `bits` bits with integer zero points (or none), or None.

    zeros: whether zero points can be stored.
    """
    fmt = entry.format
    if not isinstance(fmt, IntegerGroups) or fmt.zero == "float":
        return f"{fmt.spell()} has no integer codes with integer zero points"
    if fmt.bits not in bits:
        return f"{fmt.spell()} has {fmt.bits} bits, wanted {' or '.join(map(str, bits))}"
    if not fmt.symmetric and not zeros:
        return f"{fmt.spell()} has zero points, wanted a symmetric format"
    if entry.experts is not None:
        return ONE_PER_EXPERT
    return None


def unsigned(entry: Entry, codes: Array) -> Array:
    """Codes of the entry's format as this family of layouts stores them, uint8."""
    if entry.format.symmetric:
        return codes.view(np.uint8) + np.uint8(1 << (entry.format.bits - 1))
    return codes


def zeros_of(entry: Entry, zeros: Array | None, shape: tuple[int, ...]) -> Array:
    """Zero points, uint8; of symmetric weights the middle of the unsigned codes."""
    if zeros is None:
        return np.full(shape, 1 << (entry.format.bits - 1), np.uint8)
    return zeros


def one_format(layout: str, entries: Sequence[Entry]) -> tuple[int, int]:
    """The bits and the group (0 for the whole row) that all weights have.

    Raises:
        InputError: they differ, which a layout with one number for all cannot say.
    """
    kinds = {(entry.format.bits, entry.format.group) for entry in entries}
    if len(kinds) != 1:
        spelled = ", ".join(sorted({entry.format.spell() for entry in entries}))
        raise InputError(
            f"{layout} has one number of bits and one group for all weights, found "
            f"{spelled or 'no weights'}: choose one format, or the layout compressed-tensors"
        )
    return kinds.pop()
