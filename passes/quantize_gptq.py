"""GPTQ: codes that are least off on the layer's own inputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from qgraph.errors import InputError
from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.moments import Moments
from qgraph.passes.solver import Codes, Problem

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = ("off", "static", "permuted")


@dataclasses.dataclass(frozen=True)
class Gptq(Codes):
    """GPTQ (Frantar et al., 2022) on given ranges, or on ranges of its own.

    act_order: `static` rounds columns by falling activation while groups stay where they are;
        `permuted` also stores the columns in that order, so that groups hold alike columns, and
        gathers the activation to match; `off` goes from left to right and takes each group's
        range when it gets there, from the weights as corrected so far; where scales depend on
        one another, or are no floats, all ranges are found beforehand.
    damping: added to the Hessian's diagonal, relative to its mean.
    sweeps: sweeps of coordinate descent over the codes after GPTQ.
    refit: behind the sweeps: fit the scales to the codes, where they may be any number, and
        refine the codes once more.
    """

    name: ClassVar[str] = "gptq"
    needs_data: ClassVar[bool] = True
    damping: float = 0.01
    act_order: str = "static"
    sweeps: int = 0
    refit: bool = False

    def __post_init__(self) -> None:
        if self.act_order not in ORDERS:
            wanted = ", ".join(ORDERS)
            raise InputError(f"quantize_gptq.act_order {self.act_order!r}: wanted {wanted}")
        if not 0 < self.damping < 10:
            raise InputError(f"quantize_gptq.damping {self.damping:g}: wanted 0.001 to 1")
        if self.sweeps < 0 or (self.refit and not self.sweeps):
            raise InputError(
                f"quantize_gptq.sweeps {self.sweeps}: wanted 0 or more, and at least 1 with refit"
            )

    def permutation(self, moments: Moments) -> Tensor | None:
        """Columns by falling activation, where they are to be stored so."""
        import torch

        if self.act_order != "permuted":
            return None
        return torch.argsort(moments.hessian.diagonal(), descending=True, stable=True)

    def solve(
        self, problem: Problem, ranges: QuantizedWeight | None
    ) -> tuple[QuantizedWeight, str] | None:
        """Codes column by column, the error of each carried to those that follow."""
        from qgraph.passes import gptq

        assert problem.moments is not None
        fmt, hessian = problem.fmt, problem.moments.hessian
        factored = problem.moments.factor(self.act_order != "off", self.damping)
        if factored is None:
            return None
        moving = ranges is None and self.act_order == "off" and fmt.free_scales
        start = ranges or fmt.quantize(problem.plain.cpu().numpy(), problem.dtype)
        grid = gptq.grid_of(start, fmt, hessian.device)
        again = gptq.Rounding(fmt, problem.dtype) if moving else None
        codes, grid = gptq.solve(problem.weights, grid, factored.order, factored.upper, again)
        if self.sweeps:
            codes = gptq.refine(problem.weights, hessian, grid, codes, self.sweeps)
        if self.refit and fmt.free_scales:
            grid = gptq.refit(problem.weights, hessian, grid, codes, problem.dtype)
            codes = gptq.refine(problem.weights, hessian, grid, codes, 1)
        words = [] if factored.damping == self.damping else [f"damping {factored.damping:g}"]
        words += self._left_out(fmt)
        return gptq.to_weight(codes, grid, start, fmt), ", ".join(words)

    def _left_out(self, fmt: Format) -> list[str]:
        """What was asked for that needs scales that may be any number."""
        if fmt.free_scales:
            return []
        why = f"the scales of {fmt.spell()} are not free"
        words = [f"ranges found beforehand: {why}"] * (self.act_order == "off")
        return words + [f"no refit: {why}"] * self.refit
