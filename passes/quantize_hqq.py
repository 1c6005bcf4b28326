"""HQQ: group ranges without calibration data."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qgraph.formats.base import QuantizedWeight
from qgraph.passes.solver import Problem, Ranges


@dataclasses.dataclass(frozen=True)
class Hqq(Ranges):
    """Half-quadratic quantization (Badri and Shaji, 2023): ranges by a robust weight error."""

    name: ClassVar[str] = "hqq"
    needs_data: ClassVar[bool] = False

    def widths(self) -> int:
        """See `Ranges.widths`."""
        from qgraph.passes import hqq

        return len(hqq.SHRINK)

    def search(self, problem: Problem) -> QuantizedWeight:
        """Each group's range from the weights alone."""
        from qgraph.passes import hqq

        return hqq.fit(problem.weights, problem.fmt, problem.dtype, problem.importance)
