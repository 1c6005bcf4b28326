"""What lowerings have in common: a site's kernel, what it must be like, and how ops replace it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import Answer, Query
from qgraph.constants import drop_constant
from qgraph.graph import Graph
from qgraph.kernel_choice import best_kernel, spell_kernel
from qgraph.op_inputs import bare_name
from qgraph.passes.base import Context, is_lazy, source_of
from qgraph.recipe import FLOAT
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site


class CannotFuse(Exception):
    """A site that the fused op cannot hold: `args` are reason code and detail."""


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


def lower_linears(
    name: str,
    graph: Graph,
    context: Context,
    ops: Collection[str],
    fuse: Callable[[Site, Query], list[ir.Node]],
    rewriter: Rewriter,
) -> list[Step]:
    """Put a fused op in the place of every linear whose best kernel is one of `ops`.

    Args:
        name: the pass's.
        graph, context: those of its run.
        ops: operators with their domain.
        fuse: makes the nodes for a site, the last one giving its result, for the kernel that was
            asked for; raises CannotFuse.
        rewriter: of the graph.
    """
    steps = []
    for site in graph.sites():
        if not is_lazy(site.dequantizer) or site.gathers:
            continue
        answer, query = chosen(site, context)
        if not answer or query.op not in ops:
            continue
        op_type = bare_name(query.op)
        try:
            check_view(site)
            check_activation(site)
            nodes = fuse(site, query)
        except CannotFuse as refused:
            steps.append(Step(name, op_type, site.name, "refused", *refused.args))
            continue
        place(site, nodes, op_type, rewriter)
        rule = f"{site.op} → {op_type}"
        steps.append(Step(name, rule, site.name, "done", None, spell_kernel(query)))
    return steps


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
