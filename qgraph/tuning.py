"""`--tune` and `--for`: times of kernels on this machine, and the plan that is made by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.alone import time_alone
from qgraph.capabilities import Capabilities
from qgraph.constants import from_bytes
from qgraph.decoder_head import require_head
from qgraph.errors import CoverageError, InputError
from qgraph.graph import Graph
from qgraph.machine import cpu_name, usable_cores
from qgraph.one_op import float_linear
from qgraph.prediction import matmul_rate
from qgraph.progress import Progress
from qgraph.purposes import PurposePlan, candidates_of, plan_for, sizes_of
from qgraph.quant_tensor import QuantTensor
from qgraph.recipe import FLOAT, Override, Recipe
from qgraph.sites import Site
from qgraph.timing import ROUND_SECONDS
from qgraph.tune_table import Candidate, Machine, Measured, Table, load
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

ROUNDS = 5
REMATCHES = 2
CLOSE = 1.25
"""Ways that take up to this many times as long as the fastest of their kind are timed again, in
sessions opened anew: where a weight comes to lie moves its time by as much as two ways differ."""
MOST_ELEMENTS = 32_000_000
"""Of a weight that is measured; of larger ones that many, all rows being alike."""
MEASURES_ANEW = "--tune measures what it lacks, and without the file all"
_NAMES = {"float": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


def plan_by_purpose(
    graph: Graph,
    sites: Sequence[Site],
    recipe: Recipe,
    capabilities: Capabilities,
    runtime: Runtime,
    *,
    tune: bool,
    progress: Progress,
) -> PurposePlan:
    """The plan for the recipe's purpose, by this machine's times where there are any.

    tune: measure what is missing, and keep it.

    Raises:
        InputError: see `make_plan`; or `tune` where the target's runtime is not installed.
    """
    if tune and not runtime.available():
        raise InputError(
            f"--tune measures {runtime.target}, and {runtime.provider} is not installed here: "
            "leave it out, or run it where the model will run"
        )
    table, notes = load(Machine(cpu_name(), usable_cores(), capabilities.runtime))
    if tune:
        fill(table, sites, recipe, capabilities, runtime, progress)
    elif not table.seconds:
        notes.append(
            f"--for {recipe.purpose} goes by rule: nothing was measured here; --tune measures"
        )
    found = plan_for(sites, recipe, capabilities, table, graph.model.graph)
    plan = found.plan
    if recipe.last_logits:  # however long a prompt is, its head sees one row of it
        name = require_head(graph.model).linear.name
        few = dataclasses.replace(recipe, purpose="decode", activations=FLOAT, outliers=0)
        own = plan_for(sites, few, capabilities, table, graph.model.graph).plan
        decisions = tuple(own[d.site] if d.site == name else d for d in plan.decisions)
        plan = dataclasses.replace(plan, decisions=decisions)
    if found.times:
        notes.append(f"the measured times are those in {table.origin}; {MEASURES_ANEW}")
    return PurposePlan(plan, (*notes, *found.notes), found.times)


def fill(
    table: Table,
    sites: Sequence[Site],
    recipe: Recipe,
    capabilities: Capabilities,
    runtime: Runtime,
    progress: Progress,
) -> None:
    """Measure what `table` lacks of the sizes of a model's linears; kept size by size."""
    sizes = sizes_of(sites, recipe, capabilities)
    ways = candidates_of(sites, recipe, capabilities)
    _announce(table, sizes, ways, progress)
    progress.stage("tune", total=len(sizes))
    count = 0
    for done, (n, k, dtype, rows) in enumerate(sizes, 1):
        wanted = {Measured(n, k, dtype, way.name, each): way for way in ways for each in rows}
        missing = table.missing(wanted)
        if missing:
            if not count:
                table.save()  # a folder that cannot be written is told before the long work
            count += len(missing)
            # All ways again, at the rows that lack any: only what ran turn by turn is compared.
            again = sorted({item.rows for item in missing})
            _measure(table, n, k, dtype, ways, again, runtime)
            table.save()
        progress.advance(done)
    words = f"{counted(count, 'time')} measured" if count else "all times were known"
    progress.finish(f"{words}, {counted(len(sizes), 'size')}, kept in {table.machine.file}")


