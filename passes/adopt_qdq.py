"""Take over weights that the model brings quantized, without rounding them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

from qgraph.adopted import ADOPTED, AdoptedSource, StoredSource, adopt
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from
from qgraph.plan import Decision
from qgraph.quant_tensor import QuantTensor
from qgraph.report import Outcome, Step
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes
from qgraph.sites import Refusal, Site


@dataclasses.dataclass(frozen=True)
class AdoptQdq(Pass):
    """Q/DQ models of other tools, and graphs saved before they were lowered.

    before:  w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales, zeros)
             y = MatMul(x, w)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes', scales', zeros')
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    """

    name: ClassVar[str] = "adopt_qdq"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Adopt each planned site; sites that read the same codes alike share one source."""
        if not any("Dequantize" in node.op_type for node in nodes(graph.model.graph)):
            return []
        rewriter = Rewriter(graph.model)
        writer = DequantizeWriter(rewriter)
        sources: dict[Hashable, AdoptedSource] = {}
        steps = []
        for site in graph.sites():
            decision = context.plan.of(site.name)
            if site.state not in ("qdq", "dequantize") or decision is None:
                continue
            if decision.solver != ADOPTED or _is_spelled(site, context):
                steps.append(_kept(site, decision))
                continue
            found = adopt(site)
            if isinstance(found, Refusal):
                steps.append(
                    Step(self.name, "adopt", site.name, "refused", found.code, found.detail)
                )
                continue
            source = sources.setdefault(found.key, found)
            if isinstance(source, StoredSource):
                _make_lazy(site, source)
            else:
                read_from(writer.write(source), site, rewriter)
            steps.append(_done(site, decision, source))
        return steps


def _is_spelled(site: Site, context: Context) -> bool:
    """Whether the target reads DequantizeLinear, so that the site is best left as it is."""
    return site.state == "qdq" and context.capabilities.traits.spells_qdq


def _make_lazy(site: Site, source: StoredSource) -> None:
    """Let the constants of a `qgraph::Dequantize…` node come from `source`: same bytes."""
    assert site.dequantizer is not None
    layout = source.format.default_layout
    for part, value in zip(source.parts(layout), site.dequantizer.inputs, strict=True):
        if value is not None and not isinstance(value.const_value, QuantTensor):
            value.const_value = QuantTensor(source, part, layout, value.name or "")


def _kept(site: Site, decision: Decision) -> Step:
    reason = decision.reason
    kept = decision.quantized or reason in (None, "EXCLUDED")
    outcome: Outcome = "kept" if kept else "refused"
    return Step(AdoptQdq.name, "keep", site.name, outcome, reason, decision.detail)


def _done(site: Site, decision: Decision, source: AdoptedSource) -> Step:
    detail = f"{decision.format}" + (f"; {decision.detail}" if decision.detail else "")
    assert site.dequantizer is not None
    return Step(
        AdoptQdq.name,
        f"{site.dequantizer.op_type} → {source.format.function_name}",
        site.name,
        "done",
        decision.reason,
        detail,
        source.stored_bytes,
        decision.packed_bytes,
        error=0.0,
    )
