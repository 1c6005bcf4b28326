"""Which quantized parameter a float weight is, and whether it is that, told by its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.formats.base import Array
from qgraph.sites import Site

if TYPE_CHECKING:
    from qgraph.checkpoint_source import CheckpointSource
    from qgraph.checkpoints.base import Entry

ROWS = 8
"""The first rows are compared: there every format's blocks of rows begin."""
CLOSE = 0.8
"""The largest relative distance of a weight and its rounding; 2 bits leave up to 0.7, weights
that have nothing in common are 1.4 apart."""
CLEAR = 0.6
"""How much nearer the nearest parameter has to be than the next one."""
KIN = 0.5
"""The least cosine of the angle between a weight and its rounding, with channels scaled or not;
2 bits leave 0.7 and more, weights that have nothing in common 0.1 and less."""
LOOKED_AT = 8
"""Weights that are compared with the graph's: a few rows of one may lie all over its file."""


def alike(sites: Sequence[Site], entries: Mapping[str, Entry]) -> dict[str, str]:
    """The parameter of equal shape whose rows are nearest to a site's, by the site's name.

    Only where it is near, and no other parameter is about as near; no two weights take one.
    """
    found: dict[str, str] = {}
    owners: dict[str, set[int]] = {}
    by_shape: dict[tuple[int, int], list[Site]] = {}
    for site in sites:
        by_shape.setdefault((site.n, site.k), []).append(site)
    for (n, k), members in by_shape.items():
        rows = {
            name: entry.dequantized(0, min(n, ROWS))
            for name, entry in entries.items()
            if (entry.total_rows, entry.k) == (n, k)
        }
        for site in members:
            nearest = _nearest(site, rows)
            if nearest is not None and site.weight is not None:
                found[site.name] = nearest
                owners.setdefault(nearest, set()).add(id(site.weight.root))
    return {site: name for site, name in found.items() if len(owners[name]) == 1}


def _nearest(site: Site, rows: Mapping[str, Array]) -> str | None:
    assert site.weight is not None
    own = site.weight.rows(0, min(site.n, ROWS))
    norm = float(np.linalg.norm(own))
    if not rows or not norm > 0:
        return None
    distances = {name: float(np.linalg.norm(own - each)) / norm for name, each in rows.items()}
    best, *others = sorted(distances, key=distances.__getitem__)
    if distances[best] > CLOSE:
        return None
    clear = not others or distances[best] <= CLEAR * distances[others[0]]
    return best if clear else None


def unlike(sites: Sequence[Site], sources: Mapping[str, CheckpointSource]) -> list[str]:
    """Names of weights, among some, whose rows point elsewhere than the graph's own."""
    found = []
    for source, own in _some_pairs(sites, sources):
        with np.errstate(over="ignore", invalid="ignore"):  # said where all rows are read
            if not _kin(own, source.dequantized(0, len(own))):
                found.append(source.name)
    return found


def steps_off(sites: Sequence[Site], sources: Mapping[str, CheckpointSource]) -> int:
    """By how many steps weights are above the graph's own, the median of some; 0 without any.

    Rounding errors, and factors of channels, cancel out over a weight; zero points that are read
    one off do not.
    """
    means = []
    for source, own in _some_pairs(sites, sources):
        rows = source.block(0, len(own))
        group = source.format.group or source.k
        steps = np.repeat(rows.scales.astype(np.float32), group, axis=1)[:, : source.k]
        columns = slice(None) if source.order is None else source.order
        with np.errstate(over="ignore", invalid="ignore"):
            theirs, own = source.format.dequantize(rows), own[:, columns]
            above = (theirs - own)[steps != 0] / steps[steps != 0]
            mean = float(above.mean()) if above.size else np.nan
            if np.isfinite(mean) and _kin(own, theirs - steps * round(mean)):
                means.append(mean)
    middle = float(np.median(means)) if means else 0.0
    return round(middle) if abs(middle - round(middle)) < 0.25 else 0


def _kin(own: Array, theirs: Array) -> bool:
    """Whether two weights point in about one direction; zeros do."""
    norms = float(np.linalg.norm(own) * np.linalg.norm(theirs))
    return bool(np.vdot(own, theirs) >= KIN * norms)


def _some_pairs(
    sites: Sequence[Site], sources: Mapping[str, CheckpointSource]
) -> Iterator[tuple[CheckpointSource, Array]]:
    """Some sources, spread over the graph, each with the first rows of the graph's own weight."""
    bound = [site for site in sites if site.name in sources and site.weight is not None]
    for site in bound[:: -(-len(bound) // LOOKED_AT) or 1]:
        assert site.weight is not None
        yield sources[site.name], site.weight.rows(0, min(site.n, ROWS))
