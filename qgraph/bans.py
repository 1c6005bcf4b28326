"""What the checks of written models found wrong, and what the next model does without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qgraph.capabilities import Query
from qgraph.errors import NumericError
from qgraph.graph import Graph
from qgraph.kernel_choice import query_of
from qgraph.plan import QuantPlan
from qgraph.report import Step
from qgraph.row_branches import MANY

if TYPE_CHECKING:
    from qgraph.check import SiteCheck
    from qgraph.passes.base import Findings


class Bans:
    """What failed so far.

    kernels: those that are wrong on this machine, whatever the plan.
    floats: by site, reason code and detail of why it goes back to float in this plan.
    steps: what was changed after a check, as the report tells it.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.kernels: frozenset[Query] = frozenset()
        self.floats: dict[str, tuple[str, str]] = {}
        self.steps: list[Step] = []

    def take(self, lowered: Graph, checks: Sequence[SiteCheck], findings: Findings) -> bool:
        """Ban what failed in `lowered`; whether there is any, so that all is done again.

        findings: sites that fusing made are taken apart there, where they failed.

        Raises:
            NumericError: stored bytes are wrong; with `strict`, anything is.
        """
        wrong = [item for item in checks if not item.ok]
        lost = [item for item in checks if item.lost]
        if lost and self.strict:
            raise NumericError(f"{lost[0].site}: {lost[0].lost}; nothing was written")
        for item in lost:
            reason = ("WEIGHT_LOST", item.lost)
            self.floats |= dict.fromkeys(findings.merged.get(item.site, (item.site,)), reason)
        if not wrong:
            return bool(lost)
        first = wrong[0]
        words = f"{first.site}: {first.code}: {first.detail}"
        if self.strict or first.code == "BYTES":
            raise NumericError(f"{words}; nothing was written")
        self._ban(wrong, lowered, findings)
        self.steps += [
            Step("check", "next kernel", item.site, "changed", item.code, item.detail)
            for item in wrong
        ]
        return True

    def _ban(self, wrong: Sequence[SiteCheck], lowered: Graph, findings: Findings) -> None:
        """Give each site the next kernel, or none."""
        sites = {each.name: each for site in lowered.sites() for each in (site, *site.copies)}
        before = self.kernels
        for item in wrong:
            site = sites[item.site]
            query = query_of(site) if site.state == "fused" else None
            if item.site in findings.merged:  # each on its own has its own kernel again
                findings.apart.update(findings.merged[item.site])
                continue
            second = item.site.endswith(MANY)  # a site does without rather than with a slower one
            if query is None or query in before or second:  # there is no next kernel
                self.floats[item.site] = (str(item.code), item.detail)
            else:
                self.kernels |= {query}

    def start_anew(self) -> None:
        """Forget what was found of sites, for another plan; a wrong kernel is wrong in that too."""
        self.floats = {}
        self.steps = []

    def applied(self, plan: QuantPlan) -> QuantPlan:
        """The plan, without the sites that go back to float."""
        return plan.refusing({k: v for k, v in self.floats.items() if plan.of(k)})

    def why(self, step: Step) -> str:
        """Why a step refuses its site; after a check that failed, what that check found."""
        found = [each.detail for each in self.steps if each.site == step.site]
        return found[-1] if found and step.reason == "KERNEL_FAILED_CHECK" else step.detail

    @property
    def failed(self) -> dict[str, tuple[str, str]]:
        """By site, code and detail of the last check that it failed."""
        return {step.site: (step.reason or "", step.detail) for step in self.steps}
