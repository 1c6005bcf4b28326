"""The error of each site's output, for the sites that two models share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from qgraph.comparison import Comparison, SiteRow
from qgraph.errors import InputError
from qgraph.feeding import shortened
from qgraph.output_error import OutputError
from qgraph.paired import Pair
from qgraph.site_bounds import BoundedSite
from qgraph.site_outputs import SharedSite, in_bodies, noted, read_graph, shared_sites
from qgraph.text import Sample

ROWS_ORDERED = "rows_ordered_for"
"""What the metadata of a site names where its rows lie in the order of that other site."""
SITE_BYTES = 128_000_000
"""The most that the sites of one model give at once; longer blocks are cut for them."""


def with_sites(found: Comparison, pair: Pair, samples: Sequence[Sample]) -> Comparison:
    """`found` with the errors of shared sites; where that cannot be done, with a note."""
    reference, candidate = (read_graph(side.model) for side in pair.sides)
    shared = shared_sites(reference, candidate)
    ordered = noted(candidate, ROWS_ORDERED)
    if kept := [site for site in shared if site.name in ordered]:
        shared = [site for site in shared if site.name not in ordered]
        words = f"{len(kept)} sites give their channels in the act order of the next: not compared"
        found = _noting(found, words)
    if inner := in_bodies(candidate):
        words = f"{inner} sites stand in bodies of If, Loop or Scan: not compared"
        found = _noting(found, words)
    if not shared:
        return _noting(found, "no site has one name in both models: no site was compared")
    bounded = _bounded(shared)
    width = 4 * sum(site.width for site in shared)
    width += 4 * sum({each.activation: each.source.k for each in bounded.values()}.values())
    longest = max(1, SITE_BYTES // max(1, width))
    cut = [shortened(sample, pair.reference.feeder, longest) for sample in samples]
    try:
        with (
            pair.reference.exposing(site.value for site in shared),
            pair.candidate.exposing(_exposed(shared, bounded)),
        ):
            rows, tokens = _site_rows(pair, shared, cut, bounded)
    except InputError as error:
        return _noting(found, f"no site was compared: {error}")
    odd = len(shared) - len(rows)
    if odd:
        found = _noting(found, f"{odd} sites give outputs of another shape: not compared")
    rows, broken = _with_bounds(rows, bounded, noted(candidate, "solver"))
    if broken:
        found = _noting(found, broken)
    return dataclasses.replace(found, sites=rows, site_samples=len(cut), site_tokens=tokens)


def _bounded(shared: Sequence[SharedSite]) -> dict[str, BoundedSite]:
    """The packed linears, by name; their output must be the value that the reference's is."""
    found = {
        site.name: BoundedSite.of(site.reference, site.candidate)
        for site in shared
        if site.value == site.candidate_value
    }
    return {name: each for name, each in found.items() if each is not None}


def _exposed(shared: Sequence[SharedSite], bounded: Mapping[str, BoundedSite]) -> list[str]:
    """What the candidate is to give: the sites' outputs, and the inputs of the packed ones."""
    inputs = (each.activation for each in bounded.values() if not each.reads_input)
    return list(dict.fromkeys([*(site.candidate_value for site in shared), *inputs]))


def _with_bounds(
    rows: Sequence[SiteRow], bounded: Mapping[str, BoundedSite], solvers: Mapping[str, str]
) -> tuple[tuple[SiteRow, ...], str]:
    """The rows with what their sites do to their own inputs, and a note on what no rounding does.

    Where `awq` solved, channels were scaled: W is not the weight of these inputs.
    """
    scaled = any("awq" in solver for solver in solvers.values())
    found, broken = list[SiteRow](), list[SiteRow]()
    for row in rows:
        each = bounded.get(row.name)
        bound = each.compared(same_inputs=not scaled and each.reads_the_same) if each else None
        if bound is not None:
            row = dataclasses.replace(row, **dataclasses.asdict(bound))
            broken += [row] if bound.broken else []
        found.append(row)
    if not broken:
        return tuple(found), ""
    worst = max(broken, key=_excess)
    return tuple(found), (
        f"the kernels of {len(broken)} sites give something else than the product with the stored "
        f"weight: {worst.name} ({worst.candidate_op}) is {_excess(worst):.3g} times its rounding "
        "off. `qgraph optimize` checks kernels and takes the next one, unless --no-check"
    )


def _excess(row: SiteRow) -> float:
    """The kernel's error relative to its bound; NaN counts as infinite."""
    ratio = row.kernel_ratio
    return math.inf if ratio is None or math.isnan(ratio) else ratio


def _noting(found: Comparison, note: str) -> Comparison:
    return dataclasses.replace(found, notes=(*found.notes, note))


def _site_rows(
    pair: Pair,
    shared: Sequence[SharedSite],
    samples: Sequence[Sample],
    bounded: Mapping[str, BoundedSite],
) -> tuple[tuple[SiteRow, ...], int]:
    """The sites of one shape in both, worst first (NaN before all), and on how many tokens."""
    errors = {site: OutputError() for site in shared}
    tokens = 0
    for sample in samples:
        ids, mask = pair.ids_and_mask(sample)
        tokens += 0 if ids is None else ids.size
        first, second = (side.run(sample) for side in pair.sides)
        given = {**pair.candidate.feeder.feeds(sample), **second}
        for site in tuple(errors):
            expected, got = first[site.value], second[site.candidate_value]
            if expected.shape == got.shape:
                errors[site].add(expected, got, mask)
                if site.name in bounded:
                    bounded[site.name].add(given[bounded[site.name].activation], got)
            else:
                del errors[site]
    rows = [
        SiteRow(
            name=site.name,
            weight=site.weight,
            role=site.role,
            op=site.op,
            candidate_op=site.candidate_op,
            format=site.format,
            error=each.error,
        )
        for site, each in errors.items()
    ]
    rows.sort(key=lambda row: -math.inf if math.isnan(row.error) else -row.error)
    return tuple(rows), tokens
