"""Which parameter of a checkpoint each site of a float graph reads: by name, else by likeness."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.errors import InputError
from qgraph.likeness import alike
from qgraph.registry import did_you_mean
from qgraph.selectors import names_of
from qgraph.sites import Site
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.checkpoints.base import Checkpoint, Entry

SHOWN = 5
"""Names in an error or a note; of the others the number."""
_SLICE = re.compile(r"(?P<name>.+)\[(?P<start>\d{1,18}):(?P<stop>\d{1,18})\]")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The rows of a checkpoint's parameter that a site reads.

    name: the parameter. entry: the quantized one; None where the checkpoint has it in float.
    first: the first row; a site's `n` rows follow.
    suggested: why this one was taken, where no name says so.
    exact: whether it has the site's own name, so that the constant lies as the parameter does.
    part: whether the site's constant is these rows alone, as a binding says.
    """

    name: str
    entry: Entry | None
    first: int = 0
    suggested: str = ""
    exact: bool = False
    part: bool = False


def bind(
    sites: Sequence[Site], checkpoint: Checkpoint, names: Mapping[str, str | None]
) -> dict[str, Bound]:
    """The parameter of each site that reads a float weight, by the site's name.

    By `names` (a site's node, weight or module → a parameter, `NAME[a:b]` for some of its rows,
    or None to leave the site as it is), then by equal names, then by likeness where that leaves
    no doubt.

    Raises:
        InputError: a name that is not there, shapes that do not fit, or a site for which the
            checkpoint has nothing; names both sides, and what is nearest.
    """
    binder = _Binder(sites, checkpoint, names)
    return binder.bind()


class _Binder:
    def __init__(
        self, sites: Sequence[Site], checkpoint: Checkpoint, names: Mapping[str, str | None]
    ) -> None:
        self.checkpoint = checkpoint
        self.sites = [site for site in sites if site.state == "float" and site.weight is not None]
        self.names = dict(names)
        self._check_names(sites)

    def _check_names(self, sites: Sequence[Site]) -> None:
        known = {name for site in sites for name in names_of(site)}
        for name in self.names:
            if name not in known:
                raise InputError(
                    f"bindings: {name!r} is no linear or embedding of the graph, nor its weight or "
                    f"module{did_you_mean(name, known)}"
                )

    def bind(self) -> dict[str, Bound]:
        """See the function of this name."""
        found: dict[str, Bound] = {}
        left: list[Site] = []
        for site in self.sites:
            given = next((name for name in names_of(site) if name in self.names), None)
            if given is not None:
                target = self.names[given]
                if target is not None:
                    found[site.name] = self._given(site, given, target)
                continue
            exact = self._exact(site)
            if exact is not None:
                found[site.name] = exact
            else:
                left.append(site)
        bound = [site for site in self.sites if site.name in found]
        left = _with_twins([*bound, *left], found)
        return found | (self._suggested(left, found) if left else {})

    def _given(self, site: Site, name: str, target: str) -> Bound:
        """What the bindings name for a site."""
        match = None if self._has(target) else _SLICE.fullmatch(target)
        parameter = match["name"] if match else target
        if not self._has(parameter):
            near = did_you_mean(parameter, self._parameters())
            raise InputError(
                f"bindings: {name!r} → {target!r}: the checkpoint has no such parameter{near}"
            )
        if match is None:
            return self._fitted(site, parameter)
        start, stop = int(match["start"]), int(match["stop"])
        n, k = self._shape(parameter)
        if not start < stop <= n or (stop - start, k) != (site.n, site.k):
            raise InputError(
                f"bindings: {name!r} → {target!r}: wanted {site.n} of the rows of "
                f"{parameter} [{n}, {k}], each of {site.k}; {site.name} is [{site.n}, {site.k}]"
            )
        return Bound(parameter, self.checkpoint.entries.get(parameter), start, part=True)

    def _exact(self, site: Site) -> Bound | None:
        """The parameter that has one of the site's names."""
        for name in names_of(site)[1:]:
            for candidate in (name, f"{name}.weight"):
                if self._quantized(candidate):
                    return self._fitted(site, candidate)
                if self._has(candidate):
                    return Bound(candidate, None, exact=True)
        return None

    def _fitted(self, site: Site, name: str) -> Bound:
        """All of a parameter, or the rows that the site reads of the constant of its name."""
        n, k = self._shape(name)
        first = 0 if (n, k) == (site.n, site.k) else _first_row(site, n, k)
        if first is None:
            raise InputError(
                f"{site.name} reads {site.weight_name} as [{site.n}, {site.k}], and the "
                f"checkpoint's {name} is [{n}, {k}]: the two are not of one model, or a binding "
                f'has to say which rows: "{name}[0:{site.n}]"'
            )
        return Bound(name, self.checkpoint.entries.get(name), first)

    def _suggested(self, left: Sequence[Site], found: Mapping[str, Bound]) -> dict[str, Bound]:
        """Bindings that no name gives, where there is one that fits and only one."""
        taken = {bound.name for bound in found.values()}
        free = {
            name: self._shape(name)
            for name in self._parameters()
            if name not in taken and len(self._dims(name)) > 1
        }
        made: dict[str, Bound] = {}
        for why, find in (
            ("by the end of its name", _by_suffix),
            ("by shape", _by_shape),
            ("by its values", self._by_values),
        ):
            for site, name in find(left, free).items():
                made[site] = Bound(name, self.checkpoint.entries.get(name), 0, why)
            left = _with_twins(left, made)
            names = {bound.name for bound in made.values()}
            free = {name: shape for name, shape in free.items() if name not in names}
        if left:
            raise InputError(self._lost(left, free))
        return made

    def _by_values(
        self, sites: Sequence[Site], free: Mapping[str, tuple[int, int]]
    ) -> dict[str, str]:
        entries = self.checkpoint.entries
        return alike(sites, {name: entries[name] for name in free if name in entries})

    def _lost(self, lost: Sequence[Site], free: Mapping[str, tuple[int, int]]) -> str:
        """Which sites have no parameter, and what the checkpoint has that is near."""
        lines = []
        for site in lost[:SHOWN]:
            shape = (site.n, site.k)
            same = [name for name, found in free.items() if found == shape]
            near = did_you_mean(site.weight_name, same or self._parameters())
            near = near or (f" (of that shape: {', '.join(same[:3])})" if same else "")
            lines.append(f"{site.name}: {site.weight_name} [{site.n}, {site.k}]{near}")
        more = f"\nand {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        return (
            f"the checkpoint has no parameter for {len(lost)} of the "
            f"{counted(len(self.sites), 'weight')} of the graph:\n"
            + "\n".join(lines)
            + more
            + "\nname them in --bindings FILE.json, "
            f'{{"{lost[0].weight_name}": "PARAMETER"}}, or null to leave one as it is'
        )

    def _has(self, name: str) -> bool:
        return name in self.checkpoint.entries or name in self.checkpoint.floats

    def _quantized(self, name: str) -> bool:
        return name in self.checkpoint.entries

    def _parameters(self) -> list[str]:
        return [*self.checkpoint.entries, *self.checkpoint.floats]

    def _dims(self, name: str) -> tuple[int, ...]:
        entry = self.checkpoint.entries.get(name)
        return entry.shape if entry is not None else self.checkpoint.floats[name].shape

    def _shape(self, name: str) -> tuple[int, int]:
        """All rows of a parameter, those of all experts, and their length."""
        *lead, k = self._dims(name) or (1,)
        return int(np.prod(lead, dtype=np.int64)), k


