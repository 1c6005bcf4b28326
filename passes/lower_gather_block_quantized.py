"""Fuse the embedding's dequantize-then-gather into ONNX Runtime's GatherBlockQuantized."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import Query
from qgraph.graph import Graph
from qgraph.kernel_choice import layout_of, spell_kernel
from qgraph.kernel_ops import GATHER_BLOCK_QUANTIZED, KERNEL_OPS
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.site_lowering import CannotFuse, check_view, chosen, place
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes
from qgraph.sites import CONTRIB, QGRAPH_DOMAIN, Site

_OP = KERNEL_OPS[GATHER_BLOCK_QUANTIZED]


@dataclasses.dataclass(frozen=True)
class LowerGatherBlockQuantized(Pass):
    """Gather rows of the packed table; a tied head reads the same blob.

    before:  w = qgraph::DequantizeUint8V1 (codes, scales, zeros)
             y = Gather(w, ids)
    after:   table = Reshape(codes, [N, -1])
             y = com.microsoft::GatherBlockQuantized <bits, block_size> (table, ids, scales, zeros)
             (and a Slice to K where the last block is partial)
    """

    name: ClassVar[str] = "lower_gather_block_quantized"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse every embedding that reads a dequantized table."""
        if not any(node.domain == QGRAPH_DOMAIN for node in nodes(graph.model.graph)):
            return []
        rewriter = Rewriter(graph.model)
        parts = PackedParts(rewriter)
        steps = []
        for site in graph.sites():
            if not is_lazy(site.dequantizer) or not site.gathers:
                continue
            try:
                query = _choose(site, context)
                if query.op != GATHER_BLOCK_QUANTIZED:
                    continue  # another lowering's
                check_view(site)
            except CannotFuse as refused:
                code, detail = refused.args
                steps.append(Step(self.name, _OP.op_type, site.name, "refused", code, detail))
                continue
            fused = _fused(site, query, parts, rewriter)
            if site.scope is not graph.model.graph:  # in a Loop it would be copied at each turn
                table = fused.pop(0)
                graph.model.graph.insert_before(next(iter(graph.model.graph)), [table])
            place(site, fused, _OP.op_type, rewriter)
            rule = f"{site.op} → {_OP.op_type}"
            steps.append(Step(self.name, rule, site.name, "done", None, spell_kernel(query)))
        return steps


def _choose(site: Site, context: Context) -> Query:
    answer, query = chosen(site, context)
    if not answer:
        raise CannotFuse(answer.reason, answer.detail)
    return query


def _fused(site: Site, query: Query, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)
    packed = parts.get(source, layout_of(source.format, query))
    rows = rewriter.constant(f"{site.name}/rows", np.array([site.n, -1], np.int64))
    table = rewriter.node("Reshape", [packed["codes"], rows], name=f"{site.name}/table")
    gather = rewriter.node(
        _OP.op_type,
        _OP.arranged({**packed, "codes": table.outputs[0]}, x=site.activation),
        name=f"{site.name}/fused",
        domain=CONTRIB,
        attributes={**_OP.defaults, "bits": query.bits, "block_size": query.block},
        dtype=site.dtype,
    )
    nodes = [table, gather]
    if site.k % query.block:
        bounds = [
            rewriter.constant(f"{site.name}/{what}", np.array([value], np.int64))
            for what, value in (("start", 0), ("stop", site.k), ("axis", -1))
        ]
        last: list[ir.Value | None] = [gather.outputs[0], *bounds]
        nodes.append(rewriter.node("Slice", last, name=f"{site.name}/slice", dtype=site.dtype))
    return nodes
