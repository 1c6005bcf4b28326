"""Nodes of the main graph put into an If by the number of rows, and a copy of them beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from qgraph.rewrite import Rewriter
from qgraph.row_branches import FEW_BODY, MANY, MANY_BODY
from qgraph.scopes import bodies, nodes, scopes


def put_under(
    few: ir.Value, inside: Sequence[ir.Node], early: Sequence[ir.Node], rewriter: Rewriter
) -> ir.Node:
    """Move nodes into one body of a new If, and copy them into the other.

    Names in the copy are those of the nodes still: see `rename`.

    Args:
        few: which body runs.
        inside: nodes of the main graph, in order.
        early: those that are to be moved in front of the If, in order.
        rewriter: of the model.
    """
    main, anchor = rewriter.model.graph, inside[0]
    if early:
        main.remove(early)
        main.insert_before(anchor, early)
    own = {id(each) for node in inside for each in with_bodies(node)}
    outputs = [
        value
        for node in inside
        for value in node.outputs
        if value.is_graph_output() or any(id(use.node) not in own for use in value.uses())
    ]
    branch = ir.Node("", "If", [few], [], num_outputs=len(outputs), name=rewriter.unique("rows/if"))
    main.insert_before(anchor, [branch])
    for old, new in zip(outputs, branch.outputs, strict=True):
        _hand_over(main, old, new, own, rewriter)
    main.remove(inside)
    body = ir.Graph([], outputs, nodes=inside, name=f"{branch.name}/few")
    branch.attributes[FEW_BODY] = ir.AttrGraph(FEW_BODY, body)
    copy = body.clone(allow_outer_scope_values=True)
    copy.name = f"{branch.name}{MANY}"
    branch.attributes[MANY_BODY] = ir.AttrGraph(MANY_BODY, copy)
    return branch


def rename(body: ir.Graph, rewriter: Rewriter, kept: Collection[ir.Node] = ()) -> None:
    """Give everything in a copied body a name of its own, but `kept` and what it gives.

    Nodes may be called as values are: a copy is found by its name, whatever a value is called.
    """
    own = {id(node) for node in nodes(body)}
    others = [node for node in nodes(rewriter.model.graph) if id(node) not in own]
    of_nodes = {str(node.name) for node in (*others, *kept)}
    of_values = {str(value.name) for node in (*others, *kept) for value in node.outputs}
    for graph in scopes(rewriter.model.graph):
        of_values |= {*graph.initializers, *(str(value.name) for value in graph.inputs)}
    for scope in scopes(body):
        values = [*scope.inputs, *scope.initializers.values()]
        for node in scope:
            if node not in kept:
                node.name = _free(f"{node.name}{MANY}", of_nodes, rewriter)
                values += [value for value in node.outputs if value.name]
        for value in values:
            value.name = _free(f"{value.name}{MANY}", of_values, rewriter)


def _free(name: str, taken: set[str], rewriter: Rewriter) -> str:
    """`name`, or another one where it is taken by one of its kind."""
    found = rewriter.unique(name)  # which it is to others from now on
    if name not in taken:
        found = name
    taken.add(found)
    return found


def with_bodies(node: ir.Node) -> Iterator[ir.Node]:
    """A node, and those of its bodies at any depth."""
    yield node
    for body in bodies(node):
        yield from nodes(body)


def _hand_over(
    main: ir.Graph, old: ir.Value, new: ir.Value, inside: set[int], rewriter: Rewriter
) -> None:
    """Let those outside read `new`, under the name that `old` had."""
    new.type, new.shape = old.type, old.shape
    for use in list(old.uses()):
        if id(use.node) not in inside:
            use.node.replace_input_with(use.idx, new)
    for at, value in enumerate(main.outputs):
        if value is old:
            main.outputs[at] = new
    name = old.name
    old.name = rewriter.unique(f"{name}/few")
    new.name = name
