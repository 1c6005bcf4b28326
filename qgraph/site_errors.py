"""The error of each site's output, for the sites that two models share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from qgraph.comparison import Comparison, SiteRow
from qgraph.errors import InputError
from qgraph.feeding import shortened
from qgraph.output_error import OutputError
from qgraph.paired import Pair
from qgraph.site_outputs import SharedSite, read_graph, shared_sites
from qgraph.text import Sample

SITE_BYTES = 128_000_000
"""The most that the sites of one model give at once; longer blocks are cut for them."""


def with_sites(found: Comparison, pair: Pair, samples: Sequence[Sample]) -> Comparison:
    """`found` with the errors of shared sites; where that cannot be done, with a note."""
    reference, candidate = (read_graph(side.model) for side in pair.sides)
    shared = shared_sites(reference, candidate)
    if not shared:
        return _noting(found, "no site has one name in both models: no site was compared")
    width = 4 * sum(site.width for site in shared)
    longest = max(1, SITE_BYTES // max(1, width))
    cut = [shortened(sample, pair.reference.feeder, longest) for sample in samples]
    try:
        with (
            pair.reference.exposing(site.value for site in shared),
            pair.candidate.exposing(site.candidate_value for site in shared),
        ):
            rows, tokens = _site_rows(pair, shared, cut)
    except InputError as error:
        return _noting(found, f"no site was compared: {error}")
    odd = len(shared) - len(rows)
    if odd:
        found = _noting(found, f"{odd} sites give outputs of another shape: not compared")
    return dataclasses.replace(found, sites=rows, site_samples=len(cut), site_tokens=tokens)


def _noting(found: Comparison, note: str) -> Comparison:
    return dataclasses.replace(found, notes=(*found.notes, note))


def _site_rows(
    pair: Pair, shared: Sequence[SharedSite], samples: Sequence[Sample]
) -> tuple[tuple[SiteRow, ...], int]:
    """The sites of one shape in both, worst first (NaN before all), and on how many tokens."""
    errors = {site: OutputError() for site in shared}
    tokens = 0
    for sample in samples:
        ids, mask = pair.ids_and_mask(sample)
        tokens += 0 if ids is None else ids.size
        first, second = (side.run(sample) for side in pair.sides)
        for site in tuple(errors):
            expected, got = first[site.value], second[site.candidate_value]
            if expected.shape == got.shape:
                errors[site].add(expected, got, mask)
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
