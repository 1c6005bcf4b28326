"""Ranges of activations from values that stream by: extremes, percentiles, least divergence.

Memory is fixed, whatever the data is. A range depends on the values alone, not on their order or
on how they are cut into batches: the bins of a histogram have powers of two for widths, so that
wider ones hold whole narrower ones. Two observers of one kind merge into what one of them would
have become.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.registry import did_you_mean
from qgraph.wording import counted

Array = NDArray[Any]
Range = tuple[NDArray[np.float64], NDArray[np.float64]]

BLOCK = 1 << 18
"""Values that are looked at together, in float64."""
_LEAST_EXPONENT = -1074
"""Of the limit of a histogram that has seen nothing but zeros."""


@dataclasses.dataclass(eq=False)
class Observer(ABC):
    """Watches one activation.

    name: of the activation, for error messages.
    axis: the axis of the channels that have ranges of their own; None for one range of all.
    """

    name: str = "the activation"
    axis: int | None = None
    values: int = dataclasses.field(default=0, init=False)
    """Values seen so far, in each channel."""
    low: NDArray[np.float64] = dataclasses.field(init=False, repr=False)
    high: NDArray[np.float64] = dataclasses.field(init=False, repr=False)
    """The extremes so far, `[C]`, with C = 1 for one range of all."""

    def update(self, array: Array) -> None:
        """Look at more values: floats of any shape, the channels on `axis` where there is one.

        Raises:
            InputError: NaN or infinity among them, or another number of channels than before.
        """
        rows = self._rows(np.asarray(array))
        if not rows.size:
            return
        channels = rows.shape[1]
        if self.values and channels != len(self.low):
            raise InputError(
                f"{self.name} has {channels} channels, {len(self.low)} before: wanted one layout"
            )
        step = max(1, BLOCK // channels)
        for start in range(0, len(rows), step):
            block = rows[start : start + step].astype(np.float64)
            low, high = block.min(axis=0), block.max(axis=0)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                self._refuse(block, start)
            if self.values:
                low, high = np.minimum(self.low, low), np.maximum(self.high, high)
            self.low, self.high = low, high
            self.values += len(block)
            self._count(block)

    def merge(self, other: Self) -> None:
        """Become what this observer would be had it seen the other's values too.

        Raises:
            InputError: the other one is of another kind, or has other options or channels.
        """
        if type(other) is not type(self) or other._options != self._options:
            raise InputError(f"{other!r} does not merge into {self!r}: wanted one of its kind")
        if not other.values:
            return
        if self.values and len(other.low) != len(self.low):
            raise InputError(
                f"an observer of {len(other.low)} channels does not merge into one of "
                f"{len(self.low)} ({self.name}): wanted as many"
            )
        first = not self.values
        self.low = other.low.copy() if first else np.minimum(self.low, other.low)
        self.high = other.high.copy() if first else np.maximum(self.high, other.high)
        self.values += other.values
        self._join(other)

    def range(self) -> Range:
        """The least and the largest value that are to be held: float64 `[]`, or `[C]` by channel.

        Raises:
            InputError: nothing was seen.
        """
        if not self.values:
            raise InputError(f"{self.name}: no values were seen; wanted calibration data")
        low, high = self._clip()
        return (low, high) if self.axis is not None else (low[0], high[0])

    @abstractmethod
    def _count(self, block: NDArray[np.float64]) -> None:
        """Take up values `[rows, C]`; `low` and `high` hold for them already."""

    @abstractmethod
    def _join(self, other: Self) -> None:
        """Take up what another observer counted; `low` and `high` hold for it already."""

    @abstractmethod
    def _clip(self) -> Range:
        """The range of each channel, `[C]`."""

    @property
    def _options(self) -> dict[str, Any]:
        own = {field.name for field in dataclasses.fields(self) if field.init} - {"name"}
        return {name: getattr(self, name) for name in own}

    def _rows(self, array: Array) -> Array:
        """`[rows, C]`, a view where possible."""
        if self.axis is None:
            return array.reshape(-1, 1)
        moved = np.moveaxis(array, self.axis, -1)
        return moved.reshape(-1, moved.shape[-1])

    def _refuse(self, block: NDArray[np.float64], start: int) -> None:
        bad = np.argwhere(~np.isfinite(block))
        row, channel = (int(i) for i in bad[0])
        where = f"value {start + row}"
        where += f" of channel {channel}" if self.axis is not None else ""
        found = "NaN" if np.isnan(block[row, channel]) else "infinity"
        raise InputError(
            f"{self.name} holds {found} ({where}, {counted(len(bad), 'such value')} near it): it "
            "has no range; check the calibration data and the model"
        )


@dataclasses.dataclass(eq=False)
class MinMax(Observer):
    """The extremes: nothing is clipped."""

    def _count(self, block: NDArray[np.float64]) -> None:
        """The extremes are all there is."""

    def _join(self, other: Self) -> None:
        """Likewise."""

    def _clip(self) -> Range:
        return self.low.copy(), self.high.copy()


@dataclasses.dataclass(eq=False)
class Histogram(Observer):
    """Counts by value: bins of one width from -limit to limit, which grows by doubling.

    The limit of a channel is the least power of two above its largest magnitude, so that a bin is
    at most 1/`bins` of that magnitude wide, twice over.

    bins: on each side of 0, a power of two; 0 for 4096, or 512 where channels have their own.
    """

    bins: int = 0
    counts: NDArray[np.int64] = dataclasses.field(init=False, repr=False)
    """`[C, 2·bins]`."""
    exponents: NDArray[np.int64] = dataclasses.field(init=False, repr=False)
    """Of the limits, `[C]`."""

    def __post_init__(self) -> None:
        self.bins = self.bins or (4096 if self.axis is None else 512)
        if self.bins & (self.bins - 1):
            raise InputError(f"a histogram of {self.bins} bins a side: wanted a power of two")

    @property
    def width(self) -> NDArray[np.float64]:
        """Of the bins of each channel, `[C]`."""
        found: NDArray[np.float64] = np.ldexp(1.0 / self.bins, self.exponents)
        return found

    def _count(self, block: NDArray[np.float64]) -> None:
        self._grow()
        channels = block.shape[1]
        at = np.floor(np.ldexp(block, -self.exponents) * self.bins).astype(np.int64) + self.bins
        at += np.arange(channels) * 2 * self.bins
        size = channels * 2 * self.bins
        self.counts += np.bincount(at.reshape(-1), minlength=size).reshape(channels, -1)

    def _join(self, other: Self) -> None:
        self._grow()
        spread = dataclasses.replace(other)
        spread.low, spread.high, spread.values = self.low, self.high, other.values
        spread.counts, spread.exponents = other.counts.copy(), other.exponents.copy()
        spread._grow()
        self.counts += spread.counts

    def _grow(self) -> None:
        """Let the limits hold the extremes; counts go to the wider bins that hold theirs."""
        if not hasattr(self, "counts"):
            self.counts = np.zeros((len(self.low), 2 * self.bins), np.int64)
            self.exponents = np.full(len(self.low), _LEAST_EXPONENT)
        largest = np.maximum(np.abs(self.low), np.abs(self.high))
        wanted = np.where(largest > 0, np.frexp(largest)[1], _LEAST_EXPONENT)
        side = np.arange(-self.bins, self.bins)
        for channel in np.flatnonzero(wanted > self.exponents):
            shift = min(63, int(wanted[channel] - self.exponents[channel]))
            before = self.counts[channel].copy()
            self.counts[channel] = 0
            np.add.at(self.counts[channel], (side >> shift) + self.bins, before)
        self.exponents = np.maximum(wanted, self.exponents)


@dataclasses.dataclass(eq=False)
class Percentile(Histogram):
    """The middle `percent` of the values: half of the others lie below it, half above.

    Each end is within one bin of the exact quantile (of the inverted distribution function).
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 50 < self.percent <= 100:
            raise InputError(f"percentile {self.percent:g}: wanted above 50, at most 100")

    def _clip(self) -> Range:
        tail = (1 - self.percent / 100) / 2
        low, high = self._quantile(tail), self._quantile(1 - tail)
        return np.clip(low, self.low, self.high), np.clip(high, self.low, self.high)

    def _quantile(self, share: float) -> NDArray[np.float64]:
        below = np.cumsum(self.counts, axis=1)
        target = share * self.values
        at = np.argmax(below >= target, axis=1)
        channel = np.arange(len(below))
        count = self.counts[channel, at]
        inside = np.clip((target - below[channel, at] + count) / np.maximum(count, 1), 0, 1)
        found: NDArray[np.float64] = (at - self.bins + inside) * self.width
        return found


