"""Which quantized parameter a float weight is, told by its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.formats.base import Array
from qgraph.sites import Site

if TYPE_CHECKING:
    from qgraph.checkpoints.base import Entry

ROWS = 8
"""The first rows are compared: there every format's blocks of rows begin."""
CLOSE = 0.8
"""The largest relative distance of a weight and its rounding; 2 bits leave up to 0.7, weights
that have nothing in common are 1.4 apart."""
CLEAR = 0.6
"""How much nearer the nearest parameter has to be than the next one."""


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
