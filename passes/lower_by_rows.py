"""Two weights for a linear: one for few rows of the activation, another for many."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array, parse
from qgraph.formats.packing import row_major
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass, is_lazy, source_of
from qgraph.passes.dequantize import DequantizeWriter, read_from
from qgraph.passes.rounded import RoundedSource, WeightSource
from qgraph.passes.row_branch import put_under, rename
from qgraph.passes.row_segments import segments
from qgraph.passes.solved import SolvedSource, Transform
from qgraph.plan import Many
from qgraph.quant_tensor import QuantSource
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.row_branches import MANY, MANY_BODY
from qgraph.sites import Site, Weight

LEAST_OPSET = 9
"""Less compares integers from here on."""


@dataclasses.dataclass(frozen=True)
class LowerByRows(Pass):
    """An If around each run of linears with two weights, see `row_segments`.

    Nodes between those stand in both bodies, and read the same constants.

    before:  w = qgraph::DequantizeUint4V1 (codes, scales, zeros)
             y = MatMul(x, Transpose(w))
    after:   few = Less(Size(x), T · K)
             y = If(few) {y' = MatMul(x, Transpose(w))} else {y" = MatMul(x, Transpose(w"))}
             where w" is the weight for T rows and more, as its decision says
    """

    name: ClassVar[str] = "lower_by_rows"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Give each linear whose decision has two weights the second one."""
        found: dict[str, tuple[Site, Many]] = {}
        for site in graph.sites():
            decision = context.plan.of(site.name)
            many = decision.many if decision is not None else None
            if many is not None and is_lazy(site.dequantizer) and site.scope is graph.model.graph:
                found[site.name] = (site, many)
        if not found:
            return []
        opset = graph.model.opset_imports.get("", 1)
        if opset < LEAST_OPSET:
            detail = f"Less of integers needs opset {LEAST_OPSET}, the model has {opset}"
            names = [name + MANY for name in found]
            return [Step(self.name, "If", n, "refused", "OPSET_TOO_OLD", detail) for n in names]
        rewriter = Rewriter(graph.model)
        sources = _Sources()
        second = {name: sources.of(site, many) for name, (site, many) in found.items()}
        sites = [site for site, _ in found.values()]
        (from_rows,) = {many.from_rows for _, many in found.values()}
        main = graph.model.graph
        parts = segments(main, sites)
        first = next(site for site in sites if site.node is parts[0].nodes[0])
        condition = _condition(first, from_rows, rewriter)
        few = condition[-1].outputs[0]
        branches = [put_under(few, part.nodes, part.early, rewriter) for part in parts]
        main.insert_before(branches[0], condition)
        for branch in branches:
            rename(branch.attributes[MANY_BODY].as_graph(), rewriter)
        writer = DequantizeWriter(rewriter)
        for site in graph.sites():
            name = site.name.removesuffix(MANY)
            if site.name != name and name in second:
                read_from(writer.write(second[name]), site, rewriter)
        return [
            Step(
                self.name, f"{site.op} → If", site.name, "done", None,
                f"{second[site.name].format.spell()} from {from_rows} rows on",
            )
            for site in sites
        ]  # fmt: skip


class _Sources:
    """The second weights: one for all sites that read one weight in one format."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], QuantSource] = {}

    def of(self, site: Site, many: Many) -> QuantSource:
        """The weight of a site as its decision wants it for many rows, rounded to nearest."""
        assert site.dequantizer is not None
        first = source_of(site.dequantizer)
        assert isinstance(first, WeightSource)
        key = (id(first), many.format)
        if key not in self._made:
            weight = first.weight
            if isinstance(first, SolvedSource):
                weight = TransformedWeight(
                    weight.root, weight.view, weight.n, weight.k, weight.dtype, weight.key,
                    weight.dims, first.transform,
                )  # fmt: skip
            self._made[key] = RoundedSource(weight, parse(many.format), first.scale_dtype)
        return self._made[key]


@dataclasses.dataclass(frozen=True, eq=False)
class TransformedWeight(Weight):
    """A weight as a solver's result stores it: channels scaled, permuted, rows scaled."""

    transform: Transform = dataclasses.field(default_factory=Transform)

    def rows(self, start: int, stop: int) -> Array:
        """See `Weight.rows`."""
        return self.transform.apply(row_major(super().as_stored(start, stop)), start)

    def as_stored(self, start: int, stop: int) -> Array:
        """See `Weight.as_stored`; row by row."""
        return self.rows(start, stop)


def _condition(first: Site, from_rows: int, rewriter: Rewriter) -> list[ir.Node]:
    """Whether the activation of a linear has fewer rows; the last node says so, for all."""
    size = rewriter.node(
        "Size", [first.activation], name="rows/size", dtype=ir.DataType.INT64, shape=[]
    )
    limit = rewriter.constant("rows/limit", np.array(from_rows * first.k, np.int64))
    less = rewriter.node(
        "Less", [size.outputs[0], limit], name="rows/few", dtype=ir.DataType.BOOL, shape=[]
    )
    return [size, less]
