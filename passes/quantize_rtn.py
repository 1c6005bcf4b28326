"""Round every planned weight to nearest: no data needed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qgraph.formats.base import QuantizedWeight
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from, written
from qgraph.passes.rounded import rounded
from qgraph.passes.solver import Codes, Problem
from qgraph.plan import Decision
from qgraph.quant_tensor import QuantSource
from qgraph.report import Outcome, Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site


@dataclasses.dataclass(frozen=True)
class Rtn(Codes):
    """Rounding to nearest as the last step of a composed solver, as `clip+rtn` and `awq+rtn`."""

    name: ClassVar[str] = "rtn"
    needs_data: ClassVar[bool] = False

    def solve(
        self, problem: Problem, ranges: QuantizedWeight | None
    ) -> tuple[QuantizedWeight, str] | None:
        """The ranges come with the codes nearest to the weight."""
        return ranges or problem.nearest(), ""


@dataclasses.dataclass(frozen=True)
class QuantizeRtn(Pass):
    """Rounding to nearest, ties to even, per group along K.

    before:  y = MatMul(x, W)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    """

    name: ClassVar[str] = "quantize_rtn"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Quantize each site whose decision names this solver; one source per weight and format."""
        rewriter = Rewriter(graph.model)
        writer = DequantizeWriter(rewriter)
        sources: dict[str, QuantSource] = {}
        steps = []
        for site in graph.sites():
            decision = context.plan.of(site.name)
            if decision is None or site.state != "float":
                continue
            if decision.format is None or decision.solver != "rtn":
                steps.append(_kept(site, decision))
                continue
            owner = decision.shared_with or site.name
            if owner not in sources:
                sources[owner] = rounded(site, decision)
            read_from(writer.write(sources[owner]), site, rewriter)
            steps.append(written(self.name, site, decision, sources[owner], decision.detail))
        return steps


def _kept(site: Site, decision: Decision) -> Step:
    outcome: Outcome = "kept" if decision.reason == "EXCLUDED" else "refused"
    size = decision.float_bytes
    return Step(
        QuantizeRtn.name, "keep", site.name, outcome, decision.reason, decision.detail, size, size
    )
