"""Experts that a checkpoint holds one by one, as the stacks `[E, N, K]` that modules have of them.

transformers joins the matrices of a layer's experts when it loads a model: `gate_up_proj` is
gate above up, expert by expert. So is the entry that is made here, without a code changed.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from qgraph.checkpoints.base import Checkpoint, Entry
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse

_STACK = re.compile(r"(?P<layer>.+)\.[^.]+\.experts\.(?P<what>gate_up_proj|down_proj)(\.weight)?")
_ONE = re.compile(r"(?P<layer>.+)\.[^.]+\.experts\.(?P<expert>\d{1,6})\.(?P<what>\w+)\.weight")
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The names of an expert's matrices that follow each other in a stack."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StackEntry(Entry):
    """The matrices of all experts, each after the other; `parts` are those, expert by expert."""

    parts: tuple[Entry, ...]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        return QuantizedWeight.joined([part.rows(*at) for part, at in self._places(start, stop)])

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`."""
        return np.concatenate([part.dequantized(*at) for part, at in self._places(start, stop)])

    @property
    def nbytes(self) -> int:
        """See `Entry.nbytes`."""
        return sum(part.nbytes for part in self.parts)

    def _places(self, start: int, stop: int) -> Iterable[tuple[Entry, tuple[int, int]]]:
        """The parts that hold some of these rows, and which of theirs."""
        ends = list(accumulate(part.n for part in self.parts))
        for index in range(bisect.bisect_right(ends, start), len(ends)):
            part = self.parts[index]
            first = ends[index] - part.n
            if first >= stop:
                return
            yield part, (max(start - first, 0), min(stop - first, part.n))


class _Index:
    """The matrices of single experts by layer and by what they are."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.found: dict[tuple[str, str], dict[int, Entry]] = {}
        for name, entry in entries.items():
            match = _ONE.fullmatch(name)
            if match is not None:
                group = self.found.setdefault((match["layer"], match["what"]), {})
                group[int(match["expert"])] = entry

    def parts(self, name: str) -> list[list[Entry]]:
        """The matrices of each expert of a stack, in their order; empty where there are none.

        Raises:
            InputError: some of the experts are there and others are not.
        """
        match = _STACK.fullmatch(name)
        for words in _PARTS[match["what"]] if match is not None else ():
            assert match is not None
            groups = [self.found.get((match["layer"], word), {}) for word in words]
            if any(groups):
                numbers = set().union(*groups)
                lost = [at for at in range(max(numbers) + 1) for g in groups if at not in g]
                if lost:
                    raise InputError(
                        f"the experts of {match['layer']} are not all quantized: of expert "
                        f"{lost[0]} not all of {', '.join(words)} is, and a graph holds all "
                        "experts of a layer in one weight: wanted all of them, or none"
                    )
                return [[group[at] for group in groups] for at in sorted(numbers)]
        return []


def with_stacks(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint with its single experts as the stacks of these names; what is not there stays.

    Raises:
        InputError: the experts of a stack are of different formats, or not all there.
    """
    index, made, gone = _Index(checkpoint.entries), dict[str, Entry](), set[str]()
    for name in dict.fromkeys(names):
        parts = [] if name in checkpoint.entries else index.parts(name)
        if parts:
            made[name] = _stack(name, parts)
            gone |= {entry.name for each in parts for entry in each}
    if not made:
        return checkpoint
    kept = {name: entry for name, entry in checkpoint.entries.items() if name not in gone}
    return dataclasses.replace(checkpoint, entries={**kept, **made})


def _stack(name: str, parts: Sequence[Sequence[Entry]]) -> StackEntry:
    flat = [entry for each in parts for entry in each]
    first = flat[0]
    fmt = _by_rows(first.format)
    for entry in flat:
        unlike = next((what for what, same in _likeness(first, entry) if not same), "")
        if unlike:
            raise InputError(
                f"{entry.name} and {first.name} have different {unlike}, and the graph holds both "
                f"in {name}: wanted experts of one layer quantized alike"
            )
        if entry.order is not None:
            raise InputError(
                f"{entry.name} is in act order, and the graph holds all experts of its layer in "
                f"{name}, whose inputs have one order: quantize it without desc_act"
            )
        if entry.n % fmt.row_step(entry.k):
            raise InputError(
                f"{entry.name} has {entry.n} rows, and {fmt.spell()} packs "
                f"{fmt.row_step(entry.k)} together: wanted a multiple of it"
            )
    specs = fmt.parts(first.n, first.k, first.scale_dtype, fmt.default_layout)
    if any(not spec.rows for spec in specs.values()):
        raise InputError(
            f"{first.name} is {fmt.spell()}, which has a scale of its own for each tensor, and the "
            f"graph holds all experts of its layer in {name}, as one tensor"
        )
    return StackEntry(
        name=name,
        n=sum(entry.n for entry in parts[0]),
        k=first.k,
        format=fmt,
        scale_dtype=first.scale_dtype,
        experts=len(parts),
        notes=first.notes,
        parts=tuple(flat),
    )


def _likeness(one: Entry, other: Entry) -> Iterable[tuple[str, bool]]:
    yield "lengths of rows", one.k == other.k
    yield "formats", one.format == other.format
    yield "types of scales", one.scale_dtype == other.scale_dtype


def _by_rows(fmt: Format) -> Format:
    """One scale for a tensor is one for each of its rows, where tensors are put together."""
    return parse(f"{fmt.name}:scale=row") if getattr(fmt, "scale", "") == "tensor" else fmt