def _announce(
    table: Table,
    sizes: Sequence[tuple[int, int, str, tuple[int, ...]]],
    ways: Sequence[Candidate],
    progress: Progress,
) -> None:
    """Say how much is to be measured, and about how long that takes."""
    lacking = [
        (n, k, each)
        for n, k, dtype, rows in sizes
        for each in rows
        if table.missing(Measured(n, k, dtype, way.name, each) for way in ways)
    ]
    if not lacking:
        return
    progress.stage("to measure")
    rate = matmul_rate()
    # A round takes at least its time, and a way has to be made and opened: about as long.
    once = [max(ROUND_SECONDS, 2 * n * k * rows / rate) for n, k, rows in lacking]
    each_way = sum((ROUNDS + 2) * each + ROUND_SECONDS for each in once)
    sizes_lacking = len({size[:2] for size in lacking})
    seconds = (len(ways) + REMATCHES * len(ways) / 2) * each_way
    words = f"{counted(len(lacking) * len(ways), 'time')} of {counted(sizes_lacking, 'size')}"
    progress.finish(f"{words}, about {seconds:.0f} s")


def _measure(
    table: Table,
    n: int,
    k: int,
    dtype: str,
    ways: Sequence[Candidate],
    rows: Sequence[int],
    runtime: Runtime,
) -> None:
    """Time every way of one size; one that does not run here is noted as such."""
    share = min(n, max(1, MOST_ELEMENTS // k))
    plain = float_linear(share, k, _NAMES[dtype])
    models: dict[str, ir.Model] = {}
    for way in ways:
        model = _model(plain, way, runtime.target)
        if model is not None:
            models[way.name] = model
        else:
            for count in rows:
                table.seconds[Measured(n, k, dtype, way.name, count)] = None
    kinds = {way.name: way.activations for way in ways}
    for count, seconds in _least(runtime, models, rows, kinds).items():
        for name, each in seconds.items():
            table.seconds[Measured(n, k, dtype, name, count)] = each * n / share


def _least(
    runtime: Runtime,
    models: Mapping[str, ir.Model],
    rows: Sequence[int],
    kinds: Mapping[str, str],
) -> dict[int, dict[str, float]]:
    """Seconds of each model by number of rows: the least median of all times it was opened.

    kinds: of each model; of a kind, those that could be the fastest are opened again.
    """
    timed = time_alone(runtime, models, rows, rounds=ROUNDS)
    found = {count: {k: t.median for k, t in timings.items()} for count, timings in timed.items()}
    for count, seconds in found.items():
        for _ in range(REMATCHES):
            best: dict[str, float] = {}
            for name, each in seconds.items():
                best[kinds[name]] = min(each, best.get(kinds[name], each))
            close = {k: m for k, m in models.items() if seconds[k] <= CLOSE * best[kinds[k]]}
            for name, timing in time_alone(runtime, close, [count], rounds=ROUNDS)[count].items():
                seconds[name] = min(seconds[name], timing.median)
    return found


def _model(plain: ir.Model, way: Candidate, target: str) -> ir.Model | None:
    """A linear as a candidate computes it, made by the passes; None where no kernel takes it."""
    if way.format == FLOAT:
        return plain
    from qgraph.optimizing import Run
    from qgraph.progress import Silent

    rounded = way.activations != FLOAT
    overrides = (Override("*", way.format, None, way.activations),) if rounded else ()
    fmt = "auto" if rounded else way.format
    recipe = Recipe(format=fmt, overrides=overrides, min_elements=0, unfused=FLOAT)
    run = Run(recipe, target, Silent(), False, 0.0, False, dry_run=True)
    try:
        found = run.optimize(plain, None, single_file=False, force=False, report=None)
    except CoverageError:
        return None
    model = found.graph.model
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, QuantTensor):
            value.const_value = _computed(value.const_value)
    return model


def _computed(tensor: QuantTensor) -> ir.TensorProtocol:
    """The tensor in memory, so that copies of it are not rounded again."""
    return from_bytes(tensor.tobytes(), tensor.dtype, tensor.shape.numpy(), tensor.name or "")
