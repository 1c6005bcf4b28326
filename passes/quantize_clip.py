"""Clip: group ranges by output error."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qgraph.formats.base import QuantizedWeight
from qgraph.passes.solver import Problem, Ranges


@dataclasses.dataclass(frozen=True)
class Clip(Ranges):
    """Ranges narrower than min to max, where the error of the outputs says so."""

    name: ClassVar[str] = "clip"
    needs_data: ClassVar[bool] = True

    def widths(self) -> int:
        """See `Ranges.widths`."""
        from qgraph.passes import clip

        return len(clip.SHRINK)

    def search(self, problem: Problem) -> QuantizedWeight:
        """Each group's range of least output error on the calibration inputs."""
        from qgraph.passes import clip

        assert problem.moments is not None
        return clip.fit(problem.weights, problem.moments.hessian, problem.fmt, problem.dtype)
