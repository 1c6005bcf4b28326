"""RMSNorm and LayerNorm, however they are spelled, and with the addition in front of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.passes.fusion import Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import (
    is_constant,
    is_last_axis,
    last_dim,
    made_by,
    number,
    only_reader,
    other_operand,
    readers,
)

RMS_NORM = "SimplifiedLayerNormalization"
"""ONNX Runtime's op, in ONNX's own domain: x · γ / √(mean(x²) + ε)."""
LAYER_NORM = "LayerNormalization"
"""ONNX has it from opset 17; ONNX Runtime has one of its own, of this name, in all before."""
_SPELLING = "x / √(mean(x²) + ε) · γ over the last axis"


@dataclasses.dataclass(frozen=True)
class _Norm:
    """x: what is normalized, before its mean is taken off. end: the result.

    node: the last one, which makes the result. scale, bias: `[K]`, None where there is none.
    """

    x: ir.Value
    node: ir.Node
    epsilon: float
    centered: bool
    scale: ir.Value | None
    bias: ir.Value | None

    @property
    def end(self) -> ir.Value:
        """The result."""
        return self.node.outputs[0]


class _OtherwiseError(Exception):
    """What looked like a norm and is none: the edge where it differs."""

    def __init__(self, node: ir.Node, edge: str) -> None:
        super().__init__(edge)
        self.node, self.edge = node, edge


def norms(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """Norms of the last axis: Pow or Mul, ReduceMean, ε, Sqrt or Reciprocal, Div or Mul, γ, β."""
    for mean in context.nodes("ReduceMean"):
        square = made_by(mean.inputs[0], "Pow", "Mul")
        if mean.graph is None or square is None or not _is_square(square):
            continue
        try:
            norm = _match(mean, square)
        except _OtherwiseError as found:
            yield Miss("norm", found.node, _SPELLING, found.edge)
            continue
        op = LAYER_NORM if norm.centered else RMS_NORM
        size = last_dim(norm.x) or last_dim(norm.scale)
        if size is None:
            yield Miss("norm", mean, _SPELLING, f"the last axis of {norm.x.name} has no fixed size")
        elif context.has(op):
            yield _candidate(norm, op, size)


def _is_square(node: ir.Node) -> bool:
    first, second = node.inputs[0], node.inputs[1]
    return first is second if node.op_type == "Mul" else number(second) == 2.0


def _match(mean: ir.Node, square: ir.Node) -> _Norm:
    """The norm around the mean of a square.

    Raises:
        _OtherwiseError: there is none; it says where the graph differs from one.
    """
    if not is_last_axis(mean):
        raise _OtherwiseError(mean, f"{mean.name} takes the mean over other axes, or drops them")
    given = square.inputs[0]
    assert given is not None
    variance, epsilon = _epsilon(mean)
    node = _normalized(variance, given)
    x, centered = _uncentered(given)
    node, scale, bias = _scaled(node, x, last_dim(given), centered)
    for source in _sources(x):
        if source.dtype == node.outputs[0].dtype:
            return _Norm(source, node, epsilon, centered, scale, bias)
    raise _OtherwiseError(node, f"{x.name} is {x.dtype} and the result {node.outputs[0].dtype}")


def _sources(x: ir.Value) -> Iterator[ir.Value]:
    """`x`, then what it was before it was cast to a wider type."""
    yield x
    cast = made_by(x, "Cast")
    if cast is not None and cast.inputs[0] is not None:
        yield cast.inputs[0]


def _epsilon(mean: ir.Node) -> tuple[ir.Value, float]:
    """mean(x²) + ε."""
    add = _reader(mean.outputs[0], "Add")
    if add is None:
        raise _OtherwiseError(mean, f"no ε is added to {mean.outputs[0].name}, or not that alone")
    epsilon = number(other_operand(add, mean.outputs[0]))
    if epsilon is None or epsilon < 0:
        raise _OtherwiseError(add, f"what is added to {mean.outputs[0].name} is no constant ε")
    return add.outputs[0], epsilon


def _normalized(variance: ir.Value, x: ir.Value) -> ir.Node:
    """The node that gives x / √variance."""
    root = _reader(variance, "Sqrt", "Pow")
    if root is None or (root.op_type == "Pow" and number(root.inputs[1]) not in (0.5, -0.5)):
        raise _OtherwiseError(_first(variance), f"no square root is taken of {variance.name}")
    value = root.outputs[0]
    inverse = root.op_type == "Pow" and number(root.inputs[1]) == -0.5
    step = _reader(value, "Reciprocal") if not inverse else None
    if step is None and not inverse:
        one = _reader(value, "Div")
        step = one if one is not None and number(one.inputs[0]) == 1.0 else None
    if step is not None:
        value, inverse = step.outputs[0], True
    node = _reader(value, "Mul" if inverse else "Div")
    ordered = node is not None and (inverse or node.inputs[1] is value)
    if node is None or not ordered or not _same(other_operand(node, value), x):
        how = "multiplied by" if inverse else "divided by"
        raise _OtherwiseError(_first(value), f"{x.name} is not what is {how} {value.name}")
    return node


def _same(first: ir.Value | None, second: ir.Value) -> bool:
    """Whether two values are one, or casts of one value to one type."""
    if first is second:
        return True
    casts = made_by(first, "Cast"), made_by(second, "Cast")
    return (
        all(casts)
        and casts[0].inputs[0] is casts[1].inputs[0]  # type: ignore[union-attr]
        and first is not None
        and first.dtype == second.dtype
    )


def _uncentered(x: ir.Value) -> tuple[ir.Value, bool]:
    """What a centered value was before its mean was taken off."""
    sub = made_by(x, "Sub")
    source, mean = (sub.inputs[0], sub.inputs[1]) if sub is not None else (None, None)
    reduce = made_by(mean, "ReduceMean")
    if source is None or reduce is None or reduce.inputs[0] is not source:
        return x, False
    return (source, True) if is_last_axis(reduce) else (x, False)


def _scaled(
    node: ir.Node, x: ir.Value, size: int | None, centered: bool
) -> tuple[ir.Node, ir.Value | None, ir.Value | None]:
    """The last node of a norm, with γ and β: casts are passed where the type comes back."""
    wanted = {source.dtype for source in _sources(x)}
    best: tuple[ir.Node, ir.Value | None, ir.Value | None] = (node, None, None)
    scale = bias = None
    while (following := only_reader(node.outputs[0])) is not None:
        parameter = _parameter(following, node.outputs[0], size)
        if following.op_type == "Mul" and scale is None and bias is None and parameter is not None:
            scale = parameter
        elif following.op_type == "Add" and centered and bias is None and parameter is not None:
            bias = parameter
        elif following.op_type != "Cast":
            break
        node = following
        if node.outputs[0].dtype in wanted and not (node.op_type == "Cast" and best[0] is node):
            best = node, scale, bias
    return best


def _parameter(node: ir.Node, value: ir.Value, size: int | None) -> ir.Value | None:
    """The constant `[K]` that a node of two operands puts to `value`."""
    if node.op_type not in ("Mul", "Add") or len(node.inputs) != 2:
        return None
    other = other_operand(node, value)
    if other is None or other is value or other.shape is None or not is_constant(other):
        return None
    dims = list(other.shape)
    return other if len(dims) == 1 and dims[0] == size and dims[0] != 1 else None


def _reader(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The one node of these types that reads `value`, which no other node reads."""
    node = only_reader(value)
    return node if node is not None and node.op_type in op_types else None


