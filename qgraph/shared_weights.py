"""Which sites have one weight, and who else reads it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from qgraph.constants import open_array
from qgraph.sites import Site


def weight_keys(sites: Sequence[Site]) -> dict[str, Hashable]:
    """The identity of each site's weight: equal where the elements are, also for Eᵀ beside E."""
    keys: dict[str, Hashable] = {}
    seen: dict[tuple[int, int], list[Site]] = {}
    for site in sites:
        if site.weight is None or site.state != "float":
            keys[site.name] = site.name
            continue
        others = seen.setdefault((site.n, site.k), [])
        twin = next((other for other in others if _equal(site, other)), None)
        if twin is None:
            others.append(site)
            keys[site.name] = site.weight.key
        else:
            keys[site.name] = keys[twin.name]
    return keys


def _equal(one: Site, other: Site, samples: int = 32) -> bool:
    """Whether two sites read equal weights: by key, else by content, a sample of rows first.

    Content is compared only between an embedding and a linear: that is how exporters copy a
    tied weight, and comparing all pairs of equal shape would read the model many times.
    """
    assert one.weight is not None and other.weight is not None
    if one.weight.key == other.weight.key:
        return True
    first, second = one.weight.view, other.weight.view
    if (first.casts, first.factor) != (second.casts, second.factor):
        return False
    if (one.role == "embedding") == (other.role == "embedding"):
        return False
    at = np.unique(np.linspace(0, one.n - 1, samples).astype(int))
    if not all(_rows_equal(one, other, int(i), int(i) + 1) for i in at):
        return False
    step = max(1, 16_000_000 // (4 * one.k))
    return all(_rows_equal(one, other, i, min(i + step, one.n)) for i in range(0, one.n, step))


def _rows_equal(one: Site, other: Site, start: int, stop: int) -> bool:
    assert one.weight is not None and other.weight is not None
    first = one.weight.view.shape_of(open_array(one.weight.tensor))[start:stop]
    second = other.weight.view.shape_of(open_array(other.weight.tensor))[start:stop]
    return bool(np.array_equal(first, second))


def reads_root_of(other: Site, site: Site) -> bool:
    """Whether `other` reads the constant, or the dequantizing node's result, that `site` reads."""
    assert other.weight is not None and site.weight is not None
    return other.weight.root is site.weight.root


def other_readers(site: Site, on_the_way: Collection[int]) -> list[str]:
    """Who reads the weight's root, or a value on the way from it, and is no site."""
    assert site.weight is not None
    root = site.weight.root
    values = [root, *(node.outputs[0] for node in site.chain)]
    readers = [
        use.node.name or "" for v in values for use in v.uses() if id(use.node) not in on_the_way
    ]
    return readers + [f"output {value.name}" for value in values if value.is_graph_output()]
