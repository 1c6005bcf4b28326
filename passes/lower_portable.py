"""For what no kernel takes: dequantize and multiply block by block, in standard operators."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.expert_sites import rows_of_one
from qgraph.formats.base import Format
from qgraph.graph import Graph
from qgraph.kernel_choice import is_portable
from qgraph.kernel_ops import OWN_DEQUANTIZE, OWN_LINEAR
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.site_lowering import (
    CannotFuse,
    around,
    check_activation,
    check_view,
    chosen,
    place,
)
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import QGRAPH_DOMAIN, Site

LEAST_OPSET = 13
"""Operators of the functions have kept their meaning since, and are called otherwise before."""


@dataclasses.dataclass(frozen=True)
class LowerPortable(Pass):
    """What is left of the dequantized weights, so that no runtime folds them into floats.

    before:  w = qgraph::DequantizeInt4V1 (codes, scales)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    after:   y = qgraph::LinearInt4V1 <k, dtype> (x, codes, scales)
    An embedding dequantizes the rows that it gathers:
             c = Gather(codes, ids)
             s = Gather(scales, ids)
             w = qgraph::DequantizeInt4V1 (c, s)
             y = Reshape(w, [ids' shape, K])
    A linear that is to become float at load stays as it is.
    """

    name: ClassVar[str] = "lower_portable"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Rewrite every site that still reads a dequantized weight."""
        rewriter = Rewriter(graph.model)
        parts = PackedParts(rewriter)
        steps = []
        for site in graph.sites():
            if site.state != "dequantize" or not is_lazy(site.dequantizer):
                continue
            assert site.dequantizer is not None
            fmt = source_of(site.dequantizer).format
            op = chosen(site, context)[1].op
            if op == OWN_DEQUANTIZE:
                rule = f"at load: {fmt.function_name}"
                opset = graph.model.opset_imports.get("", 1)
                if opset < LEAST_OPSET:
                    steps.append(_too_old(self.name, site, rule, opset))
                    continue
                steps.append(Step(self.name, rule, site.name, "done", None, fmt.spell()))
                continue
            own = op == OWN_LINEAR  # the runtime knows it as a whole
            if not own and not is_portable(context.plan.recipe.unfused, fmt):
                continue
            opset = graph.model.opset_imports.get("", 1)
            if not own and opset < LEAST_OPSET:
                steps.append(_too_old(self.name, site, f"portable: {site.op}", opset))
                continue
            gathers = site.gathers
            result = fmt.function_name if gathers else fmt.linear_name
            rule = f"portable: {site.op} → {result}"
            try:
                check_view(site)
                nodes = (_gathered if gathers else _linear)(site, parts, rewriter)
            except CannotFuse as refused:
                steps.append(Step(self.name, rule, site.name, "refused", *refused.args))
                continue
            if not gathers:
                _declare(graph.model, fmt)
            place(site, nodes, result, rewriter)
            steps.append(Step(self.name, rule, site.name, "done", None, fmt.spell()))
        return steps


def _too_old(name: str, site: Site, rule: str, opset: int) -> Step:
    detail = f"the function that dequantizes needs opset {LEAST_OPSET}, the model has {opset}"
    return Step(name, rule, site.name, "refused", "OPSET_TOO_OLD", detail)


def _declare(model: ir.Model, fmt: Format) -> None:
    """Put the linear's function into the model."""
    if (QGRAPH_DOMAIN, fmt.linear_name, "") not in model.functions:
        function = fmt.linear(model.opset_imports.get("", 1))
        model.functions[function.identifier()] = function


def _linear(site: Site, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    """One call of the function, with a bias behind it."""
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)
    check_activation(site)

    def call(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
        packed = parts.get(source, source.format.default_layout)
        node = rewriter.node(
            source.format.linear_name,
            [activation, *packed.values()],
            name=f"{site.name}/linear",
            domain=QGRAPH_DOMAIN,
            attributes={"k": site.k, "dtype": source.scale_dtype.value},
            dtype=site.dtype,
        )
        return [node]

    return around(site, rewriter, call, takes_bias=False)


def _gathered(site: Site, parts: PackedParts, rewriter: Rewriter) -> list[ir.Node]:
    """Gather codes, scales and zero points of the rows asked for, dequantize only those."""
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)
    ids = site.activation
    nodes: list[ir.Node] = []

    def add(op_type: str, inputs: list[ir.Value | None], name: str, **options: int) -> ir.Value:
        node = rewriter.node(op_type, inputs, name=f"{site.name}/{name}", attributes={**options})
        nodes.append(node)
        return node.outputs[0]

    flat_shape = rewriter.constant(f"{site.name}/flat", np.array([-1], np.int64))
    length = rewriter.constant(f"{site.name}/k", np.array([site.k], np.int64))
    flat = add("Reshape", [ids, flat_shape], "flat_ids")
    layout = source.format.default_layout
    specs = source.parts(layout)
    shared = source.format.row_step(site.k)
    apart = rows_of_one(ids) % shared or (shared > 1 and site.role != "experts")
    if apart or any(spec.rows not in (0, 1, shared) for spec in specs.values()):
        raise CannotFuse("BLOCK_UNSUPPORTED", "rows share their scales: none can be read alone")
    blocks = flat
    if shared > 1:  # the rows of an expert follow each other: every so many begin a block
        zero, end, step = (
            rewriter.constant(f"{site.name}/{name}", np.array([at], np.int64))
            for name, at in (("first", 0), ("end", site.n), ("step", shared))
        )
        blocks = add("Div", [add("Slice", [flat, zero, end, zero, step], "firsts"), step], "blocks")
    rows: list[ir.Value | None] = []
    for part, value in parts.get(source, layout).items():
        at = flat if specs[part].rows == 1 else blocks
        rows.append(add("Gather", [value, at], f"gather_{part}") if specs[part].rows else value)
    table = rewriter.node(
        source.format.function_name,
        rows,
        name=f"{site.name}/rows",
        domain=QGRAPH_DOMAIN,
        attributes={"k": site.k, "dtype": source.scale_dtype.value},
        dtype=source.scale_dtype,
    )
    nodes.append(table)
    shape = add("Concat", [add("Shape", [ids], "shape"), length], "out_shape", axis=0)
    add("Reshape", [table.outputs[0], shape], "reshape")
    return nodes
