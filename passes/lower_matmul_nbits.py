"""Fuse dequantize-then-multiply into ONNX Runtime's MatMulNBits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import MATMUL_NBITS, Answer, Query
from qgraph.errors import InputError
from qgraph.formats.base import Part
from qgraph.graph import Graph
from qgraph.kernel_choice import best_kernel, layout_of, spell_kernel
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.block_sums import BlockSumsWriter
from qgraph.recipe import FLOAT, LEVELS
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
                steps.append(Step(self.name, "MatMulNBits", site.name, "refused", code, detail))
                continue
            place(site, nodes, "MatMulNBits", rewriter)
            rule = f"{site.op} → MatMulNBits"
            steps.append(Step(self.name, rule, site.name, "done", None, spell_kernel(query)))
        return steps

    def _choose(self, site: Site, context: Context) -> Query:
        assert site.dequantizer is not None
        answer, query = chosen(site, context, self.accuracy_level)
        if not answer:
            raise CannotFuse(answer.reason, answer.detail)
        return query


def chosen(site: Site, context: Context, accuracy_level: str = "") -> tuple[Answer, Query]:
    """The best kernel for a site that reads a dequantized weight, or the nearest refusal."""
    assert site.dequantizer is not None
    recipe = context.plan.recipe
    decision = context.plan.of(site.name)
    return best_kernel(
        context.capabilities,
        site,
        source_of(site.dequantizer).format,
        accuracy_level or recipe.accuracy_level,
        context.banned_for(site.name),
        recipe.prefer,
        recipe.dequantize_at_load,
        (decision.activations if decision is not None else None) or FLOAT,
    )


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


def check_activation(site: Site) -> None:
    """Refuse sites whose activation the fused op cannot take."""
    node = site.node
    batch = any(node.attributes.get_int(key, 0) == 1 for key in ("transBatchA", "transBatchB"))
    if batch or (node.op_type == "FusedMatMul" and node.attributes.get_int("transA", 0) == 1):
        raise CannotFuse("WEIGHT_VIEW", "FusedMatMul transposes its activation")
    if missing_axes(site) is None:
        raise CannotFuse("WEIGHT_RANK", "the rank of the activation is not known")


def missing_axes(site: Site) -> int | None:
    """Axes that the result has in front because the weight's rank is above the activation's.

    A vector counts as one row, whose axis the result does not have.
    """
    value = site.node.inputs[site.position]
    rank = len(value.shape) if value is not None and value.shape is not None else 2
    if rank <= 2:
        return 0
    shape = site.activation.shape
    return None if shape is None else max(0, rank - max(2, len(shape)))


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
        dtype=ir.DataType.FLOAT if query.dtype == "float32" else site.dtype,
    )


def _cast(
    site: Site, rewriter: Rewriter, value: ir.Value, name: str, dtype: ir.DataType
) -> ir.Node:
    return rewriter.node(
        "Cast", [value], name=f"{site.name}/{name}", attributes={"to": dtype.value}, dtype=dtype
    )


def around(
    site: Site,
    rewriter: Rewriter,
    fuse: Callable[[ir.Value, ir.Value | None], list[ir.Node]],
    *,
    takes_bias: bool = True,
) -> list[ir.Node]:
    """The op that replaces a linear, and what Gemm or the weight's rank want around it.

    `fuse` makes the op, and casts around it, from the activation and the bias `[N]` (None where it
    has none, or does not take one). The last node gives the site's result.
    """
    nodes: list[ir.Node] = []

    def add(
        op_type: str, inputs: list[ir.Value | None], name: str, **attributes: list[int]
    ) -> None:
        node = rewriter.node(
            op_type, inputs, name=f"{site.name}/{name}", attributes={**attributes}, dtype=site.dtype
        )
        nodes.append(node)

    activation = site.activation
    if site.op == "Gemm" and site.node.attributes.get_int("transA", 0) != 0:
        add("Transpose", [activation], "transpose_a", perm=[1, 0])
        activation = nodes[-1].outputs[0]
    bias = _bias(site, rewriter)
    fits = bias is not None and takes_bias and _is_vector(bias, site.n)
    nodes.extend(fuse(activation, bias if fits else None))
    if bias is not None and not fits:
        add("Add", [nodes[-1].outputs[0], bias], "add")
    missing = missing_axes(site)
    if missing and rewriter.model.opset_imports.get("", 1) < 13:
        add("Unsqueeze", [nodes[-1].outputs[0]], "unsqueeze", axes=list(range(missing)))
    elif missing:
        axes = rewriter.constant(f"{site.name}/axes", np.arange(missing, dtype=np.int64))
        add("Unsqueeze", [nodes[-1].outputs[0], axes], "unsqueeze")
    return nodes


def _bias(site: Site, rewriter: Rewriter) -> ir.Value | None:
    """Gemm's C times beta, a constant `[N]` where it is constant and the same for all rows."""
    bias = site.node.inputs[2] if site.op == "Gemm" and len(site.node.inputs) > 2 else None
    beta = site.node.attributes.get_float("beta", 1.0)
    if bias is None or (beta == 1.0 and _is_vector(bias, site.n)):
        return bias
    tensor = bias.const_value
    if tensor is None:
        if beta != 1.0:
            detail = f"beta {beta:g} multiplies a computed bias {bias.name}"
            raise CannotFuse("GEMM_ALPHA_BETA", detail)
        return bias
    array = (tensor.numpy().astype(np.float64) * beta).astype(tensor.dtype.numpy())
    if _runs_along_n(tensor, site.n):
        array = np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (site.n,)))
    elif beta == 1.0:
        return bias
    return rewriter.constant(f"{site.name}/bias", array)


def _is_vector(value: ir.Value, n: int) -> bool:
    """Whether a value is a constant `[n]`."""
    tensor = value.const_value
    return tensor is not None and tuple(tensor.shape.numpy()) == (n,)


def _runs_along_n(tensor: ir.TensorProtocol, n: int) -> bool:
    shape = tensor.shape.numpy()
    return tensor.size == 1 or (tensor.size == n and len(shape) > 0 and shape[-1] == n)


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