def _with_twins(left: Sequence[Site], found: dict[str, Bound]) -> list[Site]:
    """The sites that are not bound, after those that read a weight of a bound one were too."""
    known = {
        site.weight.key: found[site.name] for site in left if site.name in found and site.weight
    }
    for site in left:
        if site.weight is not None and site.weight.key in known:
            found.setdefault(site.name, known[site.weight.key])
    return [site for site in left if site.name not in found]


def _first_row(site: Site, n: int, k: int) -> int | None:
    """Where the site's rows begin in a parameter `[n, k]` of which its constant holds all rows.

    None where the site reads anything but adjacent rows of it.
    """
    weight = site.weight
    if weight is None or weight.k != k or np.prod(weight.dims, dtype=np.int64) != n * k:
        return None
    whole = np.empty(weight.dims, np.uint8)  # reserves addresses, touches none
    shown = weight.view.shape_of(whole)
    offset = shown.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    if shown.strides == (k, 1) and offset % k == 0:
        return int(offset) // k
    return int(offset) if shown.strides == (1, n) else None


def _by_suffix(sites: Sequence[Site], free: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Sites whose weight's name ends as one parameter of that shape, or the other way round."""
    found: dict[str, str] = {}
    for site in sites:
        own = names_of(site)[1:]
        fitting = [
            name
            for name, shape in free.items()
            if shape == (site.n, site.k) and any(end_alike(name, each) for each in own)
        ]
        if len(fitting) == 1:
            found[site.name] = fitting[0]
    return _without_doubles(found, sites)


def _by_shape(sites: Sequence[Site], free: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Sites of a weight whose shape no other weight has, nor another parameter."""
    found: dict[str, str] = {}
    for site in sites:
        fitting = [name for name, shape in free.items() if shape == (site.n, site.k)]
        weights = {id(s.weight.root) for s in sites if s.weight and (s.n, s.k) == (site.n, site.k)}
        if len(fitting) == len(weights) == 1:
            found[site.name] = fitting[0]
    return found


def _without_doubles(found: dict[str, str], sites: Sequence[Site]) -> dict[str, str]:
    """Without the parameters that two different weights would take."""
    roots: dict[str, set[int]] = {}
    for site in sites:
        if site.name in found and site.weight is not None:
            roots.setdefault(found[site.name], set()).add(id(site.weight.root))
    return {site: name for site, name in found.items() if len(roots[name]) == 1}


def _plain(name: str) -> str:
    """A name with one kind of separator, without `weight` at its end."""
    return re.sub(r"[/_:]+", ".", name).removesuffix(".weight").strip(".").lower()


def end_alike(one: str, other: str) -> bool:
    """Whether one name is the other's end, from a separator on, in whatever spelling."""
    one, other = _plain(one), _plain(other)
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return bool(shorter) and (longer == shorter or longer.endswith(f".{shorter}"))


def unused(checkpoint: Checkpoint, found: Mapping[str, Bound]) -> Iterator[str]:
    """The quantized parameters that no site reads."""
    taken = {bound.name for bound in found.values()}
    yield from (name for name in checkpoint.entries if name not in taken)


def some(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")
