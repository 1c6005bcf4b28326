"""Fuse dequantize-then-multiply of bitsandbytes' levels into ONNX Runtime's MatMulBnb4."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from qgraph.capabilities import Query
from qgraph.graph import Graph
from qgraph.kernel_choice import BNB4_TYPES, layout_of
from qgraph.kernel_ops import KERNEL_OPS, MATMUL_BNB4
from qgraph.passes.base import Context, PackedParts, Pass, source_of
from qgraph.passes.site_lowering import around, lower_linears
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import CONTRIB, Site

_OP = KERNEL_OPS[MATMUL_BNB4]


@dataclasses.dataclass(frozen=True)
class LowerMatMulBnb4(Pass):
    """One fused op per linear, for blocks that divide the rows.

    before:  w = qgraph::DequantizeNf4V1 (codes, scales)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    after:   y = com.microsoft::MatMulBnb4 <K, N, block_size = 64, quant_type = 1>
                 (x, codes, scales)                    codes u8 [N·K/2], scales [N·K/64]
    """

    name: ClassVar[str] = "lower_matmul_bnb4"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse every linear whose best kernel this is."""
        rewriter = Rewriter(graph.model)
        parts = PackedParts(rewriter)

        def fuse(site: Site, query: Query) -> list[ir.Node]:
            return _fused(site, query, parts, rewriter)

        return lower_linears(self.name, graph, context, (MATMUL_BNB4,), fuse, rewriter)


def _fused(site: Site, query: Query, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    """MatMulBnb4 with a bias behind it."""
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)

    def fuse(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
        packed = parts.get(source, layout_of(source.format, query))
        node = rewriter.node(
            _OP.op_type,
            _OP.arranged(packed, x=activation),
            name=f"{site.name}/fused",
            domain=CONTRIB,
            attributes={
                "K": site.k,
                "N": site.n,
                "block_size": query.block,
                "quant_type": BNB4_TYPES[query.numbers],
            },
            dtype=site.dtype,
        )
        return [node]

    return around(site, rewriter, fuse, takes_bias=False)
