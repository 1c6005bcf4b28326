"""Making the plan: what the recipe asks of each site, and which kernel the target has for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from qgraph.adopted import ADOPTED, AdoptedSource, adopt
from qgraph.capabilities import Capabilities
from qgraph.checkpoint_source import CheckpointSource
from qgraph.errors import InputError
from qgraph.formats.base import Format, named, parse
from qgraph.kernel_choice import (
    PORTABLE,
    dividing_group,
    format_of,
    query_of,
    spell_kernel,
)
from qgraph.plan import IMPORTED, KEPT, Decision, QuantPlan
from qgraph.recipe import FLOAT, Recipe
from qgraph.rounded_activations import (
    are_multiplied,
    require_rounded,
    weights_of,
)
from qgraph.selectors import MODULE, Selector, check, layer_count
from qgraph.shared_weights import weight_keys
from qgraph.site_kernels import SiteKernels, float_bytes
from qgraph.sites import PACKED, Refusal, Site
from qgraph.solver_names import parts_of
from qgraph.wanted_format import embedding_format, parse_with, wanted_format
from qgraph.weight_copies import with_costs
from qgraph.wording import counted

ADJUSTED = "GROUP_ADJUSTED"
_QUANTIZED = ("qdq", "dequantize")


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
        tuple(with_costs(decisions, sites, planner.keys, planner.stored_bytes)),
    )


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
        self.default = wanted_format(recipe, capabilities.traits)
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
        self.kernels = SiteKernels(recipe, capabilities, self.keys)
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
        decision = dataclasses.replace(decision, float_bytes=float_bytes(site), module=module)
        refused = self._refusal(site)
        if refused is not None:
            return dataclasses.replace(decision, reason=refused[0], remark=refused[1])
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
            return dataclasses.replace(decision, reason="EXCLUDED", remark=detail)
        fmt, solver = wanted
        fitted = self._fitted(fmt, site)
        decision = self._with_format(decision, site, fitted, solver)
        told = site.role == "linear" and self.recipe.group is not None
        if decision.quantized and decision.reason is None and fitted != fmt and told:
            detail = f"groups of {fitted.group}: {fmt.group} does not divide K = {site.k}"
            return dataclasses.replace(decision, reason=ADJUSTED, remark=detail)
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
            return dataclasses.replace(decision, reason=source.code, remark=source.detail)
        decision = self._with_format(decision, site, source.format, ADOPTED)
        if decision.detail or not decision.quantized:
            return decision
        return dataclasses.replace(decision, remark="came quantized, kept code for code")

    def _imported(
        self, decision: Decision, site: Site, source: CheckpointSource | None
    ) -> Decision:
        if source is None:
            detail = "not among the checkpoint's quantized weights"
            return dataclasses.replace(decision, reason="FLOAT_IN_CHECKPOINT", remark=detail)
        if source.order is not None and site.role == "embedding":
            raise InputError(f"{site.name}: {source.name} is in act order, which no table can be")
        decision = self._with_format(decision, site, source.format, IMPORTED)
        if not decision.quantized:
            return decision
        more = f"; {decision.detail}" if decision.detail else ""
        return dataclasses.replace(decision, remark=f"{source.part}, code for code{more}")

    def _packed(self, decision: Decision, site: Site) -> Decision:
        """A site that came in fused, or in the portable form, stays as it is."""
        if site.state == "portable":
            fmt = named(site.node.op_type.replace("Linear", "Dequantize", 1))
            spelled = fmt.spell(with_group=False) if fmt is not None else site.node.op_type
            return dataclasses.replace(
                decision, format=spelled, solver=KEPT, kernel=PORTABLE, remark="portable already"
            )
        query = query_of(site)
        return dataclasses.replace(
            decision,
            format=format_of(query),
            solver=KEPT,
            kernel=spell_kernel(query),
            remark="fused already",
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
        return self.kernels.decide(decision, site, fmt, solver, self._activations(site, fmt))

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
            return "WEIGHT_TOO_SMALL", counted(site.n * site.k, "element")
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
                    fmt = parse_with(item.format, self.recipe.group)
                elif item.activations not in (None, FLOAT):
                    fmt = weights_of(item.activations)
                solver = item.solver or solver
        own = site.role == "head" and self.rounded.get(site.name, FLOAT) != FLOAT
        if (table and not own) or site.role == "experts":
            solver = "rtn"  # gathered rows have no Hessian, and a tied head shares their blob
        return None if fmt is None else (fmt, solver)
