"""Spell quantized weights as DequantizeLinear, which any ONNX runtime knows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import INTEGERS
from qgraph.formats.base import Layout, Part
from qgraph.graph import Graph
from qgraph.kernel_choice import FOLDING_ENTRY
from qgraph.kernel_ops import DEQUANTIZE_LINEAR
from qgraph.ort_versions import WITHOUT_ZEROS
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.opset import CannotRaise, raise_opset
from qgraph.passes.site_lowering import chosen, missing_axes
from qgraph.quant_tensor import QuantSource
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site

LAYOUT = Layout("qdq")


@dataclasses.dataclass(frozen=True)
class LowerQdq(Pass):
    """DequantizeLinear over `[N, K]` codes, in the spelling that ONNX Runtime fuses.

    It fuses a DequantizeLinear of `[K, N]` codes along axis 0 whose result and constants only one
    MatMul reads. Codes are stored `[N, K]`, row by row; Transpose of a constant is folded at load.

    before:  w = qgraph::DequantizeInt4V1 (codes, scales)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    after:   c = Transpose <perm = [1, 0]> (codes')        int4 [N, K] → [K, N]
             s = Transpose <perm = [1, 0]> (scales)
             t = DequantizeLinear <axis = 0, block_size = 64> (c, s)
             y = MatMul(x, t)
    where one scale serves a whole row, the codes have 2 bits (ONNX Runtime 1.32 cannot fold
    their Transpose), or the reader is a Gather or lies in a body:
             w = DequantizeLinear <axis = 1, block_size = 64> (codes', scales)
    and with zero points of 0 for a runtime of before WITHOUT_ZEROS (later ones would turn the
    weight at each call), where there is one scale for a row or for all:
             w = DequantizeLinear <axis = 0> (codes', scales, zeros)
    """

    name: ClassVar[str] = "lower_qdq"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Raise the opset to what the formats need, then spell every dequantized weight."""
        needs = {s.name: _needs(s, context) for s in _own(graph, context)}
        if not needs:
            return []
        refused = _raise(graph, needs)
        # Readers of [K, N] come first: they leave the dequantizer to the others.
        sites = [site for site in graph.sites() if site.name in needs]
        sites.sort(key=lambda site: not _reads_turned(site, graph.model.graph))
        spelling = _Spelling(Rewriter(graph.model), context.capabilities.oldest < WITHOUT_ZEROS)
        at_load = context.plan.recipe.dequantize_at_load
        note = f"; floats at load with the session entry {FOLDING_ENTRY}" if at_load else ""
        return [self._step(site, refused.get(site.name), spelling, graph, note) for site in sites]

    def _step(
        self,
        site: Site,
        refused: tuple[str, str] | None,
        spelling: _Spelling,
        graph: Graph,
        note: str,
    ) -> Step:
        if refused is not None:
            return Step(self.name, "DequantizeLinear", site.name, "refused", *refused)
        source = spelling.write(site)
        rule = f"{source.format.function_name} → DequantizeLinear"
        detail = f"{source.format.spell()}, opset {graph.model.opset_imports['']}"
        return Step(self.name, rule, site.name, "done", None, detail + note)


_Need = int | tuple[str, str]
"""The opset that a site needs, or reason code and detail of a refusal."""


def _own(graph: Graph, context: Context) -> list[Site]:
    """The sites whose best kernel is DequantizeLinear and what reads it."""
    sites = [s for s in graph.sites() if s.state == "dequantize" and is_lazy(s.dequantizer)]
    return [site for site in sites if chosen(site, context)[1].op == DEQUANTIZE_LINEAR]


def _needs(site: Site, context: Context) -> _Need:
    answer, _ = chosen(site, context)
    if answer.rule is None:
        return (answer.reason or "NO_FUSED_KERNEL", answer.detail)
    return answer.rule.min_opset


def _raise(graph: Graph, needs: dict[str, _Need]) -> dict[str, tuple[str, str]]:
    """Raise the opset as far as it goes; returns the sites that need more, with the reason."""
    refused = {name: need for name, need in needs.items() if not isinstance(need, int)}
    for opset in sorted({need for need in needs.values() if isinstance(need, int)}):
        try:
            raise_opset(graph, opset)
        except CannotRaise as error:
            for name, need in needs.items():
                if isinstance(need, int) and need >= opset:
                    refused[name] = ("OPSET_TOO_OLD", str(error.args[0]))
            break
    return refused


class _Spelling:
    """Writes DequantizeLinear nodes; constants, and their transposes, once per source."""

    def __init__(self, rewriter: Rewriter, zeros_needed: bool) -> None:
        self.rewriter, self.zeros_needed = rewriter, zeros_needed
        self.parts = PackedParts(rewriter)
        self.turned: dict[int, dict[Part, ir.Value]] = {}
        self.sources: dict[ir.Node, QuantSource] = {}
        self.zeros: dict[int, ir.Value] = {}

    def write(self, site: Site) -> QuantSource:
        """Let `site` read a DequantizeLinear in place of its `qgraph::Dequantize…`."""
        dequantizer = site.dequantizer
        assert dequantizer is not None
        if dequantizer in self.sources:  # replaced for all its readers at once
            return self.sources[dequantizer]
        source = source_of(dequantizer)
        if _reads_turned(site, self.rewriter.model.graph):
            self._turn(site, source)
        else:
            self.sources[dequantizer] = source
            self._replace(dequantizer, source)
        return source

    def _turn(self, site: Site, source: QuantSource) -> None:
        """A DequantizeLinear of `[K, N]` for this reader alone."""
        node = self._node(source, self._turned(source), 0, f"{site.name}/dequantize")
        self.rewriter.insert_before(site.node, [node])
        site.node.replace_input_with(site.position, node.outputs[0])
        if site.node.attributes.get_int("transB", 0) != 0:  # Gemm, FusedMatMul
            site.node.attributes["transB"] = ir.AttrInt64("transB", 0)
        assert site.dequantizer is not None
        self.rewriter.drop_unused([site.dequantizer, *site.chain])

    def _replace(self, dequantizer: ir.Node, source: QuantSource) -> None:
        """`[N, K]` as it lies, for all readers at once."""
        name = dequantizer.name or source.name
        codes = [value for value in dequantizer.inputs if value is not None]
        node = self._node(source, self.parts.get(source, LAYOUT), 1, name)
        self.rewriter.replace(dequantizer, [node])
        node.name = name
        self.rewriter.drop_constants(codes)

    def _node(
        self,
        source: QuantSource,
        parts: dict[Part, ir.Value],
        axis: int,
        name: str,
    ) -> ir.Node:
        """DequantizeLinear along K, which is `axis`; along N where a row has one scale."""
        group = source.format.group
        attributes = {"axis": axis, "block_size": group} if group else {"axis": 1 - axis}
        shape = [source.n, source.k] if axis == 1 else [source.k, source.n]
        given = list(parts.values())
        if self.zeros_needed and not group and "zeros" not in parts:
            given.append(self._zero(source, parts["codes"], parts["scales"]))
        return self.rewriter.node(
            "DequantizeLinear",
            given,
            name=name,
            attributes=dict(attributes),
            dtype=source.scale_dtype,
            shape=shape,
        )

    def _zero(self, source: QuantSource, codes: ir.Value, scales: ir.Value) -> ir.Value:
        """Zero points of 0, in the type of the codes and of as many as there are scales."""
        if id(source) not in self.zeros:
            assert codes.dtype is not None and scales.shape is not None
            array = np.zeros(scales.shape.numpy(), codes.dtype.numpy())
            self.zeros[id(source)] = self.rewriter.constant(f"{source.name}.zeros", array)
        return self.zeros[id(source)]

    def _turned(self, source: QuantSource) -> dict[Part, ir.Value]:
        """The parts as `[K, N]` and `[nb, N]`."""
        if id(source) not in self.turned:
            first = next(iter(self.rewriter.model.graph))
            self.turned[id(source)] = {
                part: self._transpose(value, first)
                for part, value in self.parts.get(source, LAYOUT).items()
            }
        return self.turned[id(source)]

    def _transpose(self, value: ir.Value, before: ir.Node) -> ir.Value:
        assert value.shape is not None
        node = self.rewriter.node(
            "Transpose",
            [value],
            name=f"{value.name}/transpose",
            attributes={"perm": [1, 0]},
            dtype=value.dtype,
            shape=ir.Shape(list(value.shape)[::-1]),
        )
        self.rewriter.insert_before(before, [node])
        return node.outputs[0]


def _reads_turned(site: Site, main: ir.Graph) -> bool:
    """Whether the site is a linear that reads the whole weight and can read it as `[K, N]`.

    In a body it would be no use: ONNX Runtime 1.32 picks such a DequantizeLinear for fusion, does
    not find its constants in the body, and refuses the model.
    """
    if site.gathers or site.weight is None or not site.weight.is_plain:
        return False
    if site.scope is not main:
        return False
    assert site.dequantizer is not None
    source = source_of(site.dequantizer)
    if source.format.numbers not in INTEGERS:
        return False
    if not source.format.group or source.format.bits == 2:
        return False
    return (source.n, source.k) == (site.n, site.k) and missing_axes(site) == 0
