"""What a solver found, kept on disk weight by weight, under keys that say what it follows from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qgraph._version import __version__
from qgraph.errors import InputError
from qgraph.formats.base import PARTS, Array, Part, parse
from qgraph.graph import Graph
from qgraph.passes.rounded import RoundedSource, rounded
from qgraph.passes.solve_weights import Options, Solution
from qgraph.passes.solved import SolvedSource, Transform
from qgraph.plan import UNSOLVED, Decision, QuantPlan
from qgraph.sites import Site
from qgraph.stages import cut
from qgraph.wording import counted
from qgraph.work_folder import (
    HASHED,
    WEIGHT,
    Result,
    WorkFolder,
    array_digest,
    digest,
    model_digest,
)

if TYPE_CHECKING:
    from qgraph.calibration import Calibration

_TRANSFORM = ("columns", "order", "rows")


def open_folder(
    output: Path | None,
    plan: QuantPlan,
    options: Options,
    target: str,
    calibrated: bool,
    *,
    resume: bool,
    force: bool,
) -> WorkFolder | None:
    """Where the results of a run are kept; None where nothing is written.

    calibrated: whether there is calibration data; without it no results are kept.

    Raises:
        InputError: what lies there is in the way, or belongs to another run; or there is nothing
            that could be kept and `resume` is asked for.
    """
    kept = any(item.quantized and item.solver not in UNSOLVED for item in plan.decisions)
    if resume and (output is None or not (calibrated and kept)):
        raise InputError(
            "--resume: results are kept of solvers on calibration data, for a model that is "
            "written, and this run has none: leave --resume out"
        )
    if output is None:
        return None
    work = WorkFolder(output, resume=resume, force=force)
    if resume:
        work.compare(asked_of(options, plan, target))
    return work


def identity_of(
    options: Options, graph: Graph, plan: QuantPlan, data: Calibration, target: str
) -> dict[str, str]:
    """Everything that the results of a run follow from, by names that users know."""
    return {
        "model": HASHED + model_digest(graph.model),
        "calibration data": HASHED + _data_digest(data),
        **asked_of(options, plan, target),
    }


def asked_of(options: Options, plan: QuantPlan, target: str) -> dict[str, str]:
    """The part of a run's identity that is known without reading weights or data."""
    recipe = plan.recipe
    return {
        "qgraph version": __version__,
        "target": target,
        "calibration": recipe.calibration,
        **{f"option solve.{name}": str(value) for name, value in vars(options).items()},
        **{f"option {name}": str(value) for name, value in sorted(recipe.options.items())},
        **{
            f"{WEIGHT}{item.site}": _spelled(item) if item.quantized else "float"
            for item in plan.decisions
        },
    }


def _spelled(decision: Decision) -> str:
    inputs = f" on {decision.activations}" if decision.activations else ""
    inputs += f" but {counted(decision.outliers, 'column')}" if decision.outliers else ""
    return f"{decision.format} by {decision.solver}{inputs}"


def _data_digest(data: Calibration) -> str:
    parts: list[str] = []
    for batch, mask in zip(data.batches, data.masks, strict=True):
        names = sorted(batch)
        parts += [*names, array_digest(batch[name] for name in names)]
        parts.append("" if mask is None else array_digest([mask]))
    return digest(*parts)


def keys_of(
    identity: Mapping[str, str], graph: Graph, plan: QuantPlan, seen: Sequence[Site]
) -> dict[str, str]:
    """A key per site: a hash over everything that its result follows from.

    That is the run's identity without the decisions of solved sites; and the decisions of the
    site's own stage, whose sites may share factors, and of all stages before.
    """
    solved = {f"{WEIGHT}{item.site}" for item in plan.decisions if item.solver != "rtn"}
    shared = {name: value for name, value in identity.items() if name not in solved}
    chain = digest(json.dumps(shared, sort_keys=True))
    keys: dict[str, str] = {}
    for stage in cut(graph.model, seen):
        chain = digest(
            chain, *(f"{site.name}: {identity[WEIGHT + site.name]}" for site in stage.sites)
        )
        keys |= {site.name: digest(chain, site.name) for site in stage.sites}
    return keys


class Kept:
    """A work folder's results as solutions."""

    def __init__(self, folder: WorkFolder, keys: Mapping[str, str]) -> None:
        self._folder, self._keys = folder, keys

    def load(self, site: Site, decision: Decision) -> Solution | None:
        """The solution that was kept for a site, if it still holds."""
        if site.name not in self._keys:
            return None
        found = self._folder.load(site.name, self._keys[site.name])
        if found is None:
            return None
        assert site.weight is not None and site.dtype is not None
        solver, detail = str(found.notes["solver"]), str(found.notes["detail"])
        reason = found.notes["reason"]
        error = found.notes.get("output_error")
        if found.notes["rounded"]:
            nearest = rounded(site, decision)
            nearest.output_error = error
            return Solution(nearest, solver, detail, reason)
        fmt = parse(decision.format or "")
        specs = fmt.parts(site.n, site.k, site.dtype, fmt.default_layout)
        parts: dict[Part, Array] = {
            part: np.ascontiguousarray(found.arrays[part])
            .view(spec.dtype.numpy() if spec.dtype.bitwidth >= 8 else np.uint8)
            .reshape(spec.shape if spec.dtype.bitwidth >= 8 else -1)
            for part, spec in specs.items()
        }
        fields = {name: found.arrays[name] for name in _TRANSFORM if name in found.arrays}
        source = SolvedSource(site.weight, fmt, site.dtype, parts, Transform(**fields), error)
        return Solution(source, solver, detail, reason)

    def keep(self, site: Site, solution: Solution) -> None:
        """Write a solution; a rounded one is computed again from the weight."""
        source = solution.source
        notes = {
            "site": site.name,
            "solver": solution.solver,
            "detail": solution.detail,
            "reason": solution.reason,
            "rounded": isinstance(source, RoundedSource),
            "output_error": source.output_error,
        }
        arrays: dict[str, Array] = {}
        if isinstance(source, SolvedSource):
            for part in PARTS:
                if part in source.packed:
                    data = np.ascontiguousarray(source.packed[part])
                    arrays[part] = data.reshape(-1).view(np.uint8)
            transform = dataclasses.asdict(source.transform)
            arrays |= {name: array for name, array in transform.items() if array is not None}
        self._folder.keep(site.name, self._keys[site.name], Result(arrays, notes))
