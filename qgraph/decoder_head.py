"""The head of a decoder: what makes logits, and the logits of the last token alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.kernel_ops import CONTRIB_OPS
from qgraph.paired import find_logits
from qgraph.row_branches import branches
from qgraph.site import QGRAPH_DOMAIN
from qgraph.text import IDS

_LINEARS = {"MatMul": 2, "Gemm": 2} | {
    name: op.parts["scales"] + 1
    for name, op in CONTRIB_OPS.items()
    if op.kind == "linear" and not op.is_integer
}
"""By op the input behind its weight. Those of bytes, whose steps may be of all tokens, are none."""
_MOST_NODES = 16
"""A weight is computed from constants by fewer."""
_ELEMENTWISE = ("Cast", "Identity", "Mul", "Div", "Add", "Tanh")


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """What makes logits: a linear of an activation `[B, T, K]`, and element-wise ops behind it.

    values: from the logits back to the linear's output.
    """

    linear: ir.Node
    activation: ir.Value
    values: tuple[ir.Value, ...]


def head_of(model: ir.Model, logits: str) -> Head | str:
    """The head that makes the output `logits`; in words why it could not be given one token."""
    output = next(value for value in model.graph.outputs if value.name == logits)
    if of_last_token(output):
        return f"{logits} is of one token for each row already"
    node = output.producer()
    values = [output]
    while node is not None and node.op_type in _ELEMENTWISE:
        varying = [v for v in node.inputs if v is not None and not _constant(v)]
        if len(varying) != 1 or any(map(_differs_by_token, node.inputs)):
            return (
                f"{node.name} ({node.op_type}) makes {logits} of more than a linear and constants"
            )
        if reader := _other_reader(varying[0], node):
            return f"{varying[0].name}, of which {logits} is made, is also read by {reader}"
        values.append(varying[0])
        node = varying[0].producer()
    if node is None or not _is_linear(node) or node.graph is not model.graph:
        made = f"{node.name} ({node.op_type})" if node is not None else "an input"
        if node in branches(model.graph):
            made += ", an If by the number of rows"
        return f"{logits} is made by {made}, which is no linear of constant weights"
    x = node.inputs[0]
    others = node.inputs[1 : _LINEARS.get(node.op_type)]
    if not all(each is None or _constant(each) for each in others):
        return f"the weight of {node.name}, which makes {logits}, is no constant"
    # A linear's output has the rank of its input, which need not have a shape of its own.
    shape = None if x is None else (x.shape or values[-1].shape)
    if x is None or shape is None or len(shape) != 3:
        found = "of unknown shape" if shape is None else str(shape)
        return f"{node.name}, which makes {logits}, reads an activation {found}, not [B, T, K]"
    return Head(node, x, tuple(values))


def require_head(model: ir.Model) -> Head:
    """The head that can be given the last token of each row alone.

    Raises:
        InputError: the model gives no logits, or they are not made so; it says by what.
    """
    outputs = [(str(v.name), tuple(v.shape or ())) for v in model.graph.outputs]
    logits = find_logits(outputs, model)
    found = head_of(model, logits) if logits else "the model gives no logits [B, T, V]"
    if isinstance(found, str):
        raise InputError(f"--last-logits: {found}; leave it out")
    return found


def of_last_token(logits: ir.Value) -> bool:
    """Whether logits are of one token for each row, whatever a row holds: `[B, 1, V]`."""
    shape = logits.shape
    return shape is not None and len(shape) == 3 and shape[1] == 1


def logits_notes(model: ir.Model) -> list[str]:
    """What a graph says of its logits, where a row of several tokens gives those of one."""
    outputs = [(str(v.name), tuple(v.shape or ())) for v in model.graph.outputs]
    logits = find_logits(outputs, model)
    output = next((v for v in model.graph.outputs if v.name == logits), None)
    tokens = next((v for v in model.graph.inputs if v.name == IDS), None)
    one = tokens is not None and tokens.shape is not None and list(tokens.shape)[1:] == [1]
    if output is None or not of_last_token(output) or one:
        return []
    return [
        f"{logits} are those of the last token of each row alone: rows of several lengths are to "
        "be padded in front"
    ]


def give_last(model: ir.Model, head: Head) -> None:
    """Change a graph so that its head is given the last token of each row alone.

    A prompt's other logits are a large matrix that who makes text does not read.
    """
    node, x = head.linear, head.activation
    last = ir.Value(name=f"{node.name}/last", const_value=ir.tensor(np.array([-1])))
    last.type, last.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    model.graph.register_initializer(last)
    gather = ir.Node("", "Gather", [x, last], {"axis": ir.AttrInt64("axis", 1)})
    gather.name = f"{node.name}/last_token"
    taken = gather.outputs[0]
    taken.name, taken.type = f"{node.name}/last_token_output", x.type
    if x.shape is not None:
        taken.shape = ir.Shape([x.shape[0], 1, x.shape[2]])
    model.graph.insert_before(node, gather)
    node.replace_input_with(0, taken)
    for value in head.values:
        if value.shape is not None and len(value.shape) == 3:
            value.shape = ir.Shape([value.shape[0], 1, value.shape[2]])


def last_logits(model: ir.Model, logits: str) -> bool:
    """Give the head the last token alone, where the graph has one that this can be done to."""
    head = head_of(model, logits)
    if isinstance(head, str):
        return False
    give_last(model, head)
    return True


def _other_reader(value: ir.Value, reader: ir.Node) -> str:
    """Who reads a value besides a node, in words; empty where nobody does."""
    if value.is_graph_output():
        return "who runs the model"
    return next((str(node.name) for node, _ in value.uses() if node is not reader), "")


def _differs_by_token(value: ir.Value | None) -> bool:
    """Whether it is a constant with another row for each token."""
    if value is None or not _constant(value):
        return False
    shape = value.shape if value.const_value is None else value.const_value.shape
    return shape is None or (len(shape) > 1 and shape[-2] != 1)


def _is_linear(node: ir.Node) -> bool:
    own = node.domain == QGRAPH_DOMAIN and node.op_type.startswith("Linear")
    return own or node.op_type in _LINEARS


def _constant(value: ir.Value) -> bool:
    """Whether a value is one, or is computed from constants: a table turned around, codes."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        each = pending.pop()
        if each in seen or each.const_value is not None:
            continue
        seen.add(each)
        node = each.producer()
        if node is None or len(seen) > _MOST_NODES:
            return False
        pending += [other for other in node.inputs if other is not None]
    return True
