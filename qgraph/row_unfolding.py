"""A graph with one of the two ways that an If by the number of rows has."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.constants import let_go
from qgraph.row_branches import FEW_BODY, MANY, MANY_BODY, body_of, branches


def ways(model: ir.Model) -> list[ir.Model]:
    """A model as few rows run through it and as many do; itself where there is but one way."""
    return [as_run(model, few) for few in (True, False)] if branches(model.graph) else [model]


def as_run(model: ir.Model, few: bool) -> ir.Model:
    """A copy of a model that has but one way, under the names of the nodes that have two.

    Args:
        model: any; one without such Ifs is copied as it is.
        few: the way of few rows, else that of many.
    """
    found = model.clone()
    graph = found.graph
    ours = branches(graph)
    if few:
        for branch in ours:
            unfold(branch, FEW_BODY)
        return found
    copies = [node for branch in ours for node in unfold(branch, MANY_BODY)]
    taken = {*graph.initializers, *(value.name for value in graph.inputs)}
    taken |= {value.name for node in graph for value in node.outputs}
    for node in copies:
        node.name = (node.name or "").removesuffix(MANY)
        for value in node.outputs:
            plain = (value.name or "").removesuffix(MANY)
            if plain not in taken:
                value.name = plain
                taken.add(plain)
    return found


def unfold(branch: ir.Node, name: str) -> list[ir.Node]:
    """Put the nodes of a body in the place of the If that holds it; they are returned.

    What the If gave is given by them, under the names that it had. Constants that its other body
    alone read go.
    """
    outer, body = branch.graph, body_of(branch, name)
    assert outer is not None and body is not None
    found, given = list(body), list(body.outputs)
    constants = list(body.initializers.values())
    body.outputs.clear()
    body.initializers.clear()
    body.remove(found)
    for constant in constants:
        outer.register_initializer(constant)
    outer.insert_before(branch, found)
    for at, old in enumerate(branch.outputs):
        new = given[at]
        if new.producer() not in found or new in given[:at]:
            same = ir.Node("", "Identity", [new], name=f"{branch.name}/{at}")
            outer.insert_before(branch, [same])
            found.append(same)
            new = same.outputs[0]
        if old.type is not None:
            new.type, new.shape = old.type, old.shape
        spelled, old.name = old.name, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = spelled
    let_go(branch)
    outer.remove(branch, safe=True)
    return found
