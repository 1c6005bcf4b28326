"""Two ways through a graph, by the number of rows: what of them is one site.

    few = Less(Size(x), T · K)                  x: the activation [.., K] of a linear
    y = If(few) {nodes, as they were} else {their copies, each under its name and `/many`}

A site of the first body and its copy are one site with two kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.scopes import bodies, nodes
from qgraph.site import Site

MANY = "/many"
"""Behind the name of a node: its copy for activations of many rows."""
_NEVER = 1 << 62
"""More elements than any activation has."""
FEW_BODY, MANY_BODY = "then_branch", "else_branch"


def branches(graph: ir.Graph) -> list[ir.Node]:
    """The Ifs by the number of rows in a main graph, all of one condition.

    None stands in a body of another node.
    """
    found = [n for n in graph if n.op_type == "If" and not n.domain and _is_ours(n)]
    return [node for node in found if node.inputs[0] is found[0].inputs[0]]


def within(model: ir.Model, op_types: Collection[str]) -> str:
    """Which of the Ifs by the number of rows holds ops that are looked for outside; or nothing."""
    for branch in branches(model.graph):
        for body in bodies(branch):
            if any(node.op_type in op_types for node in nodes(body)):
                return (
                    f"{branch.name}, an If by the number of rows, holds them: start from the float "
                    "model, with --for both beside this option"
                )
    return ""


def take(model: ir.Model, few: bool) -> None:
    """Let each of them take one of its bodies, whatever the number of rows."""
    for branch in branches(model.graph):
        limit = _limit_of(branch)
        assert limit is not None
        limit.const_value = ir.tensor(np.array(_NEVER if few else 0, np.int64), name=limit.name)


def joined(sites: Sequence[Site], model: ir.Model) -> list[Site]:
    """`sites`, those of one node and its copy as one; a dequantized copy is not lowered yet."""
    found = list(sites)
    for node in branches(model.graph):
        if node.name:
            found = _joined(found, node)
    return found


def _is_ours(node: ir.Node) -> bool:
    """Whether it asks for the number of rows, and its second body has names as copies have."""
    body = body_of(node, MANY_BODY)
    copies = body is not None and any((each.name or "").endswith(MANY) for each in body)
    return copies and _limit_of(node) is not None


def _limit_of(branch: ir.Node) -> ir.Value | None:
    """The constant that the size of an activation is compared with: `Less(Size(x), limit)`."""
    less = branch.inputs[0].producer() if branch.inputs and branch.inputs[0] is not None else None
    if less is None or less.op_type != "Less" or less.domain or len(less.inputs) != 2:
        return None
    size, limit = less.inputs
    counted = size.producer() if size is not None else None
    if counted is None or counted.op_type != "Size" or counted.domain or not counted.inputs:
        return None
    tensor = limit.const_value if limit is not None else None
    return limit if tensor is not None and tensor.size == 1 else None


def body_of(node: ir.Node, name: str) -> ir.Graph | None:
    """A body of a node; None where it has none of this name."""
    attribute = node.attributes.get(name)
    if attribute is None or attribute.type != ir.AttributeType.GRAPH:
        return None
    return attribute.as_graph()


def _joined(sites: list[Site], branch: ir.Node) -> list[Site]:
    few, many = (body_of(branch, name) for name in (FEW_BODY, MANY_BODY))
    assert many is not None
    first = {id(node) for node in nodes(few)} if few is not None else set()
    second = {id(node) for node in nodes(many)}
    copies = {
        site.name.removesuffix(MANY): site
        for site in sites
        if id(site.node) in second and site.name.endswith(MANY) and site.state != "dequantize"
    }
    mine = {site.name for site in sites if id(site.node) in first and site.name in copies}
    rows = _from_rows(branch, sites)
    gone = {id(copies[name]) for name in mine}
    return [
        dataclasses.replace(site, many=copies[site.name], from_rows=rows)
        if site.name in mine and id(site.node) in first
        else site
        for site in sites
        if id(site) not in gone
    ]


def _from_rows(branch: ir.Node, sites: Sequence[Site]) -> int:
    """The number of rows from which on the second body runs; 0 where it cannot be told."""
    limit = _limit_of(branch)
    less = branch.inputs[0].producer() if branch.inputs[0] is not None else None
    counted = less.inputs[0].producer() if less is not None and less.inputs[0] is not None else None
    x = counted.inputs[0] if counted is not None else None
    k = next((site.k for site in sites if site.k and x is not None and _reads(site, x)), 0)
    if not k or limit is None or limit.const_value is None:
        return 0
    return int(limit.const_value.numpy().reshape(())) // k


def _reads(site: Site, x: ir.Value) -> bool:
    read = site.node.inputs if site.integer is None else (site.integer.x,)
    return any(value is x for value in read)
