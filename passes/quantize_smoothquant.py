"""SmoothQuant: channel factors for linears whose inputs are rounded as well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from qgraph.passes.solver import Problem, Ranges, Scaling

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Smoothquant(Scaling):
    """SmoothQuant (Xiao et al., 2023): outlier channels are moved from activations to weights.

    The factors are max|x|^alpha / max|w|^(1 - alpha), with the alpha of least output error over
    all linears that read the activation, weights and activations both rounded as the plan says;
    their inverses fold into the norm or the linear in front, or into a Mul.
    """

    name: ClassVar[str] = "smoothquant"
    needs_data: ClassVar[bool] = True
    needs_activations: ClassVar[bool] = True

    def evaluated(self, rows: int) -> int:
        """A sample for each exponent; where that is not all, all rows for the best and for none."""
        from qgraph.passes import awq, smoothquant

        sampled = (smoothquant.STEPS + 2) * min(rows, awq.ROWS)
        return sampled + 2 * rows * (rows > awq.ROWS)

    def scale(
        self, problems: Sequence[Problem], ranges: Ranges | None, ties: Tensor
    ) -> tuple[Tensor, str]:
        """See `Scaling.scale`; no factors are among those tried."""
        import torch

        from qgraph.passes import smoothquant

        moments = problems[0].moments
        assert moments is not None
        if all(problem.rounding() is None for problem in problems):
            word = "no channel factors: the activations stay floats"
            return torch.ones_like(moments.absmax), word

        def quantize(index: int, rows: Tensor) -> Tensor:
            return problems[index].rounded(rows, ranges)

        def rounding(index: int, scale: Tensor) -> Tensor | None:
            return problems[index].rounding(scale)

        weights = [problem.weights for problem in problems]
        stage = smoothquant.Stage(weights, moments.hessian, quantize, rounding)
        scale, figures = smoothquant.search(stage, moments.absmax, ties)
        if math.isnan(figures["alpha"]):
            word = "smoothquant: no channel factors do better than none"
        else:
            ratio = figures["loss"] / figures["unscaled"]
            word = f"smoothquant: alpha {figures['alpha']:.2f}, error {ratio:.2f} of without"
        if figures["overflowed"]:
            dtype = problems[0].dtype.name
            word += f" (scales do not fit {dtype} at {figures['overflowed']:g} of those tried)"
        return scale, word
