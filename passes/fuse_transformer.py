"""Rewrite what exporters spell out into the fused ops of ONNX Runtime, each proven at its site."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import onnx_ir as ir

from qgraph.capabilities import NEWER, came_later
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.passes.attention_lengths import unify_lengths
from qgraph.passes.base import Context, Pass
from qgraph.passes.fold_constants import fold_constants
from qgraph.passes.fold_shapes import fold_shapes
from qgraph.passes.fuse_activation import activation
from qgraph.passes.fuse_attention import attention
from qgraph.passes.fuse_bias import linear_bias
from qgraph.passes.fuse_norms import norms
from qgraph.passes.fuse_skip_norm import skip_norm
from qgraph.passes.fusion import POSITIONS, Builder, Candidate, Fusion, FusionContext, Miss
from qgraph.passes.fusion_check import FusionCheck
from qgraph.passes.infer_dims import infer_dims
from qgraph.passes.merge_linears import merge_linears
from qgraph.passes.packed_linear import is_product
from qgraph.passes.undeclared import undeclared
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.runtime_needs import late_nodes

FUSIONS: tuple[Fusion, ...] = (
    norms,
    linear_bias,
    activation,
    attention,
    skip_norm,
    merge_linears,
)
"""All fusions, in order: later ones see what earlier ones made."""
_MOST = 1 << 22


@dataclasses.dataclass(frozen=True)
class FuseTransformer(Pass):
    """Norms, activations, attention: many small ops become one.

    before:  s = Pow(x, 2); m = ReduceMean(s, -1); … y = Mul(w, Mul(x, Reciprocal(Sqrt(…))))
    after:   y = SimplifiedLayerNormalization(x, w)

    positions: how many positions rotary tables have; a token beyond them is refused at run time.
    """

    name: ClassVar[str] = "fuse_transformer"
    positions: int = POSITIONS

    def __post_init__(self) -> None:
        """Refuse tables without a row, and those that no runtime would hold."""
        if not 0 < self.positions <= _MOST:
            raise InputError(
                f"fuse_transformer.positions={self.positions}: rotary tables have 1 to {_MOST} "
                "positions"
            )

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse what is proven to compute the same; what is not stays, with a reason."""
        if context.evaluate is None or not context.plan.recipe.fuse:
            return []
        context.findings.merged.clear()
        with undeclared(graph.model.graph) as complete:
            return self._fused(graph, context, complete)

    def _fused(self, graph: Graph, context: Context, complete: Callable[[], None]) -> list[Step]:
        assert context.evaluate is not None  # `run` has looked
        shared = FusionContext(
            Rewriter(graph.model),
            context.capabilities,
            context.findings,
            positions=self.positions,
        )
        fold_constants(shared.rewriter, context.evaluate)
        elements = infer_dims(graph.model.graph)
        if unify_lengths(graph.model.graph):
            elements = infer_dims(graph.model.graph)
        if fold_shapes(shared.rewriter, elements):
            graph.model.graph.sort()
            fold_constants(shared.rewriter, context.evaluate)
        complete()
        check = FusionCheck(graph.model, context.evaluate)
        steps: list[Step] = []
        for fusion in FUSIONS:
            for found in fusion(graph.model, shared):
                if isinstance(found, Miss):
                    steps.append(_missed(found, shared))
                    continue
                beside = [_missed(found.missed, shared)] if found.missed is not None else []
                steps.append(_apply(found, shared, check))
                steps += beside if steps[-1].outcome == "done" else []
        kept = (step for step in steps if step.outcome == "kept" and step.rule == "attention")
        context.findings.unfused = {step.site: step.detail for step in kept}
        if any(step.outcome == "done" for step in steps):
            graph.model.graph.sort()
        return steps


def _missed(miss: Miss, shared: FusionContext) -> Step:
    code, detail = "FUSION_MISSED", f"nearest: {miss.nearest}; {miss.edge}"
    if miss.since is not None:
        newer = came_later(miss.nearest, miss.since, shared.capabilities.oldest)
        code, detail = NEWER, f"{newer}: {miss.edge}"
    return Step(FuseTransformer.name, miss.fusion, _name(miss.node), "kept", code, detail)


