"""Selectors: how a user names sites. Globs on node or weight names, roles, first or last layers."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from qgraph.errors import InputError
from qgraph.registry import did_you_mean
from qgraph.sites import Site
from qgraph.wording import counted, plural

ROLES = ("linear", "head", "experts", "embedding")
ALIASES = "qgraph.aliases"
"""Key of `Value.meta`: the other names of a value, a tuple of str; saved as a JSON list."""
MODULE = "qgraph.module"
"""Key of `Node.meta`: the torch module that a node came from, where the exporter told."""
_WORDS = re.compile(r"[./]")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h|stages?)[./_](\d+)(?:[./_]|$)")


class Named(Protocol):
    """What tells of a site, by the names that it has."""

    @property
    def role(self) -> str:
        """The site's role."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, see `names_of`."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """`GLOB` on a node or weight name, `role:head`, `first:2` or `last:2` (layers)."""

    text: str

    def matches(self, site: Site | Named, layers: int) -> bool:
        """Whether this selector names `site`, in a model of `layers` layers."""
        kind, _, rest = self.text.partition(":")
        if kind == "role":
            return site.role == rest
        if kind in ("first", "last") and _COUNT.fullmatch(rest):
            layer = layer_of(site)
            if layer is None:
                return False
            return layer < int(rest) if kind == "first" else layer >= layers - int(rest)
        names = names_of(site)
        return self.text in names or any(fnmatch.fnmatchcase(n, self.text) for n in names)


def names_of(site: Site | Named) -> tuple[str, ...]:
    """The names by which users know a site: node, weight (tied: all of its), and module."""
    if not isinstance(site, Site):
        return site.names
    module = site.node.meta.get(MODULE)
    tied = site.weight.root.meta.get(ALIASES, ()) if site.weight is not None else ()
    return tuple(name for name in (site.name, site.weight_name, module, *tied) if name)


def layer_of(site: Site | Named) -> int | None:
    """The layer's number in any of the site's names, or None."""
    for name in names_of(site):
        found = _LAYER.search(name)
        if found:
            return int(found.group(1))
    return None


def layer_count(sites: Iterable[Site | Named]) -> int:
    """One more than the largest layer number."""
    return max((layer for site in sites if (layer := layer_of(site)) is not None), default=-1) + 1


def check(selectors: Sequence[str], sites: Sequence[Site | Named]) -> None:
    """Refuse selectors that match no site.

    Raises:
        InputError: with the names that are nearest, per selector.
    """
    for text in selectors:
        kind, colon, rest = text.partition(":")
        if colon and kind in ("first", "last") and not _COUNT.fullmatch(rest):
            raise InputError(f"selector {text!r}: wanted {kind}:N, N layers from 1 on")
        if colon and kind == "role" and rest not in ROLES:
            raise InputError(f"selector {text!r}: wanted role:{', role:'.join(ROLES)}")
    layers = layer_count(sites)
    lost = [t for t in selectors if not any(Selector(t).matches(s, layers) for s in sites)]
    if not lost:
        return
    known = sorted({name for site in sites for name in names_of(site)})
    roles = [f"role:{role}" for role in sorted({site.role for site in sites})]
    words = sorted({word for name in known for word in _WORDS.split(name)} - set(known))
    lines = []
    for text in lost:
        near = did_you_mean(text.strip("*"), [*known, *roles]) or did_you_mean(
            text.strip("*./"), words
        )
        lines.append(f"{text!r} matches no site{near}")
    raise InputError(
        f"selector {'; '.join(lines)} (there {plural(len(known), 'is', 'are')} "
        f"{counted(len(known), 'name')}: `qgraph explain MODEL --all` lists them)"
    )
