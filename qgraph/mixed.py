"""Mixed precision: which formats each weight could have, and the choice that a budget allows."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qgraph.coverage import LINEAR_ROLES
from qgraph.kernel_choice import PORTABLE
from qgraph.knapsack import Picked, pick
from qgraph.plan import Decision, QuantPlan
from qgraph.recipe import FLOAT, Recipe

Doubles = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Option:
    """What a unit could be stored as: a format for each of its sites, and the bytes of all."""

    formats: tuple[str, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """The format, as spelled; `float` where the weight stays as it is."""
        return "/".join(dict.fromkeys(self.formats))


@dataclasses.dataclass(frozen=True)
class Unit:
    """A weight, with all sites that read it: they are stored once, and move together.

    weights: how many numbers. linear: whether a linear reads it; else embeddings alone do.
    """

    sites: tuple[str, ...]
    weights: int
    linear: bool
    options: tuple[Option, ...]

    @property
    def name(self) -> str:
        """The first site's name."""
        return self.sites[0]

    @property
    def rounded(self) -> list[int]:
        """The options that are no floats."""
        return [at for at, option in enumerate(self.options) if FLOAT not in option.formats]

    def variant(self, option: int) -> dict[str, str]:
        """Site → format, as far as weights are rounded."""
        formats = zip(self.sites, self.options[option].formats, strict=True)
        return {site: spelled for site, spelled in formats if spelled != FLOAT}


def units_of(
    plans: Sequence[QuantPlan], keys: Mapping[str, Hashable], movable: frozenset[str]
) -> list[Unit]:
    """The weights whose format is to be chosen, each with at least two options.

    Args:
        plans: the recipe's own, then one per candidate in which every site that may have another
            format has this one.
        keys: the identity of each site's weight.
        movable: sites whose loss can be measured.
    """
    groups: dict[Hashable, list[Decision]] = {}
    for item in plans[0].decisions:
        if item.site in movable and item.quantized:
            groups.setdefault(keys[item.site], []).append(item)
    found = (_unit([item.site for item in group], plans) for group in groups.values())
    return [unit for unit in found if len(unit.options) > 1]


def _unit(sites: Sequence[str], plans: Sequence[QuantPlan]) -> Unit:
    options: dict[tuple[str, ...], Option] = {}
    for plan in plans:
        decisions = [plan[site] for site in sites]
        if not all(_has_kernel(item, plan.recipe) for item in decisions):
            continue
        formats = tuple(item.format or FLOAT for item in decisions)
        options.setdefault(formats, Option(formats, _bytes_of(decisions)))
    first = plans[0][sites[0]]
    linear = any(plans[0][site].role in LINEAR_ROLES for site in sites)
    return Unit(tuple(sites), first.n * first.k, linear, tuple(options.values()))


def _has_kernel(item: Decision, recipe: Recipe) -> bool:
    """Whether a decision is what a candidate asked for, and not a way to make do."""
    if item.format is None:
        return item.reason == "EXCLUDED"
    return item.kernel != PORTABLE or recipe.unfused == PORTABLE


