"""What a solver found, kept on disk weight by weight, under keys that say what it follows from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph._version import __version__
from qgraph.constants import open_bytes
from qgraph.formats.base import PARTS, Array, Part, parse
from qgraph.graph import Graph
from qgraph.passes.rounded import RoundedSource, rounded
from qgraph.passes.solve_weights import Options, Solution
from qgraph.passes.solved import SolvedSource, Transform
from qgraph.plan import Decision, QuantPlan
from qgraph.sites import Site
from qgraph.stages import cut
from qgraph.work_folder import Result, WorkFolder, array_digest, digest, model_digest

if TYPE_CHECKING:
    from qgraph.calibration import Calibration

_TRANSFORM = ("columns", "order", "rows")


def keys_of(
    options: Options, graph: Graph, plan: QuantPlan, seen: Sequence[Site], data: Calibration
) -> dict[str, str]:
    """A key per site: a hash over everything that its result follows from.

    That is the version, the model's nodes and small constants, the calibration data, the
    options, the site's weight and decision, and the keys of all stages before.
    """
    recipe = plan.recipe
    rest = [
        [item.site, item.format, item.solver] for item in plan.decisions if item.solver == "rtn"
    ]
    chain = digest(
        __version__,
        model_digest(graph.model),
        array_digest(array for batch in data.batches for _, array in sorted(batch.items())),
        repr(options),
        json.dumps([recipe.calibration, sorted(recipe.options.items()), rest]),
    )
    keys: dict[str, str] = {}
    for stage in cut(graph.model, seen):
        for site in stage.sites:
            decision = plan[site.name]
            assert site.weight is not None and site.dtype is not None
            words = json.dumps([site.name, decision.format, decision.solver, site.dtype.name])
            keys[site.name] = digest(chain, words, array_digest([open_bytes(site.weight.tensor)]))
        chain = digest(chain, *(keys[site.name] for site in stage.sites))
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
        if found.notes["rounded"]:
            return Solution(rounded(site, decision), solver, detail, reason)
        fmt = parse(decision.format or "")
        specs = fmt.parts(site.n, site.k, site.dtype, fmt.default_layout)
        parts: dict[Part, Array] = {
            part: np.ascontiguousarray(found.arrays[part])
            .view(spec.dtype.numpy() if spec.dtype.bitwidth >= 8 else np.uint8)
            .reshape(spec.shape if spec.dtype.bitwidth >= 8 else -1)
            for part, spec in specs.items()
        }
        fields = {name: found.arrays[name] for name in _TRANSFORM if name in found.arrays}
        source = SolvedSource(site.weight, fmt, site.dtype, parts, Transform(**fields))
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
