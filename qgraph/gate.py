"""What keeps a run of `optimize` from going on: a missing runtime, too little quantized."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.cache_kernels import require_cache_kernel
from qgraph.capabilities import Capabilities
from qgraph.decoder_graph import has_cache
from qgraph.decoder_head import require_head
from qgraph.errors import CoverageError, InputError, MissingExtra
from qgraph.graph import Graph
from qgraph.ort_versions import newest_read
from qgraph.plan import QuantPlan
from qgraph.recipe import FLOAT, Recipe
from qgraph.row_branches import MANY
from qgraph.run_notes import write_report
from qgraph.runtime_needs import restricted
from qgraph.traits import targets_with

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime


def capabilities_of(
    runtime: Runtime, target: str, recipe: Recipe, *, checked: bool
) -> Capabilities:
    """The kernels of a target, once it is clear that it can do what is asked of it.

    Raises:
        InputError: a cache is asked for and the target's attention has none, or none so rounded.
        MissingExtra: the result is to be checked and the runtime is not installed.
    """
    if recipe.add_cache and not runtime.traits.fuses_ops:
        raise InputError(
            f"--add-cache is for the targets {targets_with(lambda each: each.fuses_ops)}, whose "
            f"attention has a cache; the target is {target}"
        )
    if recipe.kv_cache:
        require_cache_kernel(recipe.kv_cache, target, available=runtime.available())
    if checked and not runtime.installed():
        raise MissingExtra(
            "onnxruntime", "cpu", "checking the result", "Or skip the check with --no-check."
        )
    return restricted(runtime.capabilities(), recipe)


def check_cache(graph: Graph, recipe: Recipe) -> None:
    """Refuse what is asked of a cache and cannot be, before any work.

    Raises:
        InputError: a cache is to be added where there is one, or rounded where there is none.
    """
    present = has_cache(graph.model)
    if recipe.add_cache and present:
        raise InputError(f"{graph.title} has a cache already: leave --add-cache out")
    if recipe.kv_cache and not present and not recipe.add_cache:
        raise InputError(
            f"--kv-cache: {graph.title} has no cache: add one with --add-cache, or export a "
            "decoder with past_key_values"
        )


def check_names(graph: Graph, recipe: Recipe) -> None:
    """Refuse, before any work, two nodes of which one is called as the other's copy would be.

    Raises:
        InputError: linears are to get second weights; the message names both.
    """
    if recipe.purpose != "both":
        return
    names = {node.name for node in graph.model.graph if node.name}
    for name in sorted(names):
        if name + MANY in names:
            raise InputError(
                f"--for both: node {name}{MANY} has the name that the copy of {name} for many rows "
                "would have: rename one of them"
            )


def check_head(graph: Graph, recipe: Recipe) -> None:
    """Refuse, before any work, a graph whose head cannot be given the last token alone.

    Raises:
        InputError: that is asked for; the message names what is in the way.
    """
    if recipe.last_logits:
        require_head(graph.model)


def check_opset(graph: Graph, runtime: Runtime, *, runs: bool) -> None:
    """Refuse, before any work, a graph whose opset or IR version the runtime here does not read.

    runs: whether it, or the result, is to run here. Only ONNX Runtime reads graphs by their opset;
        where the table says that it does not, it is asked itself: it may be newer than the table.

    Raises:
        InputError: it says what was found, and the newest that can be read.
    """
    if not (runs and runtime.traits.release_bound and runtime.available()):
        return
    capabilities = runtime.capabilities()
    opset, version = graph.model.opset_imports.get("", 1), graph.model.ir_version or 0
    newest, newest_version = newest_read(capabilities.oldest)
    if (opset <= newest and version <= newest_version) or _reads(runtime, opset, version):
        return
    is_opset = opset > newest
    found, limit = (opset, newest) if is_opset else (version, newest_version)
    kind = "opset" if is_opset else "IR version"
    way = f", as `qgraph capture --opset {limit}` does of a torch model" if is_opset else ""
    raise InputError(
        f"{graph.title} is of {kind} {found}, and {capabilities.runtime}, which is here, reads "
        f"{kind} {limit} at most: export it at {limit} or older{way}, or install a newer ONNX "
        "Runtime; --no-check, without data, writes it for one that is elsewhere"
    )


def _reads(runtime: Runtime, opset: int, version: int) -> bool:
    """Whether a runtime loads a graph of this opset and IR version, of one node."""
    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Identity", [x])
    y = node.outputs[0]
    y.name, y.shape, y.type = "y", x.shape, x.type
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": opset}, name="opset")
    try:
        runtime.load(ir.Model(graph, ir_version=version))
    except InputError:
        return False
    return True


def runtime_notes(runtime: Runtime, target: str, recipe: Recipe) -> list[str]:
    """What a run does without because the runtime of its target cannot run here."""
    capabilities = runtime.capabilities()
    notes = []
    if all(rule.origin == "predicted" for rule in capabilities.rules):
        notes.append(f"{capabilities.provider} is not installed here: its kernels are predicted")
    if recipe.fuse and runtime.traits.fuses_ops and not runtime.available():
        notes.append(
            f"norms, activations and attention stay as they are: each fused op is run beside what "
            f"it replaces, and {capabilities.provider} is not here (kernels of another provider "
            "prove nothing of it): optimize where it is installed, or for ort-cpu"
        )
    return notes


def require_coverage(
    plan: QuantPlan,
    recipe: Recipe,
    target: str,
    min_coverage: float,
    report: Path | None = None,
) -> None:
    """Refuse too little; the plan, with the reason of every site, goes to `report`.

    Raises:
        CoverageError: nothing is quantized, no linear has the format that was asked for, or the
            share of weights is below `min_coverage` (0 to 1).
    """
    coverage = plan.coverage
    nothing = not coverage.linears_quantized and not coverage.embeddings_quantized
    vain = _asked_in_vain(plan, recipe, target)
    nothing = nothing and recipe.format != FLOAT  # which fuses the graph alone
    if not nothing and not vain and coverage.share >= min_coverage:
        return
    where = "add --report plan.json, and `qgraph explain plan.json` says why, site by site"
    if report is not None:
        write_report(report, plan.to_json())
        where = f"`qgraph explain {report}` says why, site by site"
    line = coverage.line("would quantize")
    if nothing:
        raise CoverageError(f"nothing was quantized: {line}; {where}")
    if vain:
        raise CoverageError(f"{vain}; {where}")
    raise CoverageError(f"{line}: below --min-coverage {min_coverage:.0%}; {where}")


def _asked_in_vain(plan: QuantPlan, recipe: Recipe, target: str) -> str:
    """What is said of a format that was asked for and that no linear can have."""
    wanted = [i for i in plan.decisions if i.role == "linear" and i.reason != "EXCLUDED"]
    lost = [item for item in wanted if not item.quantized and item.reason == "NO_FUSED_KERNEL"]
    if recipe.format in ("auto", FLOAT) or not lost or any(item.quantized for item in wanted):
        return ""
    return (
        f"no linear can be held in {recipe.format} for {target}: {lost[0].detail} "
        f"({len(lost)} × NO_FUSED_KERNEL); choose another --format or --target, or "
        "--unfused portable"
    )
