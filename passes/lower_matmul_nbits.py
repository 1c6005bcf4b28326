"""Fuse dequantize-then-multiply into ONNX Runtime's MatMulNBits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import Query
from qgraph.formats.base import Layout
from qgraph.graph import Graph
from qgraph.passes.base import Context, PackedParts, Pass, source_of
from qgraph.plan import best_kernel, spell_kernel
from qgraph.report import Step
from qgraph.rewrite import Rewriter, drop_constant
from qgraph.sites import CONTRIB, Site


class CannotFuse(Exception):
    """A site that the fused op cannot hold: `args` are reason code and detail."""


@dataclasses.dataclass(frozen=True)
class LowerMatMulNBits(Pass):
    """One fused op per linear; it reads the packed weight as the format stores it.

    before:  w = qgraph::DequantizeUint4V1 (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)            (or Gemm <transB = 1> (x, w, bias))
    after:   y = com.microsoft::MatMulNBits <K, N, bits, block_size, accuracy_level>
                 (x, codes, scales, zeros, , bias)
    """

    name: ClassVar[str] = "lower_matmul_nbits"
    accuracy_level: str = ""
    """`auto`, `0` or `4`; empty for the recipe's."""

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Fuse every linear that reads a dequantized weight."""
        rewriter = Rewriter(graph.model)
        parts = PackedParts(rewriter)
        steps = []
        for site in graph.sites():
            if site.state != "dequantize" or site.role == "embedding":
                continue
            try:
                check_view(site)
                _check(site)
                query = self._choose(site, context)
                nodes = _fused(site, query, parts, rewriter)
            except CannotFuse as refused:
                code, detail = refused.args
                steps.append(Step(self.name, "MatMulNBits", site.name, "refused", code, detail))
                continue
            place(site, nodes, "MatMulNBits", rewriter)
            rule = f"{site.op} → MatMulNBits"
            steps.append(Step(self.name, rule, site.name, "done", None, spell_kernel(query)))
        return steps

    def _choose(self, site: Site, context: Context) -> Query:
        assert site.dequantizer is not None
        level = self.accuracy_level or context.plan.recipe.accuracy_level
        source = source_of(site.dequantizer)
        answer, query = best_kernel(
            context.capabilities, site, source.format, level, context.banned
        )
        if not answer:
            raise CannotFuse(answer.reason, answer.detail)
        return query


def check_view(site: Site) -> None:
    """Refuse sites that read a part, a scaled or a transposed view of the codes."""
    if site.weight is None:
        found = site.refusal
        raise CannotFuse(*((found.code, found.detail) if found else ("WEIGHT_VIEW", "")))
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)
    if not site.weight.is_plain or (source.n, source.k) != (site.n, site.k):
        raise CannotFuse("WEIGHT_VIEW", "the site reads a part or another view of the codes")
    if source.scale_dtype != site.dtype:
        found_dtype = site.dtype.name.lower() if site.dtype else "unknown"
        detail = f"scales are {source.scale_dtype.name.lower()}, the site is {found_dtype}"
        raise CannotFuse("DTYPE_HAS_NO_KERNEL", detail)


def _check(site: Site) -> None:
    """Refuse sites whose activation the fused op cannot take."""
    node = site.node
    batch = node.attributes.get_int("transBatchA", 0) or node.attributes.get_int("transBatchB", 0)
    if batch or (node.op_type == "FusedMatMul" and node.attributes.get_int("transA", 0)):
        raise CannotFuse("WEIGHT_VIEW", "FusedMatMul transposes its activation")
    if _missing_axes(site) is None:
        raise CannotFuse("WEIGHT_RANK", "the rank of the activation is not known")


def _missing_axes(site: Site) -> int | None:
    """Axes that the result has in front because the weight's rank is above the activation's."""
    value = site.node.inputs[site.position]
    rank = len(value.shape) if value is not None and value.shape is not None else 2
    if rank <= 2:
        return 0
    shape = site.activation.shape
    return None if shape is None else max(0, rank - len(shape))


def _fused(site: Site, query: Query, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    """The fused op and what must stand around it; the last node gives the site's result."""
    assert site.dequantizer is not None
    before: list[ir.Node] = []
    activation = site.activation
    if site.op == "Gemm" and site.node.attributes.get_int("transA", 0):
        before.append(
            rewriter.node(
                "Transpose",
                [activation],
                name=f"{site.name}/transpose_a",
                attributes={"perm": [1, 0]},
                dtype=site.dtype,
            )
        )
        activation = before[0].outputs[0]
    packed = parts.get(source_of(site.dequantizer), Layout("blocks", query.block))
    bias, after = _bias(site, rewriter)
    node = rewriter.node(
        "MatMulNBits",
        [activation, packed["codes"], packed["scales"], packed.get("zeros"), None, bias],
        name=f"{site.name}/fused",
        domain=CONTRIB,
        attributes={
            "K": site.k,
            "N": site.n,
            "bits": query.bits,
            "block_size": query.block,
            "accuracy_level": query.level,
        },
        dtype=site.dtype,
    )
    nodes = [*before, node]
    for op_type, other in after:
        extra = rewriter.node(
            op_type,
            [nodes[-1].outputs[0], other],
            name=f"{site.name}/{op_type.lower()}",
            dtype=site.dtype,
        )
        nodes.append(extra)
    return nodes


def _bias(site: Site, rewriter: Rewriter) -> tuple[ir.Value | None, list[tuple[str, ir.Value]]]:
    """Gemm's C as the bias input where it is a constant [N]; else an Add behind.

    Returns the bias and the ops (with their second operand) that follow the fused op.
    """
    missing = _missing_axes(site)
    after: list[tuple[str, ir.Value]] = []
    if missing:
        axes = rewriter.constant(f"{site.name}/axes", np.arange(missing, dtype=np.int64))
        after.append(("Unsqueeze", axes))
    bias = site.node.inputs[2] if site.op == "Gemm" and len(site.node.inputs) > 2 else None
    if bias is None:
        return None, after
    beta = site.node.attributes.get_float("beta", 1.0)
    tensor = bias.const_value
    if tensor is not None and tensor.size in (1, site.n) and _runs_along_n(tensor, site.n):
        if beta == 1.0 and tuple(tensor.shape.numpy()) == (site.n,):
            return bias, after
        array = tensor.numpy().astype(np.float64).reshape(-1) * beta
        folded = np.broadcast_to(array, (site.n,)).astype(tensor.dtype.numpy())
        return rewriter.constant(f"{site.name}/bias", np.ascontiguousarray(folded)), after
    if beta != 1.0:
        raise CannotFuse("GEMM_ALPHA_BETA", f"beta {beta} multiplies a computed bias {bias.name}")
    return None, [("Add", bias), *after]


def _runs_along_n(tensor: ir.TensorProtocol, n: int) -> bool:
    shape = tensor.shape.numpy()
    return tensor.size == 1 or (len(shape) > 0 and shape[-1] == n)


def place(site: Site, nodes: list[ir.Node], op_type: str, rewriter: Rewriter) -> None:
    """Put the nodes where the site was; the fused op (`op_type`) takes over its name."""
    name = site.node.name
    read = [value for value in site.node.inputs if value is not None]
    rewriter.replace(site.node, nodes)
    fused = next(node for node in nodes if node.op_type == op_type)
    fused.name = name
    fused.meta.update(site.node.meta)
    assert site.dequantizer is not None
    rewriter.drop_unused([site.dequantizer, *site.chain])
    for value in read:
        drop_constant(value)
