"""Writing `qgraph::Dequantize…` in front of a site: what every solver's result looks like."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.constants import drop_constant
from qgraph.errors import GraphError
from qgraph.passes.base import PackedParts
from qgraph.passes.expert_loop import loop_over_experts
from qgraph.plan import Decision
from qgraph.quant_tensor import QuantSource
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import QGRAPH_DOMAIN, Site


class DequantizeWriter:
    """Puts `qgraph::Dequantize…` nodes in front of the main graph: one per source.

    A body may read values of the main graph, so one node serves all scopes.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._parts = PackedParts(rewriter)
        self._written: dict[int, ir.Value] = {}

    def write(self, source: QuantSource) -> ir.Value:
        """W `[N, K]` of `source`."""
        if id(source) in self._written:
            return self._written[id(source)]
        model = self.rewriter.model
        if (QGRAPH_DOMAIN, source.format.function_name, "") not in model.functions:
            function = source.format.function(model.opset_imports.get("", 1))
            model.functions[function.identifier()] = function
        parts = self._parts.get(source, source.format.default_layout)
        node = self.rewriter.node(
            source.format.function_name,
            list(parts.values()),
            name=f"{source.name}/dequantize",
            domain=QGRAPH_DOMAIN,
            attributes={"k": source.k, "dtype": source.scale_dtype.value},
            dtype=source.scale_dtype,
            shape=[source.n, source.k],
        )
        model.graph.insert_before(next(iter(model.graph)), [node])
        self._written[id(source)] = node.outputs[0]
        return node.outputs[0]


def read_from(weight: ir.Value, site: Site, rewriter: Rewriter) -> None:
    """Let `site` read `weight` (`[N, K]`) in place of its constant; the old chain goes if unread.

    The shape that the site reads stays what it was: a linear gets [K, N] through a Transpose,
    or [1, K, N] through a Reshape behind it; Gemm with transB and Gather read [N, K], routed
    experts the rows of one at a time.
    """
    if site.role == "experts":
        loop_over_experts(weight, site, rewriter)
        return
    node = site.node
    old = node.inputs[site.position]
    assert old is not None and site.weight is not None
    value = weight
    transposed = not node.attributes.get_int("transB", 0) and not site.gathers
    if transposed:
        value = _add(rewriter, site, "Transpose", [value], {"perm": [1, 0]}, [site.k, site.n])
    lead = _leading_axes(old, site)
    if lead:
        dims = [1] * lead + [site.k, site.n]
        dims = dims if transposed else [1] * lead + [site.n, site.k]
        shape = rewriter.constant(f"{site.name}/shape", np.array(dims, np.int64))
        value = _add(rewriter, site, "Reshape", [value, shape], {}, dims)
    node.replace_input_with(site.position, value)
    if site.weight.view.factor != 1.0:
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.0)
    rewriter.drop_unused(site.chain)
    drop_constant(site.weight.root)


def written(
    name: str,
    site: Site,
    decision: Decision,
    source: QuantSource,
    detail: str,
    fallback: str | None = None,
) -> Step:
    """The step of the pass `name`, by which `site` reads what `source` says.

    fallback: the reason why the weight is not quantized as its decision asks.
    """
    shared = decision.shared_with is not None  # its bytes count once
    return Step(
        name,
        f"{site.op} → {source.format.function_name}",
        site.name,
        "changed" if fallback == "SOLVER_FELL_BACK" else "done",
        fallback or decision.reason,
        f"{decision.format}; {detail}" if detail else f"{decision.format}",
        0 if shared else decision.float_bytes,
        0 if shared else decision.packed_bytes,
    )


def _leading_axes(old: ir.Value, site: Site) -> int:
    """How many axes of length 1 the site's weight input has in front of its matrix."""
    shape = old.const_value.shape if old.const_value is not None else old.shape
    if shape is None and site.chain:
        raise GraphError(f"{site.name}: the shape of its weight input {old.name} is not known")
    return max(0, len(shape) - 2) if shape is not None else 0


def _add(
    rewriter: Rewriter,
    site: Site,
    op_type: str,
    inputs: list[ir.Value | None],
    attributes: dict[str, int | float | str | list[int]],
    shape: list[int],
) -> ir.Value:
    assert site.weight is not None
    node = rewriter.node(
        op_type,
        inputs,
        name=f"{site.name}/{op_type.lower()}",
        attributes=attributes,
        dtype=site.dtype,
        shape=shape,
    )
    rewriter.insert_before(site.node, [node])
    return node.outputs[0]
