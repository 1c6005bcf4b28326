"""The measured times that decided how a size of linear is computed."""

from __future__ import annotations

import dataclasses

from qgraph.wording import counted


@dataclasses.dataclass(frozen=True)
class RowTimes:
    """What was measured at a number of rows; as text the way that is taken and the best other one.

    taken: the way that is taken. seconds: by way, the fastest first.
    """

    rows: int
    taken: str
    seconds: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """`at 1 row uint4:group=64 0.061 ms (taken), float 0.079 ms`."""
        others = [each for each in self.seconds if each[0] != self.taken]
        times = [
            f"{name} {1e3 * seconds:.3g} ms{' (taken)' * (name == self.taken)}"
            for name, seconds in self.seconds
            if name == self.taken or (name, seconds) == others[0]
        ]
        return f"at {counted(self.rows, 'row')} {', '.join(times)}"


@dataclasses.dataclass(frozen=True)
class SizeTimes:
    """The times that decided for linears `[N, K]` of one size and choice.

    linears: how many there are. times: at the rows that count for the purpose.
    """

    n: int
    k: int
    linears: int
    times: tuple[RowTimes, ...]

    def __str__(self) -> str:
        """The note that a run shows."""
        words = "; ".join(map(str, self.times))
        return f"{self.n}×{self.k}, {counted(self.linears, 'linear')}: {words}"
