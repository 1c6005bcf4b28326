"""The kernel for a site in a format: the target's best, the portable form, or a refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from qgraph.activation_kinds import FP8_KINDS
from qgraph.adopted import ADOPTED
from qgraph.capabilities import Answer, Capabilities, Query
from qgraph.errors import InputError
from qgraph.formats.base import Format, Layout, parse
from qgraph.kernel_choice import (
    EXPERTS_COST,
    FOLDING_ENTRY,
    PORTABLE,
    PORTABLE_COST,
    best_kernel,
    is_portable,
    layout_of,
    spell_kernel,
)
from qgraph.kernel_ops import DEQUANTIZE_LINEAR, OWN_DEQUANTIZE
from qgraph.ort_versions import spell
from qgraph.plan import IMPORTED, Decision
from qgraph.recipe import FLOAT, Recipe
from qgraph.rounded_activations import FP8_WORDS
from qgraph.sites import Site

_OTHERS = ("int8", "uint4", "nf4")
"""Formats that are named where the one asked for has a kernel in newer releases alone."""
_LARGER = "LARGER_THAN_FORMAT"
"""What a weight carries that is held as the larger integers that a fast kernel reads."""


class SiteKernels:
    """Decides sites one after another: of those with one weight in one format the first owns it.

    keys: of each site's weight, by the site's name.
    """

    def __init__(
        self, recipe: Recipe, capabilities: Capabilities, keys: Mapping[str, Hashable]
    ) -> None:
        self.recipe, self.capabilities, self.keys = recipe, capabilities, keys
        self._first: dict[tuple[Hashable, str | None], str] = {}

    def decide(
        self, decision: Decision, site: Site, fmt: Format, solver: str, activations: str
    ) -> Decision:
        """`decision` with the best kernel for the site in `fmt`, or why there is none.

        activations: what the site multiplies, one of `qgraph.recipe.ACTIVATIONS`.

        Raises:
            InputError: the site's weight does not fit the format, or outlier columns are wanted
                of a Q/DQ graph.
        """
        assert site.weight is not None and site.dtype is not None
        fmt.validate(site.n, site.k)
        detail = self.capabilities.traits.experts_in_float
        if site.role == "experts" and detail:
            return dataclasses.replace(decision, reason="NO_FUSED_KERNEL", remark=detail)
        dtype = site.dtype
        # FP8 activations are floats again before any kernel reads them.
        read = FLOAT if activations in FP8_KINDS else activations
        answer, query = best_kernel(
            self.capabilities,
            site,
            fmt,
            self.recipe.accuracy_level,
            prefer=self.recipe.prefer,
            at_load=self.recipe.dequantize_at_load,
            activations=read,
        )
        rule = answer.rule
        portable = is_portable(self.recipe.unfused, fmt) and dtype.name in ("FLOAT", "FLOAT16")
        if rule is None and (not portable or read != FLOAT):
            detail = answer.detail + (self._instead(site, fmt, solver) if answer.since else "")
            return dataclasses.replace(decision, reason=answer.reason, remark=detail)
        outliers = min(self.recipe.outliers, site.k - 1) if read != FLOAT else 0
        if outliers and query.op == DEQUANTIZE_LINEAR:
            raise InputError(
                f"--outliers {self.recipe.outliers}: a Q/DQ graph for {self.capabilities.target} "
                "quantizes whole activations; use --target ort-cpu, or leave it out"
            )
        layout = fmt.default_layout if rule is None else layout_of(fmt, query)
        decision = dataclasses.replace(
            decision,
            format=fmt.spell(),
            solver=solver,
            shared_with=self._owner(site, fmt),
            packed_bytes=packed_bytes(site, fmt, layout) + outliers * site.n * dtype.bitwidth // 8,
            activations=None if activations == FLOAT else activations,
            outliers=outliers,
        )
        if rule is None:
            return dataclasses.replace(
                decision,
                kernel=PORTABLE,
                reason="NO_FUSED_KERNEL",
                remark=self._why_portable(site, fmt, answer),
            )
        price = self._price(site, fmt, layout)
        detail = self._at_load(site, query) or answer.detail or price
        return dataclasses.replace(
            decision,
            kernel=spell_kernel(query),
            origin=rule.origin,
            reason=self._remark(activations) or answer.reason or (_LARGER if price else None),
            remark="; ".join(each for each in (FP8_WORDS.get(activations), detail) if each),
        )

    def _owner(self, site: Site, fmt: Format) -> str | None:
        """The first site with this weight in this format; None where it is this one."""
        owner = self._first.setdefault((self.keys[site.name], fmt.spell()), site.name)
        return None if owner == site.name else owner

    def _why_portable(self, site: Site, fmt: Format, answer: Answer) -> str:
        """Why no kernel reads the format, what that costs, and which larger form one reads."""
        known = answer.reason == "NO_FUSED_KERNEL"
        detail = answer.detail if known else f"{answer.reason}: {answer.detail}"
        cost = EXPERTS_COST if site.role == "experts" else PORTABLE_COST
        return f"{detail}; {cost}{self._faster(site, fmt)}"

    def _instead(self, site: Site, asked: Format, solver: str) -> str:
        """What the oldest runtime does run in place of a kernel that came later."""
        option = "--embedding {}" if site.gathers else "--format {}"
        option = "--set 'role:head={}'" if site.role == "head" else option
        others = () if solver in (IMPORTED, ADOPTED) else _OTHERS  # codes come as they are
        ways = [option.format(name) for name in others if self._runs(site, parse(name), asked)]
        if self.capabilities.traits.fuses_ops:
            ways += [] if self.recipe.unfused == PORTABLE else ["--unfused portable"]
        if self.capabilities.folds and not site.gathers:
            ways.append("--dequantize-at-load")
        return f"; {spell(self.capabilities.oldest)} runs {', '.join(ways)}" if ways else ""

    def _runs(self, site: Site, fmt: Format, asked: Format) -> bool:
        """Whether the oldest runtime runs a site in another format than the one asked for."""
        if fmt.bits == asked.bits and fmt.numbers == asked.numbers:
            return False
        answer, _ = best_kernel(self.capabilities, site, fmt, self.recipe.accuracy_level)
        return bool(answer) or is_portable(self.recipe.unfused, fmt)

    def _remark(self, activations: str) -> str | None:
        """What rounding activations costs where the target has no products of them."""
        simulated = activations in FP8_KINDS and self.capabilities.simulates_fp8
        return "ACTIVATION_SIMULATED" if simulated else None

    def _faster(self, site: Site, fmt: Format) -> str:
        """Which larger form a kernel would read, where size was preferred."""
        if self.recipe.prefer == "speed" or fmt.as_integers is None:
            return ""
        answer, query = best_kernel(self.capabilities, site, fmt, self.recipe.accuracy_level)
        if not answer:
            return ""
        size = packed_bytes(site, fmt, layout_of(fmt, query)) / 1e6
        return f"; --prefer speed: {spell_kernel(query)}, {size:.2f} MB"

    def _at_load(self, site: Site, query: Query) -> str:
        """What becoming floats at load costs, or wants of the session."""
        if not self.recipe.dequantize_at_load:
            return ""
        if query.op == OWN_DEQUANTIZE:
            return f"floats at load: {float_bytes(site) / 1e6:.2f} MB in memory"
        named_entry = query.op == DEQUANTIZE_LINEAR
        return f"floats at load with the session entry {FOLDING_ENTRY}" if named_entry else ""

    def _price(self, site: Site, fmt: Format, layout: Layout) -> str:
        """What it costs to be written as integers that a kernel reads."""
        if layout.kind != "nbits8":
            return ""
        asked, packed = packed_bytes(site, fmt, layout), packed_bytes(site, fmt, fmt.default_layout)
        return (
            f"as 8-bit integers, exactly: {asked / 1e6:.2f} MB; --prefer size: "
            f"{packed / 1e6:.2f} MB, dequantized at each call"
        )


def packed_bytes(site: Site, fmt: Format, layout: Layout) -> int:
    """What the site's weight takes in a layout."""
    assert site.dtype is not None
    specs = fmt.parts(site.n, site.k, site.dtype, layout)
    return sum(spec.nbytes for spec in specs.values())


def float_bytes(site: Site) -> int:
    """Bytes of the site's weight as floats, as stored or (already quantized) as computed."""
    constant = site.weight.root.const_value if site.weight is not None else None
    dtype = constant.dtype if constant is not None and site.state == "float" else site.dtype
    return (dtype.bitwidth if dtype is not None else 32) * site.n * site.k // 8
