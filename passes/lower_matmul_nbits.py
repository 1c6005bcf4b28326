"""Fuse dequantize-then-multiply into ONNX Runtime's MatMulNBits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from qgraph.capabilities import Query
from qgraph.errors import InputError
from qgraph.formats.base import Part
from qgraph.graph import Graph
from qgraph.kernel_choice import layout_of, spell_kernel
from qgraph.kernel_ops import MATMUL_NBITS, NBITS
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.block_sums import BlockSumsWriter
from qgraph.passes.site_lowering import (
    CannotFuse,
    around,
    check_activation,
    check_view,
    chosen,
    place,
)
from qgraph.recipe import LEVELS
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import CONTRIB, Site


@dataclasses.dataclass(frozen=True)
class LowerMatMulNBits(Pass):
    """One fused op per linear; it reads the packed weight as the format stores it.

    before:  w = qgraph::DequantizeUint4V1 (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)            (or Gemm <transB = 1> (x, w, bias))
    after:   y = com.microsoft::MatMulNBits <K, N, bits, block_size, accuracy_level>
                 (x, codes, scales, zeros, , bias)
    Float zero points become minimums, which another product adds (`qgraph.block_sums`):
             y = Add(MatMulNBits(x, codes, scales), MatMul(sums of x, Transpose(minimums)))
    float16 does not hold the scales of mxfp4 and nvfp4 as 8-bit integers: there
             y = Cast(MatMulNBits(Cast(x), …))          computed in float32
    """

    name: ClassVar[str] = "lower_matmul_nbits"
    accuracy_level: str = ""
    """`auto`, `0` or `4`; empty for the recipe's."""

    def __post_init__(self) -> None:
        if self.accuracy_level not in ("", *LEVELS):
            wanted = ", ".join(LEVELS)
            raise InputError(
                f"lower_matmul_nbits.accuracy_level {self.accuracy_level!r}: wanted {wanted}"
            )

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse every linear that reads a dequantized weight."""
        rewriter = Rewriter(graph.model)
        parts, sums = PackedParts(rewriter), BlockSumsWriter(rewriter)
        steps = []
        for site in graph.sites():
            if not is_lazy(site.dequantizer) or site.gathers:
                continue
            try:
                query = self._choose(site, context)
                if query.op != MATMUL_NBITS:
                    continue  # another lowering's
                check_view(site)
                check_activation(site)
                nodes = _fused(site, query, parts, sums)
            except CannotFuse as refused:
                code, detail = refused.args
                steps.append(Step(self.name, NBITS.op_type, site.name, "refused", code, detail))
                continue
            place(site, nodes, NBITS.op_type, rewriter)
            rule = f"{site.op} → {NBITS.op_type}"
            steps.append(Step(self.name, rule, site.name, "done", None, spell_kernel(query)))
        return steps

    def _choose(self, site: Site, context: Context) -> Query:
        assert site.dequantizer is not None
        answer, query = chosen(site, context, self.accuracy_level)
        if not answer:
            raise CannotFuse(answer.reason, answer.detail)
        return query


def _fused(site: Site, query: Query, parts: PackedParts, sums: BlockSumsWriter) -> list[ir.Node]:
    """MatMulNBits and what must stand around it; the last node gives the site's result."""
    assert site.dequantizer is not None and site.dtype is not None
    source, rewriter, dtype = source_of(site.dequantizer), parts.rewriter, site.dtype
    casts = query.dtype == "float32" and dtype != ir.DataType.FLOAT
    rank = _rank(site) if query.sums else 0

    def fuse(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
        packed = parts.get(source, layout_of(source.format, query))
        if casts:
            wide = _cast(site, rewriter, activation, "wide", ir.DataType.FLOAT)
            node = _product(site, query, packed, wide.outputs[0], bias, rewriter)
            return [wide, node, _cast(site, rewriter, node.outputs[0], "narrow", dtype)]
        node = _product(site, query, packed, activation, bias, rewriter)
        if not query.sums:
            return [node]
        nodes, found = sums.sums(site, activation, rank, query.block)
        return [*nodes, node, *sums.added(site, node, found, packed["minimums"])]

    return around(site, rewriter, fuse, takes_bias=not casts)


def _rank(site: Site) -> int:
    """The number of axes of the activation, for sums of its blocks."""
    if site.op == "Gemm":
        return 2
    shape = site.activation.shape
    if shape is None or len(shape) < 2:
        found = "is not known" if shape is None else "is 1"
        raise CannotFuse(
            "WEIGHT_RANK", f"the rank of the activation {found}: no sums of its blocks"
        )
    return len(shape)


def _product(
    site: Site,
    query: Query,
    packed: dict[Part, ir.Value],
    activation: ir.Value,
    bias: ir.Value | None,
    rewriter: Rewriter,
) -> ir.Node:
    """The op itself, in the type of its activation."""
    return rewriter.node(
        NBITS.op_type,
        NBITS.arranged(packed, x=activation, bias=bias),
        name=f"{site.name}/fused",
        domain=CONTRIB,
        attributes={
            "K": site.k,
            "N": site.n,
            "bits": query.bits,
            "block_size": query.block,
            "accuracy_level": query.level,
        },
        dtype=ir.DataType.FLOAT if query.dtype == "float32" else site.dtype,
    )


def _cast(
    site: Site, rewriter: Rewriter, value: ir.Value, name: str, dtype: ir.DataType
) -> ir.Node:
    return rewriter.node(
        "Cast", [value], name=f"{site.name}/{name}", attributes={"to": dtype.value}, dtype=dtype
    )
