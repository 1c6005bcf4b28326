"""The plan: one decision per site, made before any data is touched. `planning` makes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qgraph.adopted import ADOPTED
from qgraph.capabilities import OWN_LINEAR
from qgraph.coverage import Coverage
from qgraph.kernel_choice import PORTABLE, kernel_of
from qgraph.recipe import Recipe
from qgraph.report import SCHEMA
from qgraph.sites import PACKED, Site

KEPT = "kept"
"""The solver of a site that came in with a fused kernel."""
UNSOLVED = ("rtn", ADOPTED, KEPT)
"""Solvers of weights that are rounded, or stay as they came."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of one site, and why.

    format: the spelled format, or None where the weight stays as it is.
    kernel: the op that the target will run, with its parameters.
    origin: whether the target's answer was asked of an installed runtime or predicted.
    shared_with: the first site that reads the same packed weight.
    module: the torch module that the site came from, where the exporter told.
    float_bytes, packed_bytes: the weight that the site reads, in float and packed.
    """

    site: str
    weight: str
    role: str
    op: str
    n: int
    k: int
    format: str | None = None
    solver: str | None = None
    reason: str | None = None
    detail: str = ""
    kernel: str | None = None
    origin: str = "installed"
    shared_with: str | None = None
    module: str = ""
    float_bytes: int = 0
    packed_bytes: int = 0

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site

    @property
    def quantized(self) -> bool:
        """Whether the weight is to be stored in a quantized format."""
        return self.format is not None


@dataclasses.dataclass(frozen=True)
class QuantPlan:
    """All decisions for one model, recipe and target."""

    recipe: Recipe
    target: str
    runtime: str
    decisions: tuple[Decision, ...]

    def of(self, site: str) -> Decision | None:
        """The decision for one site, by its name."""
        return self._by_site.get(site)

    def __getitem__(self, site: str) -> Decision:
        """The decision for a site that this plan knows."""
        return self._by_site[site]

    @functools.cached_property
    def _by_site(self) -> dict[str, Decision]:
        return {decision.site: decision for decision in self.decisions}

    @property
    def coverage(self) -> Coverage:
        """How much of the model the decisions quantize."""
        return Coverage.of(self.decisions)

    def refusing(self, refused: Mapping[str, tuple[str, str]]) -> QuantPlan:
        """This plan with some sites left in float: site → (reason code, detail)."""
        decisions = [
            dataclasses.replace(
                item, format=None, solver=None, kernel=None, shared_with=None, packed_bytes=0,
                reason=refused[item.site][0], detail=refused[item.site][1],
            )
            if item.site in refused
            else item
            for item in self.decisions
        ]  # fmt: skip
        return dataclasses.replace(self, decisions=tuple(_owned(decisions)))

    def solved_by(self, solver: str) -> QuantPlan:
        """This plan with one solver for every weight that is to be solved."""
        decisions = [
            dataclasses.replace(item, solver=solver)
            if item.quantized and item.solver not in (ADOPTED, KEPT)
            else item
            for item in self.decisions
        ]
        return dataclasses.replace(self, decisions=tuple(decisions))

    def with_solvers_of(self, other: QuantPlan) -> QuantPlan:
        """This plan with the solvers that `other` names for the sites quantized here."""
        decisions = []
        for item in self.decisions:
            before = other.of(item.site)
            if item.quantized and before is not None:
                item = dataclasses.replace(item, solver=before.solver)
            decisions.append(item)
        return dataclasses.replace(self, decisions=tuple(decisions))

    def running(
        self, sites: Sequence[Site], failed: Mapping[str, tuple[str, str]] | None = None
    ) -> QuantPlan:
        """This plan with the kernels that a lowered graph's sites really have.

        failed: site → (reason code, detail) of the kernel that a check found wrong before.
        """
        kernels = {site.name: kernel_of(site) for site in sites if site.state in PACKED}
        failed = failed or {}
        decisions = []
        for item in self.decisions:
            if item.site in kernels and not _is_own(item.kernel, kernels[item.site]):
                item = dataclasses.replace(item, kernel=kernels[item.site])
            if item.site in failed and item.quantized:
                reason, detail = failed[item.site]
                item = dataclasses.replace(item, reason=reason, detail=detail)
            decisions.append(item)
        return dataclasses.replace(self, decisions=tuple(decisions))

    def to_json(self) -> dict[str, Any]:
        """The versioned form that `--dry-run --report` writes and `explain` reads."""
        return {
            "schema": SCHEMA,
            "kind": "plan",
            "target": self.target,
            "runtime": self.runtime,
            "recipe": self.recipe.to_json(),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }


def _owned(decisions: list[Decision]) -> Iterator[Decision]:
    """Sites whose owner is no longer quantized share with the first one that is."""
    heirs: dict[tuple[str, str | None], str] = {}
    quantized = {item.site for item in decisions if item.quantized}
    for item in decisions:
        if item.shared_with is None or item.shared_with in quantized:
            yield item
            continue
        heir = heirs.setdefault((item.shared_with, item.format), item.site)
        yield dataclasses.replace(item, shared_with=None if heir == item.site else heir)


def _is_own(planned: str | None, found: str) -> bool:
    """Whether the portable form that was found is what the target has a kernel for."""
    name = OWN_LINEAR.partition("::")[2]
    return found == PORTABLE and planned is not None and planned.startswith(f"{name} ")
