"""Let sites read the weights of a checkpoint, code for code."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.checkpoint_source import CheckpointSource
from qgraph.constants import open_array
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from, written
from qgraph.passes.fold_order import find_order_fold
from qgraph.passes.gathered import gather_channels
from qgraph.plan import IMPORTED
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site


@dataclasses.dataclass(frozen=True)
class ImportWeights(Pass):
    """Each planned site reads the checkpoint's integers in place of its float constant.

    before:  y = MatMul(x, W)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    in act order, the linears in front give their rows in it, where nothing else reads them;
    else the activation's channels are gathered: y = MatMul(Gather <axis = -1> (x, order), t)
    """

    name: ClassVar[str] = "import_weights"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Write every site whose decision says so; sites that share a weight share its source."""
        if not context.findings.imported:
            return []
        rewriter = Rewriter(graph.model)
        chosen = [site for site in graph.sites() if _is_chosen(site, context)]
        sources = {site.name: context.findings.imported[_owner(site, context)] for site in chosen}
        steps = _ordered(chosen, sources, context, rewriter)
        writer = DequantizeWriter(rewriter)
        for site in chosen:
            decision = context.plan[site.name]
            source = sources[site.name]
            read_from(writer.write(source), site, rewriter)
            step = written(self.name, site, decision, source, decision.detail)
            steps.append(dataclasses.replace(step, error=0.0))
        for site in chosen:
            root = site.weight.root if site.weight is not None else None
            if root is not None and (root.uses() or root.is_graph_output()):  # others read floats
                _give_floats(site, context.findings.imported[site.name])
        left = [site for site in graph.sites() if _is_left(site, context)]
        return steps + [_dequantized(site, context) for site in left]


def _is_chosen(site: Site, context: Context) -> bool:
    decision = context.plan.of(site.name)
    return site.state == "float" and decision is not None and decision.solver == IMPORTED


def _is_left(site: Site, context: Context) -> bool:
    """Whether the checkpoint has the site's weight, and it stays in float all the same."""
    return (
        site.name in context.findings.imported
        and site.state == "float"
        and not _is_chosen(site, context)
    )


def _dequantized(site: Site, context: Context) -> Step:
    """Leave the site in float, with the checkpoint's numbers."""
    _give_floats(site, context.findings.imported[site.name])
    decision = context.plan[site.name]
    size, words = decision.float_bytes, f"the checkpoint's numbers as floats: {decision.detail}"
    return Step(
        ImportWeights.name, "dequantize", site.name, "kept", decision.reason, words, size, size
    )


def _give_floats(site: Site, source: CheckpointSource) -> None:
    """Let the constant behind the site's weight hold what the checkpoint says: it may be other."""
    assert site.weight is not None
    weight, before = site.weight, site.weight.tensor

    def values() -> ir.TensorProtocol:
        array = np.array(open_array(before))
        for start, stop in source.blocks():
            weight.put(array, start, stop, source.dequantized(start, stop))
        return ir.tensor(array, dtype=before.dtype, name=before.name)

    shape = ir.Shape(weight.dims)
    weight.root.const_value = ir.LazyTensor(values, before.dtype, shape, name=before.name)


def _owner(site: Site, context: Context) -> str:
    return context.plan[site.name].shared_with or site.name


def _ordered(
    chosen: Sequence[Site],
    sources: dict[str, CheckpointSource],
    context: Context,
    rewriter: Rewriter,
) -> list[Step]:
    """Have activations in the order of the columns that they meet: by rows in front, or gathered.

    sources: those of the linears in front are replaced by ones with permuted rows.
    """
    groups: dict[tuple[int, bytes], list[Site]] = {}
    for site in chosen:
        order = sources[site.name].order
        if order is not None:
            groups.setdefault((id(site.activation), order.tobytes()), []).append(site)
    owners = Counter(_owner(site, context) for site in chosen)
    free = {
        id(site.node): site
        for site in chosen
        if site.role == "linear"
        and owners[_owner(site, context)] == 1
        and sources[site.name].can_permute
    }
    gathers: dict[tuple[int, bytes], ir.Value] = {}
    steps = []
    context.findings.permuted.clear()
    for readers in groups.values():
        order = sources[readers[0].name].order
        assert order is not None
        fold = find_order_fold(readers[0].activation, readers, free)
        if isinstance(fold, str):
            words = f"the activation's channels are gathered: {fold}"
            for site in readers:
                gather_channels(site, order, rewriter, gathers)
        else:
            words = f"rows of {', '.join(site.name for site in fold.sites)} lie in this order"
            fold.permute_constants(order)
            for site in fold.sites:
                sources[site.name] = sources[site.name].permuted(order)
                context.findings.permuted[site.name] = readers[0].name
                del free[id(site.node)]
        steps += [
            Step(ImportWeights.name, "act order", site.name, "done", None, words)
            for site in readers
        ]
    return steps
