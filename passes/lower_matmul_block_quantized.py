"""Fuse dequantize-then-multiply of FP8 and NVFP4 into ONNX Runtime's ops for CUDA."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from qgraph.capabilities import MATMUL_FP4, MATMUL_FP8, Query
from qgraph.graph import Graph
from qgraph.kernel_choice import layout_of, spell_kernel
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.lower_matmul_nbits import (
    CannotFuse,
    around,
    check_activation,
    check_view,
    chosen,
    place,
)
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import CONTRIB, Site

SCALED_TOGETHER = {MATMUL_FP8: 128, MATMUL_FP4: 16}
"""The attribute `block_size`: weights along K that have one scale."""


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
        steps = []
        for site in graph.sites():
            if not is_lazy(site.dequantizer) or site.gathers:
                continue
            answer, query = chosen(site, context)
            if not answer or query.op not in SCALED_TOGETHER:
                continue
            op_type = query.op.partition("::")[2]
            try:
                check_view(site)
                check_activation(site)
                nodes = _fused(site, query, op_type, parts, rewriter)
            except CannotFuse as refused:
                steps.append(Step(self.name, op_type, site.name, "refused", *refused.args))
                continue
            place(site, nodes, op_type, rewriter)
            rule = f"{site.op} → {op_type}"
            steps.append(Step(self.name, rule, site.name, "done", None, spell_kernel(query)))
        return steps


def _fused(
    site: Site, query: Query, op_type: str, parts: PackedParts, rewriter: Rewriter
) -> list[ir.Node]:
    """The op, with its bias where that is a vector."""
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)

    def fuse(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
        packed = parts.get(source, layout_of(source.format, query))
        node = rewriter.node(
            op_type,
            [activation, *packed.values(), None, bias],
            name=f"{site.name}/fused",
            domain=CONTRIB,
            attributes={"block_size": SCALED_TOGETHER[query.op]},
            dtype=site.dtype,
        )
        return [node]

    return around(site, rewriter, fuse)
