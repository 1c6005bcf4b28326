"""Which nodes of a graph stand for which site: all that rewriting it made, and shared ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from qgraph.scopes import bodies, nodes
from qgraph.sites import Site


@dataclasses.dataclass(frozen=True)
class Owner:
    """The sites that a node stands for, and whether for their second weights, of many rows."""

    sites: tuple[str, ...] = ()
    many: bool = False


NOBODY = Owner()
_BOUNDARY = re.compile(r"[/ ]|_(?=[A-Za-z])")
"""What an optimizer puts behind the name of a node that it fused or copied."""
_FUSED = "fused "
"""What ONNX Runtime puts in front of it."""


class SiteNodes:
    """The owners of a graph's nodes, found by the names under which they run.

    A site's nodes: those of its product and weight, what rounds its activation, minimums, input
    columns in float, the nodes called `SITE/…`, and its copy for many rows. Nodes that serve
    several sites belong to all of them: the rounding of one activation, an If around linears.
    """

    def __init__(self, model: ir.Model, sites: Sequence[Site]) -> None:
        self._owners: dict[str, Owner] = {}
        self._copies = {copy.name: site.name for site in sites for copy in site.copies}
        self._names = {site.name for site in sites} | set(self._copies)
        for site in sites:
            for each in (site, *site.copies):
                self._add(_nodes_of(each), site.name, many=each is not site)
        for node in nodes(model.graph):
            if node.op_type == "If" and not node.domain:
                self._add_branch(node, sites)

    def of(self, name: str) -> Owner:
        """Whose the node is that runs under `name`; `NOBODY` where it is no part of a site."""
        for known in _shortened(name.removeprefix(_FUSED)):
            if known in self._owners:
                return self._owners[known]
            if known in self._names:
                many = known in self._copies
                return Owner((self._copies.get(known, known),), many)
        return NOBODY

    def _add(self, found: Iterable[ir.Node | None], site: str, *, many: bool) -> None:
        for node in found:
            if node is not None and node.name:
                owner = self._owners.get(node.name, NOBODY)
                sites = tuple(dict.fromkeys((*owner.sites, site)))
                self._owners[node.name] = Owner(sites, many)

    def _add_branch(self, branch: ir.Node, sites: Sequence[Site]) -> None:
        """An If by the number of rows, and its condition, belong to all sites in it."""
        inside = {id(node) for body in bodies(branch) for node in nodes(body)}
        condition = branch.inputs[0].producer() if branch.inputs[0] is not None else None
        made = condition.inputs[0] if condition is not None and condition.inputs else None
        size = made.producer() if made is not None else None
        for site in sites:
            if site.many is not None and id(site.node) in inside:
                self._add((branch, condition, size), site.name, many=False)


def _nodes_of(site: Site) -> list[ir.Node | None]:
    """A site's own nodes, as the graph has them."""
    found = [site.node, *site.chain, site.dequantizer]
    if site.integer is not None:
        found += site.integer.nodes
    elif not site.gathers:
        found += _rounding(site.activation)
    if site.sums is not None:
        found += [*site.sums.sums, *site.sums.added]
    return found


def _rounding(value: ir.Value) -> list[ir.Node]:
    """What quantizes and dequantizes an activation in front of a product, in any order.

    With one scale, `DequantizeLinear(QuantizeLinear(x))`, or one to a row of x,
    `Mul(DequantizeLinear(QuantizeLinear(Div(x, s))), s)`.
    """
    times = _producer(value, "Mul")
    back = _producer(times.inputs[0] if times is not None else value, "DequantizeLinear")
    codes = _producer(back.inputs[0], "QuantizeLinear") if back is not None else None
    divide = _producer(codes.inputs[0], "Div") if codes is not None else None
    if codes is None or (times is not None and divide is None):
        return []
    scaled = times is not None and divide is not None
    x = divide.inputs[0] if scaled and divide is not None else codes.inputs[0]
    found: dict[ir.Node, None] = {}
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None or node.domain or node in found or node.op_type not in _ROUNDS:
            continue
        found[node] = None
        pending += [each for each in node.inputs if each is not None and each is not x]
    return list(found)


_ROUNDS = {"Abs", "DequantizeLinear", "Div", "Max", "Mul", "QuantizeLinear", "ReduceMax"}


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _shortened(name: str) -> Iterable[str]:
    """`name`, then what is left of it as one ending after another goes."""
    yield name
    for found in reversed(list(_BOUNDARY.finditer(name))):
        if found.start():
            yield name[: found.start()]
