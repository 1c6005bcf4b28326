"""Weights that end up in the file more than once, and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

from qgraph.plan import Decision, half_converted
from qgraph.shared_weights import other_readers, reads_root_of
from qgraph.sites import Site


def with_costs(
    decisions: Sequence[Decision],
    sites: Sequence[Site],
    keys: Mapping[str, Hashable],
    stored_bytes: Callable[[Site], int],
) -> list[Decision]:
    """The decisions, saying where one weight ends up in the file more than once.

    keys: of each site's weight, by the site's name.
    stored_bytes: what a site's weight takes in the model as it is.
    """
    by_key: dict[Hashable, list[Decision]] = {}
    for decision in decisions:
        by_key.setdefault(keys[decision.site], []).append(decision)
    on_the_way = {id(node) for other in sites for node in (*other.chain, other.node)}
    kept = [site for decision, site in zip(decisions, sites, strict=True) if not decision.quantized]
    found = []
    for decision, site in zip(decisions, sites, strict=True):
        if decision.format is None or site.weight is None:
            found.append(decision)
            continue
        same = by_key[keys[decision.site]]
        floats = [other.name for other in kept if other.weight and reads_root_of(other, site)]
        floats += [other.site for other in same if other.format is None]
        floats += [] if floats else other_readers(site, on_the_way)
        formats = sorted({other.format for other in same if other.format is not None})
        if floats and site.state == "float":
            decision = half_converted(decision, floats[0], stored_bytes(site))
        elif floats:
            size = stored_bytes(site) / 1e6
            detail = f"{floats[0]} reads the dequantized weight: {size:.1f} MB stay in the file"
            decision = dataclasses.replace(decision, reason="DQ_MULTIPLE_READERS", remark=detail)
        elif len(formats) > 1:
            size = decision.packed_bytes / 1e6
            detail = (
                f"{len(formats)} packed copies ({', '.join(formats)}): this one takes {size:.1f} MB"
            )
            decision = dataclasses.replace(decision, reason="SEPARATE_COPY", remark=detail)
        elif decision.shared_with is not None:
            detail = f"one packed weight with {decision.shared_with}"
            decision = dataclasses.replace(decision, reason="SHARED_WITH", remark=detail)
        found.append(decision)
    return found
