"""The plan: one decision per site, made before any data is touched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qgraph import registry
from qgraph.adopted import ADOPTED, AdoptedSource, adopt
from qgraph.capabilities import (
    Capabilities,
)
from qgraph.constants import open_array
from qgraph.coverage import Coverage
from qgraph.errors import InputError
from qgraph.formats.base import Format, parse
from qgraph.kernel_choice import (
    PORTABLE,
    best_kernel,
    dividing_group,
    kernel_of,
    query_of,
    spell_kernel,
)
from qgraph.recipe import FLOAT, Recipe
from qgraph.report import SCHEMA
from qgraph.selectors import MODULE, Selector, check, layer_count
from qgraph.sites import PACKED, Refusal, Site
from qgraph.solver_names import parts_of

BEST_4_BIT = "uint4"
SYMMETRIC_4_BIT = "int4"
"""CUDA's fast kernels take no zero points."""
DEFAULT_GROUP = 64
"""Measured on SmolLM2-135M with its channels off the Q4_1 grid: see tests/benchmarks/results."""
BEST_EMBEDDING = "int8"
KEPT = "kept"
"""The solver of a site that came in with a fused kernel."""
UNSOLVED = ("rtn", ADOPTED, KEPT)
"""Solvers of weights that are rounded, or stay as they came."""
_QUANTIZED = ("qdq", "dequantize")


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
            if item.site in kernels:
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


def make_plan(sites: Sequence[Site], recipe: Recipe, capabilities: Capabilities) -> QuantPlan:
    """Decide for every site.

    Raises:
        InputError: a selector that matches nothing, an unknown format, solver or option.
    """
    parts_of(recipe.solver)
    check(recipe.selectors, sites)
    planner = _Planner(sites, recipe, capabilities)
    decisions = [planner.decide(site) for site in sites]
    return QuantPlan(
        recipe,
        capabilities.target,
        capabilities.runtime,
        tuple(_with_costs(decisions, sites, planner)),
    )


def _with_costs(
    decisions: Sequence[Decision], sites: Sequence[Site], planner: _Planner
) -> list[Decision]:
    """Say where one weight ends up in the file more than once, and what that costs."""
    keys = planner.keys
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
        floats = [other.name for other in kept if other.weight and _reads_root_of(other, site)]
        floats += [other.site for other in same if other.format is None]
        floats += [] if floats else _other_readers(site, on_the_way)
        formats = sorted({other.format for other in same if other.format is not None})
        if floats:
            size = planner.stored_bytes(site) / 1e6
            which = "float" if site.state == "float" else "dequantized"
            detail = f"{floats[0]} reads the {which} weight: {size:.1f} MB stay in the file"
            code = "HALF_CONVERTED" if site.state == "float" else "DQ_MULTIPLE_READERS"
            decision = dataclasses.replace(decision, reason=code, detail=detail)
        elif len(formats) > 1:
            size = decision.packed_bytes / 1e6
            detail = (
                f"{len(formats)} packed copies ({', '.join(formats)}): this one takes {size:.1f} MB"
            )
            decision = dataclasses.replace(decision, reason="SEPARATE_COPY", detail=detail)
        elif decision.shared_with is not None:
            detail = f"one packed weight with {decision.shared_with}"
            decision = dataclasses.replace(decision, reason="SHARED_WITH", detail=detail)
        found.append(decision)
    return found


def _reads_root_of(other: Site, site: Site) -> bool:
    """Whether `other` reads the constant, or the dequantizing node's result, that `site` reads."""
    assert other.weight is not None and site.weight is not None
    return other.weight.root is site.weight.root


def _other_readers(site: Site, on_the_way: Collection[int]) -> list[str]:
    """Who reads the weight's root, or a value on the way from it, and is no site."""
    assert site.weight is not None
    root = site.weight.root
    values = [root, *(node.outputs[0] for node in site.chain)]
    readers = [
        use.node.name or "" for v in values for use in v.uses() if id(use.node) not in on_the_way
    ]
    return readers + [f"output {value.name}" for value in values if value.is_graph_output()]


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


def wanted_format(recipe: Recipe, target: str) -> Format:
    """The recipe's format with its group; `auto` is the best 4-bit format of the target."""
    if recipe.format == "auto":
        best = SYMMETRIC_4_BIT if target == "ort-cuda" else BEST_4_BIT
        return parse(best, group=DEFAULT_GROUP if recipe.group is None else recipe.group)
    return parse(recipe.format, group=recipe.group)