def _first(value: ir.Value) -> ir.Node:
    """A node to name where the readers of `value` are not as expected."""
    found = readers(value)
    node = found[0] if found else value.producer()
    assert node is not None
    return node


def _candidate(norm: _Norm, op: str, size: int) -> Candidate:
    def build(builder: Builder, inputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
        scale = norm.scale if norm.scale is not None else _ones(builder, norm, size)
        parameters = [scale] if norm.bias is None else [scale, norm.bias]
        made = builder.op(
            op,
            [inputs[0], *(_as(builder, value, norm.end) for value in parameters)],
            attributes={"axis": -1, "epsilon": norm.epsilon},
            like=norm.end,
        )
        return [made]

    fusion = "layer_norm" if norm.centered else "rms_norm"
    shapes = {} if norm.x.shape is not None else {norm.x.name or "": ("batch", "rows", size)}
    return Candidate(fusion, norm.node, (norm.x,), (norm.end,), op, build, shapes=shapes)


def _ones(builder: Builder, norm: _Norm, size: int) -> ir.Value:
    """γ where there is none."""
    dtype = norm.end.dtype
    assert dtype is not None

    def make(shared: Builder) -> list[ir.Value]:
        return [shared.constant("ones", np.ones(size, dtype.numpy()))]

    return builder.shared(("ones", size, dtype), make)[0]


def _as(builder: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """A parameter in the type of the result."""
    if value.dtype == like.dtype:
        return value
    assert like.dtype is not None
    return builder.op(
        "Cast", [value], attributes={"to": int(like.dtype)}, dtype=like.dtype, shape=value.shape
    )
