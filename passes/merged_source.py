"""Several quantized weights as one: their rows, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgraph.formats.base import QuantizedWeight
from qgraph.quant_tensor import Deviation, QuantSource


class MergedSource(QuantSource):
    """The rows of `sources`, which have one K, one format and one type of scales.

    The number of rows of each but the last is a multiple of its `row_step`, so that blocks of rows
    start where those of a source may start.
    """

    def __init__(self, sources: Sequence[QuantSource], name: str) -> None:
        first = sources[0]
        assert can_merge(sources), "weights of one kind"
        self.sources = tuple(sources)
        self.format, self.k, self.scale_dtype = first.format, first.k, first.scale_dtype
        self.n, self.name = sum(source.n for source in sources), name

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """See `QuantSource.block`."""
        return QuantizedWeight.joined([s.block(a, b) for s, a, b, _ in self._within(start, stop)])

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """See `QuantSource.deviation`."""
        found = [
            source.deviation(a, b, weight.rows(slice(at, at + b - a)))
            for source, a, b, at in self._within(start, stop)
        ]
        return Deviation(
            max(each.worst for each in found),
            sum(each.error_sq for each in found),
            sum(each.norm_sq for each in found),
        )

    def release(self) -> None:
        """See `QuantSource.release`."""
        for source in self.sources:
            source.release()

    def _within(self, start: int, stop: int) -> Iterator[tuple[QuantSource, int, int, int]]:
        """The sources that hold rows `start:stop`: their first and last, and place."""
        first = 0
        for source in self.sources:
            a, b = max(start - first, 0), min(stop - first, source.n)
            if a < b:
                yield source, a, b, first + a - start
            first += source.n


def can_merge(sources: Sequence[QuantSource]) -> bool:
    """Whether the rows of all of them can be those of one weight."""
    first = sources[0]
    alike = all(
        (each.format, each.k, each.scale_dtype) == (first.format, first.k, first.scale_dtype)
        for each in sources
    )
    return alike and all(each.n % each.row_step == 0 for each in sources[:-1])
