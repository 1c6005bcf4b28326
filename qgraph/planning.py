"""Making the plan: what the recipe asks of each site, and which kernel the target has for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from qgraph import registry
from qgraph.adopted import ADOPTED, AdoptedSource, adopt
from qgraph.capabilities import DEQUANTIZE_LINEAR, OWN_DEQUANTIZE, Capabilities, Query
from qgraph.checkpoint_source import CheckpointSource
from qgraph.errors import InputError
from qgraph.formats.base import Format, Layout, named, parse
from qgraph.kernel_choice import (
    EXPERTS_COST,
    FOLDING_ENTRY,
    NO_LOOPS,
    PORTABLE,
    PORTABLE_COST,
    best_kernel,
    dividing_group,
    format_of,
    is_portable,
    layout_of,
    query_of,
    spell_kernel,
)
from qgraph.plan import IMPORTED, KEPT, Decision, QuantPlan
from qgraph.recipe import FLOAT, FP8_ACTIVATIONS, Recipe
from qgraph.rounded_activations import (
    FP8_WORDS,
    are_multiplied,
    require_rounded,
    weights_of,
)
from qgraph.selectors import MODULE, Selector, check, layer_count
from qgraph.shared_weights import other_readers, reads_root_of, weight_keys
from qgraph.sites import PACKED, Refusal, Site
from qgraph.solver_names import parts_of

BEST_4_BIT = "uint4"
SYMMETRIC_4_BIT = "int4"
"""CUDA's fast kernels take no zero points."""
DEFAULT_GROUP = 64
"""Measured on SmolLM2-135M with its channels off the Q4_1 grid: see tests/benchmarks/results."""
BEST_EMBEDDING = "int8"
_QUANTIZED = ("qdq", "dequantize")
_LARGER = "LARGER_THAN_FORMAT"
"""What a weight carries that is held as the larger integers that a fast kernel reads."""


def make_plan(
    sites: Sequence[Site],
    recipe: Recipe,
    capabilities: Capabilities,
    imported: Mapping[str, CheckpointSource] | None = None,
    chosen: Mapping[str, str] | None = None,
    rounded: Mapping[str, str] | None = None,
) -> QuantPlan:
    """Decide for every site.

    imported: the weights that a checkpoint brings, by site; float weights without one stay so.
    chosen: site → spelled format or `float`, in place of the recipe's own format (of an embedding
        where that is `auto`); overrides win.
    rounded: site → what its activations are rounded to, in place of the recipe's; overrides win.

    Raises:
        InputError: a selector that matches nothing, an unknown format, solver or option, or
            `dequantize_at_load` for a target that computes nothing at load.
    """
    parts_of(recipe.solver)
    if recipe.dequantize_at_load and not capabilities.folds:
        raise InputError(
            f"--dequantize-at-load: {capabilities.runtime} dequantizes at each call, not when it "
            "loads a model: use --target ort-cpu, ort-cuda or qdq, or leave the option out"
        )
    check(recipe.selectors, sites)
    planner = _Planner(sites, recipe, capabilities, imported, chosen or {}, rounded or {})
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
        floats = [other.name for other in kept if other.weight and reads_root_of(other, site)]
        floats += [other.site for other in same if other.format is None]
        floats += [] if floats else other_readers(site, on_the_way)
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


def wanted_format(recipe: Recipe, target: str) -> Format | None:
    """The recipe's format with its group; `auto` is the best 4-bit format of the target.

    None for `float`: the graph is fused, and its weights stay as they are.

    With rounded activations it is `int8-pairs`, which integer kernels read fastest, or FP8.

    Raises:
        InputError: another format or group was asked for beside rounded activations.
    """
    if recipe.activations != FLOAT:
        auto = recipe.format == "auto"
        if auto and not recipe.group:
            return weights_of(recipe.activations)
        found = parse(BEST_4_BIT if auto else recipe.format, group=recipe.group)
        require_rounded(found, recipe.activations, f"--activations {recipe.activations}")
        return found
    if recipe.format == FLOAT and recipe.purpose:
        raise InputError(
            f"--format float keeps the weights, and --for {recipe.purpose} chooses what becomes of "
            "them: give one of them"
        )
    if recipe.format == FLOAT:
        return None
    if recipe.format == "auto":
        best = SYMMETRIC_4_BIT if target == "ort-cuda" else BEST_4_BIT
        return parse(best, group=DEFAULT_GROUP if recipe.group is None else recipe.group)
    return parse(recipe.format, group=recipe.group)


