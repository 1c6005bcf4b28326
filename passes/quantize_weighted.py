"""Importance-weighted rounding: group ranges by second moments."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qgraph.formats.base import QuantizedWeight
from qgraph.passes.solver import Problem, Ranges


@dataclasses.dataclass(frozen=True)
class Weighted(Ranges):
    """Ranges of least weight error, each input channel weighted by its mean square."""

    name: ClassVar[str] = "weighted"
    needs_data: ClassVar[bool] = True

    def widths(self) -> int:
        """See `Ranges.widths`."""
        from qgraph.passes import weighted

        return len(weighted.SHRINK)

    def search(self, problem: Problem) -> QuantizedWeight:
        """Each group's range; only the diagonal of the moments is looked at."""
        from qgraph.passes import weighted

        assert problem.moments is not None
        curvature = problem.moments.hessian.diagonal()
        return weighted.fit(problem.weights, curvature, problem.fmt, problem.dtype)
