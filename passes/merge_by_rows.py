"""The linears of queries, keys and values as one in both bodies of an If by rows.

Each body gives the three behind each other, and the If hands them on as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.passes.fusion import MICROSOFT, Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import made_by, only_reader
from qgraph.passes.merged_linear import merge, obstacle, packed_shape, proof, reading
from qgraph.passes.one_kernel import note_differing
from qgraph.passes.packed_linear import Linear, linear_of
from qgraph.row_branches import FEW_BODY, MANY_BODY, body_of

SPLITS_BY_INPUT = 13
"""The opset from which Split reads its sizes."""
_SPELLING = "three linears in each body of one If, read by one attention"


@dataclasses.dataclass(frozen=True, eq=False)
class _Branch:
    """An If whose outputs an attention reads as queries, keys and values.

    places: of these outputs. linears: by body, those that make them.
    """

    node: ir.Node
    places: tuple[int, ...]
    linears: tuple[tuple[Linear, ...], ...]


def merge_by_rows(node: ir.Node, context: FusionContext) -> Iterator[Candidate | Miss]:
    """Q, K and V of an attention, where they come from an If."""
    branch = _branch_of(node)
    if branch is None:
        return
    edge = branch if isinstance(branch, str) else _obstacle(branch, node, context)
    if isinstance(branch, str) or edge:
        yield Miss("merge_linears", node, _SPELLING, edge)
        return
    packed: list[ir.Value] = []
    yield _candidate(branch, node, context, packed)
    if packed[0].uses():  # else it was not proven
        _hand_on(branch, packed[0], context)


def _branch_of(node: ir.Node) -> _Branch | str | None:
    """The If that gives an attention its three; why there is none where it gives some of them."""
    values = [value for value in node.inputs[:3] if value is not None]
    made = [made_by(value, "If") for value in values]
    branch = next((each for each in made if each is not None), None)
    if branch is None or len(values) < 3:
        return None
    apart = next((v for v, each in zip(values, made, strict=True) if each is not branch), None)
    if apart is not None:
        return f"{apart.name} is no output of {branch.name}"
    places = tuple(branch.outputs.index(value) for value in values)
    found = []
    for name in (FEW_BODY, MANY_BODY):
        body = body_of(branch, name)
        if body is None or len(body.outputs) != len(branch.outputs):
            return None
        linears = [linear_of(body.outputs[place]) for place in places]
        found.append(tuple(each for each in linears if each and each.product.graph is body))
    return _Branch(branch, places, tuple(found)) if all(len(f) == 3 for f in found) else None


def _obstacle(branch: _Branch, node: ir.Node, context: FusionContext) -> str:
    """Why the linears of a body cannot become one, or the If not hand them on so."""
    if context.opset < SPLITS_BY_INPUT:
        return f"Split by sizes needs opset {SPLITS_BY_INPUT}, the model has {context.opset}"
    for place in branch.places:
        value = branch.node.outputs[place]
        if only_reader(value) is not node:
            return f"{value.name} is read elsewhere too"
    for linears in branch.linears:
        edge = obstacle(linears, context.findings.apart, leaves=True)
        if edge:
            note_differing(linears, context.findings)
            return edge
    return ""


def _candidate(
    branch: _Branch, node: ir.Node, context: FusionContext, made_one: list[ir.Value]
) -> Candidate:
    """The attention, of one value that is put together; the bodies make it as one."""
    given = [branch.node.outputs[place] for place in branch.places]
    made = context.made.get(node)
    rest = [v for v in made.inputs if v not in given] if made is not None else []

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        linears = branch.linears[0]
        like, shape = given[0], packed_shape(linears)
        packed = builder.op(
            "Concat", given, attributes={"axis": -1}, dtype=like.dtype, shape=shape,
            name=f"{branch.node.name}/qkv",
        )  # fmt: skip
        made_one.append(packed)
        return builder.again(node, [packed, None, None, *node.inputs[3:]])

    names = ", ".join(each.name for each in branch.linears[0])
    ops = " and ".join(linears[0].product.op_type for linears in branch.linears)
    return Candidate(
        "merge_linears", node, tuple(dict.fromkeys((*given, *rest))),
        tuple(value for value in node.outputs if value.name),
        ops, build, proof=(*reading(node), *(each.rows for each in branch.linears[0])),
        feeds=made.feeds if made is not None else {}, dims=made.dims if made is not None else {},
        parts=tuple(_part(linears) for linears in branch.linears),
        reason=f"{names} in one, in both bodies of {branch.node.name}",
    )  # fmt: skip


def _part(linears: Sequence[Linear]) -> Candidate:
    """The linears of one body: what they give, cut out of what one gives."""
    outputs = tuple(each.output for each in linears)
    sizes = [each.rows for each in linears]

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        packed = merge(builder, linears)
        cuts = builder.constant("qkv/sizes", np.array(sizes, np.int64))
        return builder.ops("Split", [packed, cuts], outputs, attributes={"axis": -1})

    last = linears[-1].product
    return Candidate(
        "merge_linears", last, (linears[0].activation,), outputs,
        f"{MICROSOFT}::{last.op_type}", build, merged=tuple(each.name for each in linears),
        proof=proof(linears),
    )  # fmt: skip


def _hand_on(branch: _Branch, packed: ir.Value, context: FusionContext) -> None:
    """Give the If one output in place of three: pieces put together are the whole.

    before:  q, k, v = If(few) {Split(p)} else {Split(p')};  y = Concat(q, k, v)
    after:   y = If(few) {p} else {p'}
    """
    old, main = branch.node, branch.node.graph
    assert main is not None
    kept = [at for at in range(len(old.outputs)) if at not in branch.places]
    new = ir.Node("", "If", list(old.inputs), [], num_outputs=len(kept) + 1, name=old.name)
    main.insert_before(old, [new])
    for name in (FEW_BODY, MANY_BODY):
        attribute = old.attributes.pop(name)
        body = attribute.as_graph()
        split = body.outputs[branch.places[0]].producer()
        whole = split.inputs[0] if split is not None else None
        assert split is not None and whole is not None
        body.outputs[:] = [*(body.outputs[at] for at in kept), whole]
        context.rewriter.drop_unused([split])
        new.attributes[name] = attribute
    concat = packed.producer()
    assert concat is not None
    given = [*(old.outputs[at] for at in kept), packed]
    for before, after in zip(given, new.outputs, strict=True):
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        after.name, after.type, after.shape = before.name, before.type, before.shape
        before.name = context.rewriter.unique(f"{after.name}/before")
    context.rewriter.drop_unused([old, concat])
