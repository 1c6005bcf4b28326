"""The linears of queries, keys and values as one, where their reader takes them packed.

One product reads its activation, and rounds it to int8, once instead of three times. Gate and up
projections stay apart: what one product gains at a single row (2 %), the Split behind it loses
many times over at prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.passes.fusion import MICROSOFT, Builder, Candidate, FusionContext, Miss
from qgraph.passes.merge_by_rows import merge_by_rows
from qgraph.passes.merged_linear import merge, obstacle, proof, reading
from qgraph.passes.one_kernel import note_differing
from qgraph.passes.packed_linear import Linear, linear_of

_SPELLING = "three linears of one activation, format and kernel, read by one attention"


def merge_linears(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """Q, K and V of an attention that takes them as one."""
    for node in context.nodes(GROUPED_QUERY.op_type):
        if node.graph is None:
            continue
        yield from merge_by_rows(node, context)
        found = [each for value in node.inputs[:3] if (each := linear_of(value)) is not None]
        if len(found) != 3 or found[0].activation is not found[1].activation:
            continue
        edge = obstacle(found, context.findings.apart)
        if edge:
            note_differing(found, context.findings)
            yield Miss("merge_linears", node, _SPELLING, edge)
        else:
            yield _candidate(node, found, context)


def _candidate(node: ir.Node, linears: Sequence[Linear], context: FusionContext) -> Candidate:
    activation = linears[0].activation
    merged = tuple(each.name for each in linears)
    made = context.made.get(node)
    rest = [v for v in made.inputs if v not in node.inputs[:3]] if made is not None else []

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        packed = merge(builder, linears)
        return builder.again(node, [packed, None, None, *node.inputs[3:]])

    return Candidate(
        "merge_linears", node, tuple(dict.fromkeys((activation, *rest))),
        tuple(value for value in node.outputs if value.name),
        f"{MICROSOFT}::{linears[0].product.op_type}", build, merged=merged,
        proof=(*reading(node), *proof(linears)),
        feeds=made.feeds if made is not None else {}, dims=made.dims if made is not None else {},
        reason=f"{', '.join(merged)} in one",
    )  # fmt: skip
