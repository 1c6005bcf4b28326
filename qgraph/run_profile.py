"""What a real run took, node by node, and how much of it is whose."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from qgraph.wording import counted


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """One node as a runtime ran it: microseconds of one run, all calls of that run together.

    microseconds: without those of the nodes in its bodies, which have rows of their own.
    sites: those that the node stands for, which share its time; none for any other operator.
    many: whether it stands for their second weights, of many rows.
    """

    node: str
    op: str
    provider: str
    microseconds: float
    calls: int = 1
    sites: tuple[str, ...] = ()
    many: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """What the operators of one kind took of a site's time."""

    op: str
    count: int
    microseconds: float


_INPUTS_NAMED = 4
"""Inputs of a run that its line names; JSON has them all."""


@dataclasses.dataclass(frozen=True)
class RunOf:
    """What a profile was measured on, and beside.

    shapes: of the inputs, by name. rows: the tokens or samples in them; None where the model
    decides. runs: what times are the medians of. against: another model, run on the same inputs:
    its name, its microseconds, and those of its sites by name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rows: int | None
    runs: int
    against: str = ""
    against_us: float | None = None
    against_times: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> str:
        """In words: `16 rows (input_ids 1×16)`."""
        rows = "" if self.rows is None else f"{counted(self.rows, 'row')} "
        sizes = {name: "×".join(map(str, dims)) for name, dims in self.shapes.items()}
        words = [f"{name} {size}".rstrip() for name, size in sizes.items()]
        if len(words) > _INPUTS_NAMED + 1:  # a decoder's cache has two a layer
            words[_INPUTS_NAMED:] = [f"{len(words) - _INPUTS_NAMED} more inputs"]
        return f"{rows}({', '.join(words)})"

    @property
    def line(self) -> str:
        """In words: `16 rows (input_ids 1×16), median of 10 runs`."""
        return f"{self.inputs}, median of {counted(self.runs, 'run')}"


@dataclasses.dataclass(frozen=True)
class Profile:
    """The nodes that ran; false where nothing was run."""

    rows: tuple[ProfileRow, ...] = ()
    run: RunOf | None = None

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __iter__(self) -> Iterator[ProfileRow]:
        return iter(self.rows)

    @functools.cached_property
    def total(self) -> float:
        """Microseconds of all nodes."""
        return sum(row.microseconds for row in self)

    @functools.cached_property
    def times(self) -> dict[str, float]:
        """Microseconds of each site that ran: of all its nodes, and its share of shared ones."""
        found: defaultdict[str, float] = defaultdict(float)
        for row in self:
            for site in row.sites:
                found[site] += row.microseconds / len(row.sites)
        return dict(found)

    @functools.cached_property
    def providers(self) -> dict[str, str]:
        """What ran each site that ran: the provider of its slowest node."""
        slowest = sorted(self.rows, key=lambda row: row.microseconds)
        return {site: row.provider for row in slowest for site in row.sites}

    @functools.cached_property
    def ran_many(self) -> frozenset[str]:
        """The sites whose second weight ran, for many rows."""
        return frozenset(site for row in self if row.many for site in row.sites)

    @property
    def against_times(self) -> Mapping[str, float]:
        """Microseconds of sites in the model that was run beside; empty where none was."""
        return self.run.against_times if self.run is not None else {}

    def share(self, site: str) -> float | None:
        """The part of all time that a site took; None where it did not run."""
        return self.times[site] / self.total if site in self.times and self.total else None

    def parts(self, site: str) -> list[Part]:
        """What a site's time is made of, by operator, the slowest first."""
        times: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        for row in self._of_site.get(site, ()):
            times[row.op] += row.microseconds / len(row.sites)
            counts[row.op] += row.calls
        return sorted(
            (Part(op, counts[op], time) for op, time in times.items()),
            key=lambda part: -part.microseconds,
        )

    @functools.cached_property
    def _of_site(self) -> dict[str, list[ProfileRow]]:
        found: defaultdict[str, list[ProfileRow]] = defaultdict(list)
        for row in self:
            for site in row.sites:
                found[site].append(row)
        return found
