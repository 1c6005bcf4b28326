"""Compute what depends on small constants alone, and take out what changes nothing.

Exporters spell axes, shapes and ε as casts and reshapes of constants; fusions read them as numbers.
"""

from __future__ import annotations

import onnx_ir as ir

from qgraph.constants import FLOATS
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.passes.fusion_check import Evaluate, evaluate_constants
from qgraph.quant_tensor import QuantTensor
from qgraph.rewrite import Rewriter
from qgraph.scopes import bodies

_SMALL = 65536
"""Elements of the largest constant that is read or made."""
_GROWN = 4096
"""Elements of the largest that is made of a smaller one: files would grow by tables of places."""
_BEYOND = 2**31 - 1
"""What exporters write for the end of an axis, at least."""
_GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize"})
"""Ops whose result may be larger than what they read: taken only where its shape is known."""
_LEFT = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike", "Dropout", "DequantizeLinear", "QuantizeLinear", "Constant",
    }
)  # fmt: skip
"""Ops with a result of their own at each run, and weights that stay packed."""


def fold_constants(rewriter: Rewriter, evaluate: Evaluate) -> int:
    """Fold in the main graph; how many nodes went away."""
    graph = rewriter.model.graph
    before = len(graph)
    _name_types(rewriter)
    _drop_no_ops(rewriter)
    known: set[ir.Value] = set()
    foldable: list[ir.Node] = []
    for node in graph:
        if _is_foldable(node, known):
            known.update(node.outputs)
            foldable.append(node)
    ends = [v for node in foldable for v in node.outputs if v.name and _leaves(v, known)]
    if ends:
        try:
            arrays = evaluate_constants(rewriter.model, ends, evaluate)
        except (InputError, RuntimeError):  # a type or an op that the runtime does not have
            return before - len(graph)
        for value, array in zip(ends, arrays, strict=True):
            constant = rewriter.constant(f"{value.name}/folded", array)
            value.replace_all_uses_with(constant)
        rewriter.drop_unused(foldable)
        _drop_no_ops(rewriter)  # some are told by what was folded
    return before - len(graph)


def _name_types(rewriter: Rewriter) -> None:
    """Cast to a type by its name where another value shows it, which is no constant."""
    for node in [node for node in rewriter.model.graph if node.op_type == "CastLike"]:
        value, like = node.inputs
        if node.domain or like is None or like.dtype is None or "saturate" in node.attributes:
            continue
        to = {"to": int(like.dtype)}
        made = rewriter.node("Cast", [value], name=node.name or "Cast", attributes={**to})
        rewriter.replace(node, [made])


def _is_foldable(node: ir.Node, known: set[ir.Value]) -> bool:
    if node.domain or node.op_type in _LEFT or bodies(node) or not node.inputs:
        return False
    if node.op_type in _GROWING and not all(_is_small(value) for value in node.outputs):
        return False
    if any(value.is_graph_output() for value in node.outputs):
        return False
    return all(
        value is None or value in known or _is_small_constant(value) for value in node.inputs
    )


def _is_small_constant(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and not value.is_graph_input()
        and tensor is not None
        and not isinstance(tensor, QuantTensor)
        and tensor.dtype != ir.DataType.STRING
        and (tensor.size == 1 or not _is_stored(tensor.dtype))
        and tensor.size <= _SMALL
    )


def _is_stored(dtype: ir.DataType) -> bool:
    """Whether parameters are of this type, or codes of theirs: they stay as they are, stored once.

    A table and a head that share one blob of codes read it through views.
    """
    return dtype in FLOATS or (dtype.bitwidth <= 8 and dtype != ir.DataType.BOOL)


def _is_small(value: ir.Value) -> bool:
    if value.shape is None:
        return False
    size = 1
    for dim in value.shape:
        if not isinstance(dim, int):
            return False
        size *= dim
    return size <= _GROWN


def _leaves(value: ir.Value, known: set[ir.Value]) -> bool:
    """Whether a node that is not folded reads `value`."""
    return any(not known.issuperset(use.node.outputs) for use in value.uses())


def _drop_no_ops(rewriter: Rewriter) -> None:
    """Let the readers of a node that changes nothing read what it reads."""
    for node in list(rewriter.model.graph):
        value = node.inputs[0] if node.inputs else None
        if value is not None and _changes_nothing(node, value):
            result = node.outputs[0]
            if not result.is_graph_output():
                result.replace_all_uses_with(value)
                rewriter.drop_unused([node])


def _changes_nothing(node: ir.Node, value: ir.Value) -> bool:
    if node.domain:
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return value.dtype is not None and node.attributes.get_int("to", 0) == int(value.dtype)
    if node.op_type == "Slice":
        return _takes_all(node)
    perm = node.attributes.get("perm") if node.op_type == "Transpose" else None
    return perm is not None and list(perm.as_ints()) == sorted(perm.as_ints())


def _takes_all(node: ir.Node) -> bool:
    """Whether a Slice begins at 0 and ends beyond any size, by steps of 1, on whatever axes."""
    starts, ends, steps = (_small(node, at) for at in (1, 2, 4))
    if starts is None or ends is None or starts.any() or not (ends >= _BEYOND).all():
        return False
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        return steps is not None and bool((steps == 1).all())
    return True


def _small(node: ir.Node, at: int) -> Array | None:
    """The constant that a node reads as its input `at`."""
    value = node.inputs[at] if len(node.inputs) > at else None
    if value is None or not _is_small_constant(value):
        return None
    assert value.const_value is not None
    return value.const_value.numpy()