@dataclasses.dataclass(eq=False)
class Entropy(Histogram):
    """The clip at which rounding changes the distribution of magnitudes least.

    Of each candidate the values within it, those above counted at its end, are compared with what
    is left of them when each is known by its level only: Kullback-Leibler divergence (Migacz,
    "8-bit Inference with TensorRT", 2017). The range is that clip on both sides, within the
    extremes.

    levels: the magnitudes that values round to, in units of the clip, from 0 to 1, rising; None
        for those of int8, 0/127 to 127/127.
    """

    levels: tuple[float, ...] | None = None

    def _clip(self) -> Range:
        width = self.width
        clips = [self._kept(counts) * step for counts, step in zip(self.counts, width, strict=True)]
        clip = np.array(clips)
        return np.clip(-clip, self.low, self.high), np.clip(clip, self.low, self.high)

    def _kept(self, counts: NDArray[np.int64]) -> int:
        """How many bins from 0 lie within the best clip."""
        magnitudes = counts[self.bins :] + counts[: self.bins][::-1]
        end = int(np.flatnonzero(magnitudes)[-1]) + 1
        start = min(end, len(_edges(self.levels)) + 1)
        step = max(1, end // CANDIDATES)
        tried = range(end, start - 1, -step)
        losses = [_divergence(magnitudes, stop, _edges(self.levels)) for stop in tried]
        return tried[int(np.argmin(losses))]


CANDIDATES = 256
"""How many clips are compared."""


@functools.cache
def _edges(levels: tuple[float, ...] | None) -> NDArray[np.float64]:
    """What lies halfway between levels."""
    values = np.arange(128) / 127 if levels is None else np.array(levels)
    found: NDArray[np.float64] = (values[1:] + values[:-1]) / 2
    return found


def _divergence(magnitudes: NDArray[np.int64], stop: int, edges: NDArray[np.float64]) -> float:
    """KL of the magnitudes clipped to `stop` bins from what their levels tell of them."""
    inside = magnitudes[:stop].astype(np.float64)
    level = np.searchsorted(edges, (np.arange(stop) + 0.5) / stop)
    size = len(edges) + 1
    mass = np.bincount(level, inside, size)
    filled = np.bincount(level, inside > 0, size)
    known = np.where(inside > 0, mass[level] / np.maximum(filled[level], 1), 0)
    clipped = inside
    clipped[-1] += magnitudes[stop:].sum()
    live = clipped > 0
    # Where nothing but clipped values lies, the levels tell of none: they count as one.
    told = np.maximum(known[live], 1)
    p, q = clipped[live] / clipped.sum(), told / told.sum()
    return float((p * np.log(p / q)).sum())


KINDS: dict[str, type[Observer]] = {
    "minmax": MinMax,
    "percentile": Percentile,
    "entropy": Entropy,
}
"""The names of observers, as options spell them."""


def observer(kind: str, name: str, levels: tuple[float, ...] | None = None) -> Observer:
    """A new observer of one range for the activation `name`.

    levels: what values round to, for those that ask: see `Entropy`.

    Raises:
        InputError: no such kind.
    """
    if kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        raise InputError(f"no observer named {kind!r}{near} (known: {', '.join(KINDS)})")
    return Entropy(name, levels=levels) if KINDS[kind] is Entropy else KINDS[kind](name)
