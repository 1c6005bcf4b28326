"""One If by the number of rows where several stood behind each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import onnx_ir as ir

from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.row_branch import put_under, rename, with_bodies
from qgraph.passes.row_segments import ARITHMETIC
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.row_branches import FEW_BODY, MANY_BODY, body_of, branches
from qgraph.row_unfolding import unfold
from qgraph.scopes import bodies
from qgraph.sites import find_sites

_READS_TABLES = ARITHMETIC | {
    "Concat", "Expand", "Gather", "GroupQueryAttention", "RotaryEmbedding", "Slice",
}  # fmt: skip
"""Ops that read a large constant where it lies; others keep a copy of it as they want it."""
_SMALL = 4096
"""Elements of a constant that may be kept twice."""


@dataclasses.dataclass(frozen=True)
class JoinBranches(Pass):
    """Ifs by the number of rows become one, with what lies between them in both of its bodies.

    An If takes a few microseconds, whatever it holds. A weight that nodes of both bodies read is
    packed for each of them, so no linear that has but one may lie between.

    before:  a = If(few) {f} else {g};  b = Attention(a);  c = If(few) {h(b)} else {i(b)}
    after:   c = If(few) {h(Attention(f))} else {i(Attention(g))}
    """

    name: ClassVar[str] = "join_branches"

    def run(self, graph: Graph, _context: Context) -> list[Step]:
        """Join each run of them."""
        model = graph.model
        alone = {site.node for site in find_sites(model) if site.scope is model.graph}
        rewriter = Rewriter(model)
        steps = []
        for run in _runs(model.graph, alone):
            name = str(_join(run, rewriter).name)
            words = f"{len(run.branches)} of them and {len(run.between)} nodes between"
            steps.append(Step(self.name, "If → If", name, "done", None, words))
        return steps


@dataclasses.dataclass(frozen=True)
class _Run:
    """Ifs in order. behind: all that depends on one of them. between: what leads to another."""

    branches: list[ir.Node]
    behind: set[ir.Node]
    between: set[ir.Node]


def _runs(main: ir.Graph, alone: set[ir.Node]) -> list[_Run]:
    """Runs of more than one If, of one condition."""
    owners = {each: node for node in main for each in with_bodies(node)}
    found: list[_Run] = []
    for branch in branches(main):
        last = found[-1] if found else None
        if last is not None and branch.inputs[0] is last.branches[0].inputs[0]:
            between = last.between | _between(branch, last)
            if not any(_stays(node, alone) for node in between):
                behind = last.behind | _behind(branch, owners)
                found[-1] = _Run([*last.branches, branch], behind, between)
                continue
        found.append(_Run([branch], _behind(branch, owners), set()))
    return [run for run in found if len(run.branches) > 1]


def _stays(node: ir.Node, alone: set[ir.Node]) -> bool:
    """Whether a node must not be in both bodies: both would keep what it makes of its weight."""
    reads = () if node.op_type in _READS_TABLES else node.inputs
    weighs = any(value is not None and _is_weight(value) for value in reads)
    return node in alone or weighs or bool(bodies(node))


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and len(tensor.shape) > 1 and tensor.size > _SMALL


def _behind(node: ir.Node, owners: Mapping[ir.Node, ir.Node]) -> set[ir.Node]:
    """All nodes of the main graph that depend on one of them, themselves or in their bodies."""
    found, pending = set[ir.Node](), [node]
    while pending:
        for value in pending.pop().outputs:
            readers = {owners[use.node] for use in value.uses() if use.node in owners} - found
            found |= readers
            pending.extend(readers)
    return found


def _between(branch: ir.Node, run: _Run) -> set[ir.Node]:
    """What an If needs of that which depends on those before it."""
    found, pending = set[ir.Node](), [branch]
    known = {*run.branches, *run.between}
    while pending:
        for each in _needed(pending.pop()):
            if each in run.behind and each not in known and each not in found:
                found.add(each)
                pending.append(each)
    return found


def _needed(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of its own graph whose outputs a node reads, in its bodies too."""
    for each in with_bodies(node):
        for value in each.inputs:
            made = value.producer() if value is not None else None
            if made is not None and made.graph is node.graph:
                yield made


def _join(run: _Run, rewriter: Rewriter) -> ir.Node:
    main = rewriter.model.graph
    inside = [node for node in main if node in run.between or node in run.branches]
    few = inside[0].inputs[0]
    assert few is not None
    joined = put_under(few, inside, _early(main, inside), rewriter)
    first, second = (body_of(joined, name) for name in (FEW_BODY, MANY_BODY))
    assert first is not None and second is not None
    inner = {node for branch in branches(second) for body in bodies(branch) for node in body}
    rename(second, rewriter, inner)  # those have names of their own
    for body, name in ((first, FEW_BODY), (second, MANY_BODY)):
        for branch in branches(body):
            unfold(branch, name)
    return joined


def _early(main: ir.Graph, inside: Sequence[ir.Node]) -> list[ir.Node]:
    """Nodes behind the first of `inside` that those read, which do not read any of them."""
    place = {node: at for at, node in enumerate(main)}
    first, own = place[inside[0]], set(inside)
    found, pending = set[ir.Node](), list(inside)
    while pending:
        for each in _needed(pending.pop()):
            if place[each] > first and each not in own and each not in found:
                found.add(each)
                pending.append(each)
    return sorted(found, key=lambda node: place[node])
