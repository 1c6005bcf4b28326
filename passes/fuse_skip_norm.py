"""The addition in front of a norm, in one op with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from qgraph.passes.dims import sizes_of
from qgraph.passes.fuse_norms import LAYER_NORM, RMS_NORM
from qgraph.passes.fusion import MICROSOFT, Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import is_constant, made_by, only_reader, readers, same_shape

_SKIP = {
    RMS_NORM: "SkipSimplifiedLayerNormalization",
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    LAYER_NORM: "SkipLayerNormalization",
}
_CUT = re.compile(r"^Min\((?:[2-9]|\d\d+), (\w+)\)$")
_SPELLING = "norm(x + skip) of two values of one shape and rank 2 or 3"


def skip_norm(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """A residual that is added and then normalized; the sum stays for who else reads it."""
    for node in context.nodes(*_SKIP):
        op = _SKIP[node.op_type]
        if node.graph is None or not context.has(f"{MICROSOFT}::{op}"):
            continue
        add = made_by(node.inputs[0], "Add")
        if node.domain or add is None or any(is_constant(value) for value in add.inputs):
            continue
        edge = _obstacle(node, add)
        if edge:
            yield Miss("skip_norm", node, _SPELLING, edge)
        else:
            yield _candidate(node, add, op)


def _obstacle(node: ir.Node, add: ir.Node) -> str:
    """Why an addition cannot go into its norm; empty where it can."""
    total = add.outputs[0]
    first, second = add.inputs[0], add.inputs[1]
    assert first is not None and second is not None
    rank = len(total.shape) if total.shape is not None else None
    if rank not in (2, 3):
        return f"{total.name} has {'an unknown rank' if rank is None else f'rank {rank}'}"
    if node.attributes.get_int("axis", -1) not in (-1, rank - 1):
        return f"{node.name} normalizes more than the last axis"
    if not same_shape(first, second) and not _rows_repeat(first, second):
        return f"{first.name} {first.shape} and {second.name} {second.shape} may differ in shape"
    return ""


def _rows_repeat(first: ir.Value, second: ir.Value) -> bool:
    """Whether one of two values is `[1, S, H]` where the other is `[B, S, H]`."""
    if first.shape is None or second.shape is None or len(first.shape) != 3:
        return False
    ones = [value for value in (first, second) if value.shape is not None and value.shape[0] == 1]
    same = _added(first.shape)[1:] == _added(second.shape)[1:]
    return len(ones) == 1 and same and None not in (sizes_of(first.shape) or [None])[1:]


def _added(shape: ir.Shape) -> list[int | str | None]:
    """The axes of an operand of an addition.

    One that a slice cut to `Min(64, sequence)` is as long as the `sequence` beside it: where it is
    shorter, the addition fails.
    """
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return [_CUT.sub(r"\1", dim) if isinstance(dim, str) else dim for dim in dims]


def _candidate(node: ir.Node, add: ir.Node, op: str) -> Candidate:
    first, second = add.inputs[0], add.inputs[1]
    assert first is not None and second is not None
    if first.shape is not None and first.shape[0] == 1 and not same_shape(first, second):
        first, second = second, first
    total, end = add.outputs[0], node.outputs[0]
    bias = _bias(first) or _bias(second)
    if bias is not None:
        biased = bias.outputs[0]
        plain = next(value for value in bias.inputs if value is not None and not is_constant(value))
        first, second = (plain, second) if biased is first else (first, plain)
    inputs = (first, second)
    shared = total.is_graph_output() or len(readers(total)) > 1

    def build(builder: Builder, given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        parameters = list(node.inputs[1:])
        constant = None
        if bias is not None:
            constant = next(value for value in bias.inputs if is_constant(value))
        if constant is not None:
            absent = 1 if op == "SkipLayerNormalization" else 0
            parameters += [None] * (1 + absent - len(parameters))
            parameters.append(constant)
        made = builder.ops(
            op,
            [*given, *parameters],
            [end, None, None, total] if shared else [end],
            domain=MICROSOFT,
            attributes={"epsilon": node.attributes.get_float("epsilon", 1e-5)},
        )
        return [made[0], made[3]] if shared else [made[0]]

    outputs = (end, total) if shared else (end,)
    shapes = {str(v.name): _known(v.shape) for v in inputs if v.shape is not None}
    return Candidate(
        "skip_norm", node, inputs, outputs, f"{MICROSOFT}::{op}", build,
        shapes={name: shape for name, shape in shapes.items() if shape},
    )  # fmt: skip


def _known(shape: ir.Shape) -> list[int | str]:
    """Axes as the check is to have them; none where one has no name."""
    dims = _added(shape)
    return [dim for dim in dims if dim is not None] if None not in dims else []


def _bias(value: ir.Value) -> ir.Node | None:
    """The addition of a constant `[K]` that makes `value`, and that nobody else reads."""
    add = made_by(value, "Add")
    if add is None or only_reader(value) is None:
        return None
    for constant in add.inputs:
        if constant is not None and is_constant(constant) and constant.shape is not None:
            size = value.shape[-1] if value.shape is not None else None
            if len(constant.shape) == 1 and constant.shape[0] == size:
                return add
    return None
