"""Which nodes stand together in one If by the number of rows.

An If takes a few microseconds, more than a small linear of one row, so one holds as many linears
as it can: those that read one activation, and those that follow with nothing but arithmetic
between, each with its bias. What computes shapes stays outside, where a runtime shares it between
layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from qgraph.passes.matching import only_reader, other_operand
from qgraph.scopes import bodies
from qgraph.sites import Site

MOST_BETWEEN = 32
"""Nodes between two linears of one If, at most."""
ARITHMETIC = frozenset(
    "Abs Add Cast CastLike Clip Div Elu Erf Exp FastGelu Gelu GroupNormalization HardSigmoid "
    "HardSwish Identity LayerNormalization LeakyRelu Log Max Mean Min Mish Mul Neg Pow QuickGelu "
    "RMSNormalization Reciprocal ReduceMean ReduceSum Relu Sigmoid Sign "
    "SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization "
    "Softmax Softplus Sqrt Sub Sum Swish Tanh Where".split()
)
"""Ops on whole activations, that no other part of a graph has in common with this one."""


@dataclasses.dataclass
class Segment:
    """Nodes in order; all that they read is there before the node at `start`.

    early: nodes that read constants alone, which are to be moved in front of them.
    """

    start: int
    nodes: list[ir.Node]
    early: list[ir.Node] = dataclasses.field(default_factory=list)

    @property
    def anchor(self) -> ir.Node:
        """The node in whose place they can all stand."""
        return self.nodes[0]


def segments(main: ir.Graph, sites: Sequence[Site]) -> list[Segment]:
    """The nodes of the main graph that go into an If each, with all of `sites` among them."""
    walk = _Walk(main, sites)
    found: list[Segment] = []
    for site in sorted(sites, key=lambda site: walk.place[site.node]):
        if found and walk.extend(found[-1], site):
            continue
        found.append(walk.begin(site))
    return found


class _Walk:
    def __init__(self, main: ir.Graph, sites: Sequence[Site]) -> None:
        self.place = {node: at for at, node in enumerate(main)}
        self.early: set[ir.Node] = set()
        self.views = {node for site in sites for node in site.chain}

    def begin(self, site: Site) -> Segment:
        """A segment of one linear."""
        return Segment(self.place[site.node], [site.node, *_bias(site.node)])

    def extend(self, segment: Segment, site: Site) -> bool:
        """Add a linear to a segment, with what lies between; whether it could be."""
        inside = set(segment.nodes)
        needed = self._needed(site.node, segment.start, inside)
        if needed is None:
            return False
        early = {each for each in needed if _reads_constants(each)} - self.views
        segment.early += sorted(early - self.early, key=lambda each: self.place[each])
        self.early |= early
        inside |= needed - early | set(_bias(site.node))
        segment.nodes = sorted(inside, key=lambda each: self.place[each])
        return True

    def _needed(self, node: ir.Node, start: int, inside: set[ir.Node]) -> set[ir.Node] | None:
        """The nodes from `start` on that `node` needs, itself too; None where one must not move."""
        found, pending = {node}, list(self._producers(node))
        while pending:
            each = pending.pop()
            if each in found or each in inside or self.place.get(each, -1) < start:
                continue
            between = len(found) <= MOST_BETWEEN and each.op_type in ARITHMETIC
            between = between or _reads_constants(each)
            if each not in self.views and (not between or bodies(each)):
                return None
            found.add(each)
            pending.extend(self._producers(each))
        return found

    @staticmethod
    def _producers(node: ir.Node) -> Iterable[ir.Node]:
        made = (value.producer() for value in node.inputs if value is not None)
        return (each for each in made if each is not None)


def _bias(node: ir.Node) -> list[ir.Node]:
    """What adds a constant to a linear, and nothing else reads: kernels add it themselves."""
    add = only_reader(node.outputs[0])
    if add is None or add.op_type != "Add" or add.domain or add.graph is not node.graph:
        return []
    other = other_operand(add, node.outputs[0])
    return [add] if other is not None and other.const_value is not None else []


def _reads_constants(node: ir.Node) -> bool:
    """Whether a node reads nothing but constants."""
    return all(value is None or value.const_value is not None for value in node.inputs)
