"""Composed solvers, such as `awq+clip+gptq`: the steps that their parts do."""

from __future__ import annotations

import dataclasses
from typing import Any

from qgraph import registry
from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.solver import Codes, Problem, Ranges, Scaling, Solver
from qgraph.recipe import Recipe
from qgraph.solver_names import parts_of


@dataclasses.dataclass(frozen=True)
class Solvers:
    """The steps of one composed solver; None where a step is that of rounding to nearest."""

    scaling: Scaling | None
    ranges: Ranges | None
    codes: Codes | None

    def solve(self, problem: Problem) -> tuple[QuantizedWeight, str]:
        """Ranges, then codes; rounding where no codes are found, with a word on it."""
        ranges, words = None, []
        if self.ranges is not None:
            ranges, words = self.ranges.fit(problem), [self.ranges.left_out(problem.fmt)]
        found = None
        if self.codes is not None:
            found = self.codes.solve(problem, ranges)
            gave_up = f"{self.codes.name} gave up: the Hessian does not factor at any damping"
            words.append(gave_up if found is None else found[1])
        weight = found[0] if found is not None else ranges or problem.nearest()
        return problem.fmt.settled(weight), ", ".join(word for word in words if word)

    def chooses_ranges(self, fmt: Format) -> bool:
        """Whether one of the steps does, and the format lets it."""
        return self.ranges is not None and fmt.has_ranges


def candidates(spec: str, *, with_data: bool) -> tuple[str, ...]:
    """What is tried for a solver: itself, or what a choosing one (`auto`) chooses from."""
    solver = registry.load("solver", parts_of(spec)[0])
    if solver.role != "choice":
        return (spec,)
    found: tuple[str, ...] = solver().candidates(with_data)
    return found


def make(spec: str, recipe: Recipe) -> Solvers:
    """The steps of a composed solver with the recipe's options."""
    found: dict[str, Any] = {"scaling": None, "ranges": None, "codes": None}
    for name in parts_of(spec):
        kind: type[Solver] = registry.load("solver", name)
        solver = recipe.configured(f"quantize_{name}", kind)
        found[solver.role] = solver
    return Solvers(**found)
