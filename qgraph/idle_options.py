"""Options of `optimize` that were given and that nothing in the run read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgraph.pass_options import solver_of
from qgraph.plan import UNSOLVED, QuantPlan
from qgraph.report import Step
from qgraph.run_request import BLOCKS, Request
from qgraph.solver_names import parts_of
from qgraph.traits import traits_of

_CHOOSES = "auto"
"""The solver that tries others."""


def idle_notes(request: Request, plan: QuantPlan, steps: Sequence[Step]) -> list[str]:
    """A note on the options without effect; none is refused, since models share recipes.

    plan: as asked for, with the kernels that run. steps: of the whole run.
    """
    idle = [f"{option} ({why})" for option, why in _idle(request, plan, steps)]
    return [f"without effect here: {'; '.join(idle)}"] if idle else []


def _idle(request: Request, plan: QuantPlan, steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    recipe, usual = request.recipe, type(request.recipe)()
    quantized = [item for item in plan.everywhere if item.quantized]
    asked = {str(item.solver) for item in quantized if item.solver not in UNSOLVED}
    solvers = {part for spec in asked for part in parts_of(spec)}
    passes = {step.pass_name for step in steps} | ({"solve"} if solvers else set())
    kernels = [str(item.kernel) for item in quantized]
    for key in recipe.options:
        name = key.partition(".")[0]
        solver = solver_of(name)
        if solver is not None and not solvers & {solver, _CHOOSES}:
            yield f"--option {key}", f"no weight is solved by {solver}"
        elif solver is None and name not in passes:
            yield f"--option {key}", f"{name} had nothing to do"
    if recipe.calibration != usual.calibration and not (solvers and request.data is not None):
        yield f"--calibration {recipe.calibration}", "no solver works on calibration data"
    if recipe.embedding != usual.embedding and all(
        item.role != "embedding" for item in plan.decisions
    ):
        yield f"--embedding {recipe.embedding}", "the model has no embedding"
    if (
        recipe.accuracy_level != usual.accuracy_level
        and not traits_of(plan.target).spells_qdq
        and not any("level=" in kernel for kernel in kernels)
    ):
        yield f"--accuracy-level {recipe.accuracy_level}", "no kernel here has levels"
    if request.data is None:
        if request.blocks != BLOCKS and not request.dry_run:
            yield "--samples, --sequence", "they cut calibration data, and there is none"
    elif not (
        passes & {"solve", "quantize_cache"}
        or any("level=4" in kernel for kernel in kernels)  # which it checks
        or recipe.judged
        or any(item.activations for item in quantized)
    ):
        yield "--calibrate", "nothing that was asked for looks at data"
