"""Samples of several sources in one: shares by weight, and an order that spreads them evenly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

from qgraph.sources import Source, some
from qgraph.text import Sample
from qgraph.wording import counted, plural

Reader: TypeAlias = Callable[[Source], Iterator[Sample] | None]
"""Opens a source; None stands for one that has as many samples as are wanted."""


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """What was taken from each source.

    samples: of each source; none where the source was not opened, or is still to be asked.
    counts: how many are wanted of each: as many as there are in `samples`, but for the sources
        that have as many as are wanted.
    notes: which sources gave less than their share.
    """

    samples: tuple[list[Sample], ...]
    counts: tuple[int, ...]
    notes: tuple[str, ...]


def draw(sources: Sequence[Source], total: int, read: Reader) -> Drawn:
    """Take `total` samples, each source's share; no source is read further than it has to be."""
    weights = [source.weight for source in sources]
    limits: list[int | None] = [None] * len(sources)
    first = counts = shares(total, weights, limits)
    streams: dict[int, Iterator[Sample] | None] = {}
    taken: list[list[Sample]] = [[] for _ in sources]
    while True:
        for at, count in enumerate(counts):
            if count and at not in streams:
                streams[at] = read(sources[at])
            stream = streams.get(at)
            if stream is None or limits[at] is not None:
                continue
            taken[at] += itertools.islice(stream, max(0, count - len(taken[at])))
            if len(taken[at]) < count:
                limits[at] = len(taken[at])
        again = shares(total, weights, limits)
        if again == counts:
            break
        counts = again
    notes = _notes(sources, total, first, counts)
    cut = tuple(samples[:count] for samples, count in zip(taken, counts, strict=True))
    return Drawn(cut, tuple(counts), notes)


def _notes(
    sources: Sequence[Source], total: int, first: Sequence[int], counts: Sequence[int]
) -> tuple[str, ...]:
    notes = []
    short = [at for at, count in enumerate(counts) if count < first[at]]
    if short and len(sources) > 1:
        words = [f"{sources[at].name} {counts[at]} of {first[at]}" for at in short]
        rest = "the other sources give the rest"
        if sum(counts) < total:
            there = plural(sum(counts), "there is", "there are")
            rest = f"{there} {counted(sum(counts), 'sample')} in all, not {total}"
        notes.append(f"calibration sources with less than their share: {some(words)}; {rest}")
    elif short and sources[0].kind != "feeds":
        notes.append(
            f"{sources[0].name} gives {counted(counts[0], 'calibration sample')}, not {total}"
        )
    left_out = [sources[at].name for at, count in enumerate(counts) if not count and not first[at]]
    if left_out:
        notes.append(
            f"calibration sources with a share below one of {counted(total, 'sample')}: "
            f"{some(left_out)}; more --samples, or a larger weight, lets them in"
        )
    return tuple(notes)


def shares(total: int, weights: Sequence[float], limits: Sequence[int | None]) -> list[int]:
    """`total` samples divided by weight: largest remainders, of equal ones the first.

    What a source cannot give (`limits`; None: it has enough) goes to the others by their
    weights; where all are limited, the sum is less than `total`.
    """
    exact = [Fraction(weight) for weight in weights]
    found: dict[int, int] = {}
    while len(found) < len(exact):
        live = [at for at in range(len(exact)) if at not in found]
        left, whole = total - sum(found.values()), sum(exact[at] for at in live)
        quotas = {at: left * exact[at] / whole for at in live}
        short = {
            at: limit for at in live if (limit := limits[at]) is not None and limit < quotas[at]
        }
        found |= short or _rounded(quotas, left)
    return [found[at] for at in range(len(exact))]


def _rounded(quotas: dict[int, Fraction], total: int) -> dict[int, int]:
    found = {at: int(quota) for at, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda at: (found[at] - quotas[at], at))
    for at in by_remainder[: total - sum(found.values())]:
        found[at] += 1
    return found


def interleaved(counts: Sequence[int]) -> list[int]:
    """Which source each sample comes from, every source spread evenly over the whole."""
    places = [
        (Fraction(2 * at + 1, 2 * count), source)
        for source, count in enumerate(counts)
        for at in range(count)
    ]
    return [source for _, source in sorted(places)]
