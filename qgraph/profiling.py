"""The profile of a real run, beside what a graph says of itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qgraph.explanation import Explanation, LevelProof, SiteRow
from qgraph.formats.base import Array
from qgraph.graph import Graph
from qgraph.run_profile import Profile, ProfileRow, RunOf
from qgraph.site_nodes import SiteNodes

if TYPE_CHECKING:
    from qgraph.runtimes.base import Feeds, Runtime

PROFILE_RUNS = 10


def measured(
    explanation: Explanation,
    graph: Graph,
    runtime: Runtime,
    rows: int | None = None,
    against: Graph | None = None,
) -> Explanation:
    """`explanation` of `graph` with the profile of a real run, and the proof of int8 compute.

    rows: of its inputs, see `axis_of`; None for those of `Runtime.synthesize`.
    against: another graph, whose sites are timed too: on the same inputs where it takes them. Its
        cache may be of another type, or it has none.
    """
    asked = rows
    feeds, rows = runtime.rows_of(graph.origin, asked)
    shapes = {name: tuple(array.shape) for name, array in feeds.items()}
    run = RunOf(shapes, rows, PROFILE_RUNS)
    if against is not None:
        own, _ = runtime.rows_of(against.origin, asked)
        shared = {name: _same(feeds.get(name), array) for name, array in own.items()}
        other = Profile(_profiled(against, runtime, shared))
        beside = times_beside(explanation.sites, other.times)
        run = dataclasses.replace(
            run, against=against.title, against_us=other.total, against_times=beside
        )
    kernels = Counter(
        (row.bits, row.block)
        for row in explanation.sites
        if row.level == 4 and row.bits is not None and row.block is not None
    )
    proofs = [
        LevelProof(bits, block, runtime.level_difference(bits, block), count)
        for (bits, block), count in sorted(kernels.items())
    ]
    profile = Profile(_profiled(graph, runtime, feeds), run)
    return dataclasses.replace(explanation, source="run", profile=profile, proofs=tuple(proofs))


def times_beside(sites: Iterable[SiteRow], times: Mapping[str, float]) -> dict[str, float]:
    """The times of another model by the names of `sites`: one that holds others has their sum."""
    held = {
        row.name: sum(times[name] for name in row.holds)
        for row in sites
        if row.holds and all(name in times for name in row.holds)
    }
    return {**times, **held}


def _same(given: Array | None, own: Array) -> Array:
    """What the other graph is given, where this one takes it."""
    taken = given is not None and (given.dtype, given.shape) == (own.dtype, own.shape)
    return given if given is not None and taken else own


def _profiled(graph: Graph, runtime: Runtime, feeds: Feeds) -> tuple[ProfileRow, ...]:
    """Every node that ran, with the sites that it stands for."""
    owners = SiteNodes(graph.model, graph.sites())
    rows = []
    for item in runtime.profile(graph.origin, feeds, runs=PROFILE_RUNS):
        op = f"{item.domain}::{item.op}" if item.domain else item.op
        owner = owners.of(item.node)
        rows.append(
            ProfileRow(
                item.node, op, item.provider, item.microseconds, item.calls, owner.sites, owner.many
            )
        )
    return tuple(rows)