def _apply(candidate: Candidate, shared: FusionContext, check: FusionCheck) -> Step:
    """Make the new nodes, prove them, and put them in place of the old ones or take them away."""
    name, into = _name(candidate.node), candidate.into
    outside = [value for value in candidate.outputs if _graph_of(value) is not candidate.node.graph]
    if outside:
        edge = f"{outside[0].name} is made in another body than {name}"
        miss = Miss(candidate.fusion, candidate.node, f"{into} within one body", edge)
        return _missed(miss, shared)
    made: list[tuple[Candidate, Builder, Sequence[ir.Value]]] = []
    for each in (candidate, *candidate.parts):
        builder = Builder(shared, each.node)
        made.append((each, builder, each.build(builder, each.inputs)))
        code, why = _refused(each, builder.made, made[-1][-1], shared, check)
        if why:
            for _, builder, _ in made:
                shared.rewriter.drop_unused(builder.made)
            detail = f"{each.into}: {why}"
            return Step(FuseTransformer.name, candidate.fusion, name, "kept", code, detail)
    for each, builder, new in made:
        _put(each, builder, new, shared)
    merged = next((each.merged for each, _, _ in made if each.merged), ())
    was = f"{len(merged)} linears" if merged else candidate.node.op_type
    kept = "" if candidate.node.graph is None else "; the old node is read elsewhere"
    detail = f"{was} → {into}{f': {candidate.reason}' if candidate.reason else ''}{kept}"
    return Step(FuseTransformer.name, candidate.fusion, name, "done", None, detail)


def _refused(
    candidate: Candidate,
    made: Sequence[ir.Node],
    new: Sequence[ir.Value],
    shared: FusionContext,
    check: FusionCheck,
) -> tuple[str, str]:
    """The reason code and why new nodes cannot be taken; nothing where they can."""
    oldest = shared.capabilities.oldest
    late = late_nodes(made, oldest)
    if late is None:
        return "FUSION_FAILED_CHECK", check(candidate, new).why
    since, what = late
    return NEWER, came_later(what, since, oldest)


def _put(
    candidate: Candidate, builder: Builder, new: Sequence[ir.Value], shared: FusionContext
) -> None:
    """Put the new nodes in place of the old ones."""
    if candidate.merged:
        linear = next(node for node in builder.made if is_product(node))
        shared.findings.merged[str(linear.name)] = candidate.merged
    old = list(_region(candidate.outputs, candidate.inputs))
    _replace(candidate, new, shared.rewriter)
    shared.made[_producer(new[0])] = candidate
    shared.rewriter.drop_unused(old)


def _replace(candidate: Candidate, new: Sequence[ir.Value], rewriter: Rewriter) -> None:
    """Let the readers of the old outputs read the new ones, which take over names and types."""
    for before, after in zip(candidate.outputs, new, strict=True):
        name, kind, shape = before.name, before.type, before.shape
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        before.name = rewriter.unique(f"{name}/before")
        after.name = name
        after.type, after.shape = kind or after.type, shape or after.shape
    producer, name = _producer(new[0]), candidate.node.name
    candidate.node.name, producer.name = producer.name, name


def _graph_of(value: ir.Value) -> ir.Graph | None:
    """The graph, or the body of a node, that a value is made in."""
    producer = value.producer()
    found = producer.graph if producer is not None else None
    return found if isinstance(found, ir.Graph) else None


def _producer(value: ir.Value) -> ir.Node:
    producer = value.producer()
    assert producer is not None, "a fusion makes nodes"
    return producer


def _region(outputs: Sequence[ir.Value], inputs: Sequence[ir.Value]) -> Iterator[ir.Node]:
    """The nodes between `inputs` and `outputs`, each before its readers."""
    order: dict[ir.Node, None] = {}
    stop = set(inputs)
    pending = [node for value in outputs if (node := value.producer()) is not None]
    while pending:
        node = pending[-1]
        needed = [
            made
            for value in node.inputs
            if value is not None and value not in stop
            and (made := value.producer()) is not None and made not in order
        ]  # fmt: skip
        if node in order or not needed:
            order[node] = None
            pending.pop()
        else:
            pending += needed
    return iter(order)


def _name(node: ir.Node) -> str:
    return node.name or node.op_type
