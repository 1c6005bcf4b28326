"""Fuse dequantize-then-multiply of FP8 and NVFP4 into ONNX Runtime's ops for CUDA."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from qgraph.capabilities import Query
from qgraph.graph import Graph
from qgraph.kernel_choice import layout_of
from qgraph.kernel_ops import KERNEL_OPS, MATMUL_FP4, MATMUL_FP8
from qgraph.passes.base import Context, PackedParts, Pass, source_of
from qgraph.passes.site_lowering import around, lower_linears
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import CONTRIB, Site


@dataclasses.dataclass(frozen=True)
class LowerMatMulBlockQuantized(Pass):
    """One fused op per linear; activations stay as they are.

    before:  w = qgraph::DequantizeNvfp4V1 (codes, scales, tensor)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    after:   y = com.microsoft::MatMulBlockQuantizedFp4Weight <block_size = 16>
                 (x, codes, scales, tensor, , bias)
    or, for FP8:
             y = com.microsoft::MatMulBlockQuantizedFp8Weight <block_size = 128>
                 (x, codes, scales, , bias)
    """

    name: ClassVar[str] = "lower_matmul_block_quantized"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse every linear whose best kernel is one of the two."""
        rewriter = Rewriter(graph.model)
        parts = PackedParts(rewriter)

        def fuse(site: Site, query: Query) -> list[ir.Node]:
            return _fused(site, query, parts, rewriter)

        return lower_linears(self.name, graph, context, (MATMUL_FP8, MATMUL_FP4), fuse, rewriter)


def _fused(site: Site, query: Query, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    """The op, with its bias where that is a vector."""
    assert site.dequantizer is not None
    source, op = source_of(site.dequantizer), KERNEL_OPS[query.op]

    def fuse(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
        packed = parts.get(source, layout_of(source.format, query))
        node = rewriter.node(
            op.op_type,
            op.arranged(packed, x=activation, bias=bias),
            name=f"{site.name}/fused",
            domain=CONTRIB,
            attributes={**op.defaults},
            dtype=site.dtype,
        )
        return [node]

    return around(site, rewriter, fuse)
