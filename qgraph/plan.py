"""The plan: one decision per site, made before any data is touched. `planning` makes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from qgraph.activation_kinds import FP8_KINDS, INT8_AUTO
from qgraph.adopted import ADOPTED
from qgraph.coverage import Coverage
from qgraph.formats.base import parse
from qgraph.kernel_choice import PORTABLE, kernel_of, layout_of, query_of, read_kernel, spell_many
from qgraph.kernel_ops import OWN_LINEAR
from qgraph.op_inputs import bare_name
from qgraph.recipe import Recipe
from qgraph.report import SCHEMA
from qgraph.row_branches import MANY
from qgraph.sites import PACKED, Site

KEPT = "kept"
"""The solver of a site that came in with a fused kernel."""
IMPORTED = "imported"
"""The solver of weights that a checkpoint brings quantized."""
UNSOLVED = ("rtn", ADOPTED, KEPT, IMPORTED)
"""Solvers of weights that are rounded, or stay as they came."""


@dataclasses.dataclass(frozen=True)
class Many:
    """A second weight of one site, for activations of `from_rows` rows and more.

    format, activations, kernel, packed_bytes, outliers: as a `Decision` has them.
    """

    from_rows: int
    format: str
    activations: str | None
    kernel: str | None
    packed_bytes: int
    outliers: int = 0

    def __str__(self) -> str:
        """Its kernel, and what it adds to the file, in words."""
        more = f"{self.packed_bytes / 1e6:.2f} MB more"
        return f"{spell_many(self.from_rows, str(self.kernel))}, {more}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of one site, and why.

    format: the spelled format, or None where the weight stays as it is.
    kernel: the op that the target will run, with its parameters.
    origin: whether the target's answer was asked of an installed runtime or predicted.
    shared_with: the first site that reads the same packed weight.
    module: the torch module that the site came from, where the exporter told.
    float_bytes, packed_bytes: the weight that the site reads, in float and packed.
    activations: how its input is rounded, as `Recipe.activations` spells it; None for floats.
    outliers: how many of its input columns stay in float at most.
    many: a second weight, for many rows; `packed_bytes` counts both.
    widened: how many of the packed bytes are there because scales became float32.
    remark: what there is to say beside the reason; `detail` is that and all the rest.
    purpose: why the format is good for the recipe's purpose, where it was chosen for that.
    scales: how the scales of its inputs were chosen, where that was left to calibration.
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
    remark: str = ""
    kernel: str | None = None
    origin: str = "installed"
    shared_with: str | None = None
    module: str = ""
    float_bytes: int = 0
    packed_bytes: int = 0
    activations: str | None = None
    outliers: int = 0
    many: Many | None = None
    widened: int = 0
    purpose: str = ""
    scales: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        """The remark, the purpose with the second weight, and how scales were chosen."""
        second = str(self.many) if self.purpose and self.many is not None else ""
        return "; ".join(filter(None, (self.remark, self.purpose, second, *self.scales)))

    def because(self, reason: str, remark: str) -> Decision:
        """The decision with another reason; what was said of it before no longer counts."""
        return dataclasses.replace(self, reason=reason, remark=remark, purpose="", scales=())

    def to_json(self) -> dict[str, Any]:
        """The fields that a plan's file holds, all that is said as one detail."""
        found = {
            "detail" if key == "remark" else key: v for key, v in dataclasses.asdict(self).items()
        }
        del found["purpose"], found["scales"], found["widened"]
        return {**found, "detail": self.detail}

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
        """The decision for one site, by its name; that for many rows by the name and MANY."""
        found = self._by_site.get(site)
        if found is None and site.endswith(MANY):
            found = self._by_site.get(site.removesuffix(MANY))
            return None if found is None else _for_many(found)
        return found

    def named(self, site: str) -> tuple[Decision, ...]:
        """The decisions for a site, that for many rows under its own name behind the other."""
        found = self[site]
        return (found,) if found.many is None else (found, _for_many(found))

    @property
    def everywhere(self) -> tuple[Decision, ...]:
        """All decisions, those for many rows too."""
        return tuple(each for item in self.decisions for each in self.named(item.site))

    def __getitem__(self, site: str) -> Decision:
        """The decision for a site that this plan knows."""
        found = self.of(site)
        if found is None:
            raise KeyError(site)
        return found

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
                item.because(*refused[item.site]), many=None, format=None, solver=None, kernel=None,
                shared_with=None, packed_bytes=0, widened=0, activations=None, outliers=0,
            )
            if item.site in refused
            else _without_many(item, refused.get(item.site + MANY))
            for item in self.decisions
        ]  # fmt: skip
        left = _half_converted(self.decisions, list(_owned(decisions)))
        return dataclasses.replace(self, decisions=tuple(left))

    def solved_by(self, solver: str) -> QuantPlan:
        """This plan with one solver for every weight that is to be solved."""
        decisions = [
            dataclasses.replace(item, solver=solver)
            if item.quantized and item.solver not in (ADOPTED, KEPT, IMPORTED)
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
        packed = [site for site in sites if site.state in PACKED]
        kernels = {site.name: kernel_of(site) for site in packed}
        floats = {site.name for site in packed if site.integer is None}
        many = {
            site.name: kernel_of(site.many)
            for site in sites
            if site.many is not None and site.many.state in PACKED
        }
        failed = failed or {}
        decisions = []
        for item in self.decisions:
            left_open = item.activations == INT8_AUTO and item.site not in floats
            own = left_open or _is_own(item.kernel, kernels.get(item.site, ""))
            if item.site in kernels and not own:
                item = dataclasses.replace(item, kernel=kernels[item.site])
            fp8 = item.activations in FP8_KINDS  # which the graph rounds, not the kernel
            if item.site in floats and not fp8:  # also where an integer kernel was banned
                item = dataclasses.replace(item, activations=None, outliers=0)
            if item.many is not None and item.site in many:
                open_too = item.many.activations == INT8_AUTO
                kernel = item.many.kernel if open_too else many[item.site]
                second = dataclasses.replace(item.many, kernel=kernel)
                item = dataclasses.replace(item, many=second)
            if item.site in failed and item.quantized:
                item = item.because(*failed[item.site])
            decisions.append(item)
        return dataclasses.replace(self, decisions=tuple(decisions))

    def widened(self, sites: Sequence[Site], names: Collection[str]) -> QuantPlan:
        """This plan with what scales take in float32.

        sites: of the lowered graph. names: those whose products became float32; of the others
            nothing does, whatever this plan says of an earlier graph.
        """
        found = {site.name: site for site in sites if site.name in names}
        decisions = []
        for item in self.decisions:
            more = _wider(item, found[item.site]) if item.site in found else 0
            size = item.packed_bytes - item.widened + more
            decisions.append(dataclasses.replace(item, packed_bytes=size, widened=more))
        return dataclasses.replace(self, decisions=tuple(decisions))

    def scaled(self, sites: Sequence[Site], why: Mapping[str, str]) -> QuantPlan:
        """This plan with the scales that activations have where that was left to calibration.

        sites: of the lowered graph. why: by site, that for many rows by its name and MANY.
        """
        found = {site.name: site for site in sites}
        decisions = []
        for item in self.decisions:
            site, words = found.get(item.site), why.get(item.site)
            if site is not None and site.integer and item.activations == INT8_AUTO:
                item = dataclasses.replace(
                    item, activations=site.integer.activations, kernel=kernel_of(site),
                    scales=tuple(filter(None, [words])),
                )  # fmt: skip
            second = site.many if site is not None else None
            many, words = item.many, why.get(item.site + MANY)
            left_open = many is not None and many.activations == INT8_AUTO
            if many is not None and second is not None and second.integer and left_open:
                kind = second.integer.activations
                many = dataclasses.replace(many, activations=kind, kernel=kernel_of(second))
                more = (*item.scales, *filter(None, [words]))
                item = dataclasses.replace(item, many=many, scales=more)
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
            "decisions": [decision.to_json() for decision in self.decisions],
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


def _half_converted(before: Sequence[Decision], after: Sequence[Decision]) -> Iterator[Decision]:
    """`after`, saying whose weight a site reads too that goes back to float."""
    pairs = list(zip(before, after, strict=True))
    readers = {
        old.shared_with or old.site: new.site
        for old, new in pairs
        if old.quantized and not new.quantized
    }
    for old, new in pairs:
        reader = readers.get(old.shared_with or old.site)
        stays = reader is not None and new.quantized and new.solver != ADOPTED
        yield half_converted(new, str(reader), new.float_bytes) if stays else new


def half_converted(decision: Decision, reader: str, size: int) -> Decision:
    """The decision, saying that the float weight stays beside the packed one: `size` bytes."""
    detail = f"{reader} reads the float weight: {size / 1e6:.1f} MB stay in the file"
    return decision.because("HALF_CONVERTED", detail)


def _for_many(item: Decision) -> Decision:
    """What becomes of the copy of a site that many rows run through."""
    many = item.many
    if many is None:
        return item
    return dataclasses.replace(
        item, site=item.site + MANY, many=None, format=many.format,
        activations=many.activations, kernel=many.kernel, packed_bytes=many.packed_bytes,
        widened=0, outliers=many.outliers, solver="rtn", shared_with=None,
    )  # fmt: skip


def _without_many(item: Decision, refused: tuple[str, str] | None) -> Decision:
    """The decision with one weight, where the second one is refused."""
    if refused is None or item.many is None:
        return item
    size = item.packed_bytes - item.many.packed_bytes
    detail = f"no second weight for many rows: {refused[1]}"
    item = item.because(refused[0], detail)
    return dataclasses.replace(item, many=None, packed_bytes=size)


def _wider(item: Decision, site: Site) -> int:
    """How many bytes more its weight takes with scales in float32; 0 where nothing was planned."""
    if item.format is None or item.solver == KEPT:
        return 0
    fmt = parse(item.format)
    layout = layout_of(fmt, query_of(site))
    wide, half = (
        sum(spec.nbytes for spec in fmt.parts(item.n, item.k, dtype, layout).values())
        for dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    )
    return wide - half


def _is_own(planned: str | None, found: str) -> bool:
    """Whether the portable form that was found is what the target has a kernel for."""
    name = bare_name(OWN_LINEAR)
    return found == PORTABLE and planned is not None and read_kernel(planned).op == name