def embedding_format(recipe: Recipe) -> Format | None:
    """The format of embedding tables and of the heads tied to them; None for float."""
    group = DEFAULT_GROUP if recipe.group is None else recipe.group
    if recipe.embedding == FLOAT or (recipe.embedding == "auto" and recipe.format == FLOAT):
        return None
    text = recipe.embedding
    return _parse_with(BEST_EMBEDDING if text == "auto" else text, group)


def _parse_with(text: str, group: int | None) -> Format:
    """The format that `text` spells, at `group` unless the text names one."""
    takes = "group" in parse(text).options and "group=" not in text
    return parse(text, group=group if takes else None)


class _Planner:
    def __init__(
        self,
        sites: Sequence[Site],
        recipe: Recipe,
        capabilities: Capabilities,
        imported: Mapping[str, CheckpointSource] | None,
        chosen: Mapping[str, str],
        rounded: Mapping[str, str],
    ) -> None:
        self.recipe, self.chosen, self.rounded = recipe, chosen, rounded
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
        self.imported = imported
        self.keys |= {name: source.key for name, source in (imported or {}).items()}
        self.tables = {self.keys[s.name] for s in sites if s.role == "embedding" and s.weight}
        self.first: dict[tuple[Hashable, str | None], str] = {}
        for item in recipe.overrides:
            if item.format not in (None, FLOAT):
                parse(str(item.format), group=None)
            if item.solver is not None:
                parts_of(item.solver)
            if item.activations not in (None, FLOAT) and item.format is not None:
                asked = f"--set activations={item.activations}"
                require_rounded(parse(item.format), str(item.activations), asked)

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
        if self.imported is not None:
            return self._imported(decision, site, self.imported.get(site.name))
        wanted = self._wanted(site)
        if wanted is None:
            table = self.keys[site.name] in self.tables and self.embedding is None
            option = "--embedding float" if table else "--set asks for float"
            detail = "--format float" if self.default is None else option
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

    def _imported(
        self, decision: Decision, site: Site, source: CheckpointSource | None
    ) -> Decision:
        if source is None:
            detail = "not among the checkpoint's quantized weights"
            return dataclasses.replace(decision, reason="FLOAT_IN_CHECKPOINT", detail=detail)
        if source.order is not None and site.role == "embedding":
            raise InputError(f"{site.name}: {source.name} is in act order, which no table can be")
        decision = self._with_format(decision, site, source.format, IMPORTED)
        if not decision.quantized:
            return decision
        more = f"; {decision.detail}" if decision.detail else ""
        return dataclasses.replace(decision, detail=f"{source.part}, code for code{more}")

    def _packed(self, decision: Decision, site: Site) -> Decision:
        """A site that came in fused, or in the portable form, stays as it is."""
        if site.state == "portable":
            fmt = named(site.node.op_type.replace("Linear", "Dequantize", 1))
            spelled = fmt.spell(with_group=False) if fmt is not None else site.node.op_type
            return dataclasses.replace(
                decision, format=spelled, solver=KEPT, kernel=PORTABLE, detail="portable already"
            )
        query = query_of(site)
        return dataclasses.replace(
            decision,
            format=format_of(query),
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

    def _activations(self, site: Site, fmt: Format) -> str:
        """What the site multiplies: as the last override says, else as the recipe; heads floats."""
        found = self.recipe.activations if site.role == "linear" else FLOAT
        found = self.rounded.get(site.name, found)
        for item in self.recipe.overrides:
            if Selector(item.selector).matches(site, self.layers):
                found = item.activations or found
        return found if site.role != "embedding" and are_multiplied(fmt, found) else FLOAT

    def _with_format(self, decision: Decision, site: Site, fmt: Format, solver: str) -> Decision:
        assert site.weight is not None and site.dtype is not None
        fmt.validate(site.n, site.k)
        if site.role == "experts" and self.capabilities.target in NO_LOOPS:
            detail = NO_LOOPS[self.capabilities.target]
            return dataclasses.replace(decision, reason="NO_FUSED_KERNEL", detail=detail)
        dtype = site.dtype
        activations = self._activations(site, fmt)
        # FP8 activations are floats again before any kernel reads them.
        read = FLOAT if activations in FP8_ACTIVATIONS else activations
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
            return dataclasses.replace(decision, reason=answer.reason, detail=answer.detail)
        outliers = min(self.recipe.outliers, site.k - 1) if read != FLOAT else 0
        if outliers and query.op == DEQUANTIZE_LINEAR:
            raise InputError(
                f"--outliers {self.recipe.outliers}: a Q/DQ graph for {self.capabilities.target} "
                "quantizes whole activations; use --target ort-cpu, or leave it out"
            )
        spelled = fmt.spell()
        owner = self.first.setdefault((self.keys[site.name], spelled), site.name)
        shared = None if owner == site.name else owner
        layout = fmt.default_layout if rule is None else layout_of(fmt, query)
        decision = dataclasses.replace(
            decision,
            format=spelled,
            solver=solver,
            shared_with=shared,
            packed_bytes=_bytes(site, fmt, layout) + outliers * site.n * dtype.bitwidth // 8,
            activations=None if activations == FLOAT else activations,
            outliers=outliers,
        )
        if rule is None:
            known = answer.reason == "NO_FUSED_KERNEL"
            detail = answer.detail if known else f"{answer.reason}: {answer.detail}"
            cost = EXPERTS_COST if site.role == "experts" else PORTABLE_COST
            detail += f"; {cost}{self._faster(site, fmt)}"
            return dataclasses.replace(
                decision, kernel=PORTABLE, reason="NO_FUSED_KERNEL", detail=detail
            )
        price = self._price(site, fmt, layout)
        detail = self._at_load(site, query) or answer.detail or price
        return dataclasses.replace(
            decision,
            kernel=spell_kernel(query),
            origin=rule.origin,
            reason=self._remark(activations) or answer.reason or (_LARGER if price else None),
            detail="; ".join(each for each in (FP8_WORDS.get(activations), detail) if each),
        )

    def _remark(self, activations: str) -> str | None:
        """What rounding activations costs where the target has no products of them."""
        simulated = activations in FP8_ACTIVATIONS and self.capabilities.simulates_fp8
        return "ACTIVATION_SIMULATED" if simulated else None

    def _faster(self, site: Site, fmt: Format) -> str:
        """Which larger form a kernel would read, where size was preferred."""
        if self.recipe.prefer == "speed" or fmt.as_integers is None:
            return ""
        answer, query = best_kernel(self.capabilities, site, fmt, self.recipe.accuracy_level)
        if not answer:
            return ""
        size = _bytes(site, fmt, layout_of(fmt, query)) / 1e6
        return f"; --prefer speed: {spell_kernel(query)}, {size:.2f} MB"

    def _at_load(self, site: Site, query: Query) -> str:
        """What becoming floats at load costs, or wants of the session."""
        if not self.recipe.dequantize_at_load:
            return ""
        if query.op == OWN_DEQUANTIZE:
            return f"floats at load: {_float_bytes(site) / 1e6:.2f} MB in memory"
        named_entry = query.op == DEQUANTIZE_LINEAR
        return f"floats at load with the session entry {FOLDING_ENTRY}" if named_entry else ""

    def _price(self, site: Site, fmt: Format, layout: Layout) -> str:
        """What it costs to be written as integers that a kernel reads."""
        if layout.kind != "nbits8":
            return ""
        asked, packed = _bytes(site, fmt, layout), _bytes(site, fmt, fmt.default_layout)
        return (
            f"as 8-bit integers, exactly: {asked / 1e6:.2f} MB; --prefer size: "
            f"{packed / 1e6:.2f} MB, dequantized at each call"
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
        if site.name in self.chosen and (not table or self.recipe.embedding == "auto"):
            spelled = self.chosen[site.name]
            fmt = None if spelled == FLOAT else parse(spelled)
        solver = self.recipe.solver
        for item in self.recipe.overrides:
            if Selector(item.selector).matches(site, self.layers):
                if item.format == FLOAT:
                    fmt = None
                elif item.format is not None:
                    fmt = _parse_with(item.format, self.recipe.group)
                elif item.activations not in (None, FLOAT):
                    fmt = weights_of(item.activations)
                solver = item.solver or solver
        own = site.role == "head" and self.rounded.get(site.name, FLOAT) != FLOAT
        if (table and not own) or site.role == "experts":
            solver = "rtn"  # gathered rows have no Hessian, and a tied head shares their blob
        return None if fmt is None else (fmt, solver)


def _bytes(site: Site, fmt: Format, layout: Layout) -> int:
    """What the site's weight takes in a layout."""
    assert site.dtype is not None
    specs = fmt.parts(site.n, site.k, site.dtype, layout)
    return sum(spec.nbytes for spec in specs.values())


def _float_bytes(site: Site) -> int:
    """Bytes of the site's weight as floats, as stored or (already quantized) as computed."""
    constant = site.weight.root.const_value if site.weight is not None else None
    dtype = constant.dtype if constant is not None and site.state == "float" else site.dtype
    return (dtype.bitwidth if dtype is not None else 32) * site.n * site.k // 8


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