def _bytes_of(decisions: Sequence[Decision]) -> int:
    packed = sum(item.packed_bytes for item in decisions if item.shared_with is None)
    floats = max((item.float_bytes for item in decisions if item.format is None), default=0)
    return packed + floats


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is chosen from: the loss of every option, and what bytes there are besides.

    losses: per unit, of each option: KL in nats (or relative output error), float64.
    fixed_bytes, fixed_weights: of quantized linears whose format is not chosen here.
    other_bytes: of the file, without the units.
    """

    units: tuple[Unit, ...]
    losses: tuple[Doubles, ...]
    fixed_bytes: int
    fixed_weights: int
    other_bytes: int

    @functools.cached_property
    def sizes(self) -> tuple[Doubles, ...]:
        """Bytes of every option."""
        return tuple(np.array([o.nbytes for o in unit.options], float) for unit in self.units)

    def within_bytes(self, limit: float) -> Picked | None:
        """The least loss with a file of at most `limit` bytes."""
        return pick(self.losses, self.sizes, limit - self.other_bytes)

    def within_bits(self, bits: float) -> Picked | None:
        """The least loss with at most `bits` a weight, over all quantized linears.

        Embeddings that no linear shares keep the format that they have anyway.
        """
        weights = self.fixed_weights + sum(unit.weights for unit in self.units if unit.linear)
        sizes = [
            size if unit.linear else np.where(np.arange(len(size)) == 0, 0, np.inf)
            for unit, size in zip(self.units, self.sizes, strict=True)
        ]
        open_ = [np.flatnonzero(np.isfinite(size)) for size in sizes]
        found = pick(
            [loss[at] for loss, at in zip(self.losses, open_, strict=True)],
            [size[at] for size, at in zip(sizes, open_, strict=True)],
            bits * weights / 8 - self.fixed_bytes,
        )
        if found is None:
            return None
        options = tuple(int(at[i]) for at, i in zip(open_, found.options, strict=True))
        return dataclasses.replace(found, options=options)

    def within_loss(self, limit: float) -> Picked | None:
        """The smallest file with a loss of at most `limit`; its `cost` is bytes."""
        return pick(self.sizes, self.losses, limit)

    def loss(self, options: Sequence[int]) -> float:
        """The sum of the losses: to first order they add."""
        return float(sum(e[at] for e, at in zip(self.losses, options, strict=True)))

    def nbytes(self, options: Sequence[int]) -> int:
        """Bytes of the file, as far as weights are concerned."""
        return self.other_bytes + int(sum(e[a] for e, a in zip(self.sizes, options, strict=True)))

    def bits(self, options: Sequence[int]) -> float:
        """Bits a weight, scales included, over all quantized linears."""
        nbytes, weights = self.fixed_bytes, self.fixed_weights
        for unit, option in zip(self.units, options, strict=True):
            if unit.linear:
                nbytes += unit.options[option].nbytes
                weights += unit.weights
        return 8 * nbytes / weights if weights else 0.0

    def formats(self, options: Sequence[int]) -> dict[str, str]:
        """Site → format."""
        found: dict[str, str] = {}
        for unit, option in zip(self.units, options, strict=True):
            found |= dict(zip(unit.sites, unit.options[option].formats, strict=True))
        return found

    def details(self, options: Sequence[int], factor: float) -> dict[str, str]:
        """Site → why it has its format: what it loses there, and in the recipe's own format.

        factor: what the losses are multiplied by, after real measurements.
        """
        found: dict[str, str] = {}
        for unit, losses, at in zip(self.units, self.losses, options, strict=True):
            found |= dict.fromkeys(unit.sites, f"bit budget: {_why(unit, factor * losses, at)}")
        return found

    def summary(self, options: Sequence[int]) -> str:
        """How many weights got each format."""
        names = [unit.options[at].name for unit, at in zip(self.units, options, strict=True)]
        return ", ".join(f"{count} × {name}" for name, count in Counter(names).most_common())


def _why(unit: Unit, losses: Doubles, at: int) -> str:
    """What an option loses, and what the next smaller and the next better one would."""
    sizes = np.array([option.nbytes for option in unit.options])
    smaller = [i for i in range(len(sizes)) if sizes[i] < sizes[at]]
    better = [i for i in range(len(sizes)) if losses[i] < losses[at] and sizes[i] > sizes[at]]
    near = [
        *([min(smaller, key=lambda i: losses[i])] if smaller else []),
        *([min(better, key=lambda i: sizes[i])] if better else []),
    ]
    words = [
        f"{losses[i]:.1e} at {unit.options[i].name} ({(sizes[i] - sizes[at]) / 1e3:+.3g} kB)"
        for i in near
    ]
    return ", ".join([f"{unit.options[at].name} loses {losses[at]:.1e}", *words])