def embedding_format(recipe: Recipe) -> Format | None:
    """The format of embedding tables and of the heads tied to them; None for float."""
    group = DEFAULT_GROUP if recipe.group is None else recipe.group
    if recipe.embedding == FLOAT:
        return None
    text = recipe.embedding
    return _parse_with(BEST_EMBEDDING if text == "auto" else text, group)


def _parse_with(text: str, group: int | None) -> Format:
    """The format that `text` spells, at `group` unless the text names one."""
    return parse(text, group=None if "group=" in text else group)


class _Planner:
    def __init__(self, sites: Sequence[Site], recipe: Recipe, capabilities: Capabilities) -> None:
        self.recipe = recipe
        self.capabilities = capabilities
        self.layers = layer_count(sites)
        self.default = wanted_format(recipe, capabilities.target)
        self.embedding = embedding_format(recipe)
        self.keys = weight_keys(sites)
        self.adopted = {s.name: adopt(s) for s in sites if s.weight and s.state in _QUANTIZED}
        self.keys |= {
            name: source.key
            for name, source in self.adopted.items()
            if isinstance(source, AdoptedSource)
        }
        self.tables = {self.keys[s.name] for s in sites if s.role == "embedding" and s.weight}
        self.first: dict[tuple[Hashable, str | None], str] = {}
        for item in recipe.overrides:
            if item.format not in (None, FLOAT):
                parse(str(item.format), group=None)
            if item.solver is not None:
                parts_of(item.solver)

    def decide(self, site: Site) -> Decision:
        """The decision for one site."""
        decision = Decision(site.name, site.weight_name, site.role, site.op, site.n, site.k)
        module = str(site.node.meta.get(MODULE) or "")
        decision = dataclasses.replace(decision, float_bytes=_float_bytes(site), module=module)
        refused = self._refusal(site)
        if refused is not None:
            return dataclasses.replace(decision, reason=refused[0], detail=refused[1])
        if site.name in self.adopted:
            return self._adopted(decision, site)
        if site.state in PACKED:
            return self._packed(decision, site)
        if site.state != "float":
            return decision
        wanted = self._wanted(site)
        if wanted is None:
            table = self.keys[site.name] in self.tables and self.embedding is None
            detail = "--embedding float" if table else "--set asks for float"
            return dataclasses.replace(decision, reason="EXCLUDED", detail=detail)
        fmt, solver = wanted
        fitted = self._fitted(fmt, site)
        decision = self._with_format(decision, site, fitted, solver)
        told = site.role == "linear" and self.recipe.group is not None
        if decision.quantized and decision.reason is None and fitted != fmt and told:
            detail = f"groups of {fitted.group}: {fmt.group} does not divide K = {site.k}"
            return dataclasses.replace(decision, reason="GROUP_ADJUSTED", detail=detail)
        return decision

    def _fitted(self, fmt: Format, site: Site) -> Format:
        """`fmt` with a group that divides the row, where the format was left to this plan."""
        table = self.keys[site.name] in self.tables
        auto = (self.recipe.embedding if table else self.recipe.format) == "auto"
        own = fmt == (self.embedding if table else self.default)
        return (
            dataclasses.replace(fmt, group=dividing_group(site.k, fmt.group))
            if auto and own
            else fmt
        )

    def _adopted(self, decision: Decision, site: Site) -> Decision:
        source = self.adopted[site.name]
        if isinstance(source, Refusal):
            return dataclasses.replace(decision, reason=source.code, detail=source.detail)
        decision = self._with_format(decision, site, source.format, ADOPTED)
        if decision.detail or not decision.quantized:
            return decision
        return dataclasses.replace(decision, detail="came quantized, kept code for code")

    def _packed(self, decision: Decision, site: Site) -> Decision:
        """A site that came in fused, or in the portable form, stays as it is."""
        if site.state == "portable":
            name = site.node.op_type.removeprefix("Linear").removeprefix("Dequantize").lower()
            fmt = name.rpartition("v")[0]
            return dataclasses.replace(
                decision, format=fmt, solver=KEPT, kernel=PORTABLE, detail="portable already"
            )
        query = query_of(site)
        return dataclasses.replace(
            decision,
            format=f"{'int' if query.symmetric else 'uint'}{query.bits}:group={query.block}",
            solver=KEPT,
            kernel=spell_kernel(query),
            detail="fused already",
        )

    def stored_bytes(self, site: Site) -> int:
        """What the site's weight takes in the model as it is."""
        source = self.adopted.get(site.name)
        if isinstance(source, AdoptedSource):
            return source.stored_bytes
        return site.weight.tensor.nbytes if site.weight is not None else 0

    def _with_format(self, decision: Decision, site: Site, fmt: Format, solver: str) -> Decision:
        assert site.weight is not None and site.dtype is not None
        fmt.validate(site.n, site.k)
        dtype = site.dtype
        answer, query = best_kernel(self.capabilities, site, fmt, self.recipe.accuracy_level)
        rule = answer.rule
        portable = self.recipe.unfused == "portable" and dtype.name in ("FLOAT", "FLOAT16")
        if rule is None and not portable:
            return dataclasses.replace(decision, reason=answer.reason, detail=answer.detail)
        spelled = fmt.spell()
        owner = self.first.setdefault((self.keys[site.name], spelled), site.name)
        shared = None if owner == site.name else owner
        bits = fmt.size_bits(site.k, dtype)
        decision = dataclasses.replace(
            decision,
            format=spelled,
            solver=solver,
            shared_with=shared,
            packed_bytes=round(bits * site.n * site.k / 8),
        )
        if rule is None:
            detail = f"{answer.reason}: {answer.detail}"
            return dataclasses.replace(
                decision, kernel=PORTABLE, reason="NO_FUSED_KERNEL", detail=detail
            )
        return dataclasses.replace(
            decision,
            kernel=spell_kernel(query),
            origin=rule.origin,
            reason=answer.reason,
            detail=answer.detail,
        )

    def _refusal(self, site: Site) -> tuple[str, str] | None:
        if site.refusal is not None:
            small = site.n * site.k < self.recipe.min_elements
            code = "WEIGHT_TOO_SMALL" if small and site.n else site.refusal.code
            return code, site.refusal.detail
        if site.state in PACKED:
            return None
        excluded = [t for t in self.recipe.exclude if Selector(t).matches(site, self.layers)]
        if excluded:
            return "EXCLUDED", f"--exclude {excluded[0]}"
        include = self.recipe.include
        if include and not any(Selector(t).matches(site, self.layers) for t in include):
            return "EXCLUDED", "no --include names it"
        if site.weight is None or site.state != "float":
            return None
        if site.weight.root.is_graph_output():
            return "GRAPH_OUTPUT", f"{site.weight_name} is an output of the graph"
        if site.n * site.k < max(1, self.recipe.min_elements):
            return "WEIGHT_TOO_SMALL", f"{site.n * site.k} elements"
        if site.dtype is None:
            return "DTYPE_HAS_NO_KERNEL", "the type of its activation is not known"
        return None

    def _wanted(self, site: Site) -> tuple[Format, str] | None:
        """Format and solver: the last override that names the site, else the recipe's."""
        table = self.keys[site.name] in self.tables
        fmt = self.embedding if table else self.default
        solver = self.recipe.solver
        for item in self.recipe.overrides:
            if Selector(item.selector).matches(site, self.layers):
                if item.format == FLOAT:
                    fmt = None
                elif item.format is not None:
                    fmt = _parse_with(item.format, self.recipe.group)
                solver = item.solver or solver
        if table:
            solver = "rtn"  # gathered rows have no Hessian, and a tied head shares their blob
        return None if fmt is None else (fmt, solver)


def _float_bytes(site: Site) -> int:
    """Bytes of the site's weight as floats, as stored or (already quantized) as computed."""
    constant = site.weight.root.const_value if site.weight is not None else None
    dtype = constant.dtype if constant is not None and site.state == "float" else site.dtype
    return (dtype.bitwidth if dtype is not None else 32) * site.n * site.k // 8


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


def require_known_options(recipe: Recipe) -> None:
    """Refuse `--option PASS.FIELD=VALUE` for a pass or field that does not exist."""
    for key in recipe.options:
        name, dot, field = key.partition(".")
        if not dot:
            raise InputError(f"--option {key!r}: wanted PASS.FIELD=VALUE")
        solver = name.removeprefix("quantize_")
        is_solver = solver != name and solver in registry.names("solver") and solver != "rtn"
        kind = registry.load("solver", solver) if is_solver else registry.load("pass", name)
        fields = [item.name for item in dataclasses.fields(kind)]
        if field not in fields:
            near = registry.did_you_mean(field, fields)
            raise InputError(
                f"pass {name} has no field {field!r}{near} (it has: {', '.join(fields) or 'none'})"
            )
