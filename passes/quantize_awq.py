"""AWQ: channel factors from activation magnitudes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from qgraph.passes.solver import Problem, Ranges, Scaling

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Awq(Scaling):
    """AWQ (Lin et al., 2023): channels that carry large activations get larger weights.

    The factors are mean|x|^alpha with the alpha of least output error over all linears that read
    the activation; their inverses fold into the norm or the linear in front, or into a Mul.
    """

    name: ClassVar[str] = "awq"
    needs_data: ClassVar[bool] = True

    def evaluated(self, rows: int) -> int:
        """A sample for each exponent; where that is not all, all rows for the best and for none."""
        from qgraph.passes import awq

        return awq.GRID * min(rows, awq.ROWS) + 2 * rows * (rows > awq.ROWS)

    def scale(
        self, problems: Sequence[Problem], ranges: Ranges | None, ties: Tensor
    ) -> tuple[Tensor, str]:
        """See `Scaling.scale`; alpha = 0, no factors, is among those tried."""
        from qgraph.passes import awq

        moments = problems[0].moments
        assert moments is not None

        def quantize(index: int, rows: Tensor) -> Tensor:
            return problems[index].rounded(rows, ranges)

        weights = [problem.weights for problem in problems]
        scale, figures = awq.search(weights, moments.hessian, moments.magnitude, ties, quantize)
        word = f"awq: alpha {figures['alpha']:.2f}"
        if figures["overflowed"]:
            dtype = problems[0].dtype.name
            word += f" (scales do not fit {dtype} at {figures['overflowed']:g} of those tried)"
        return scale, word
