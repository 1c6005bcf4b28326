"""The shapes of ops' results from the shapes, and the integers, that they read."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.constants import scalar
from qgraph.kernel_ops import CONTRIB_OPS, NBITS, KernelOp
from qgraph.passes.dims import Known, Size, Sizes, at_most, broadcast, product
from qgraph.passes.int_rules import Rule, blank
from qgraph.sites import QGRAPH_DOMAIN

_SAME = frozenset(
    "Abs BiasGelu Cast CastLike Ceil Clip Cos CumSum DequantizeLinear Dropout Elu Erf Exp FastGelu "
    "DynamicQuantizeLinear Floor Gelu QuantizeLinear ScatterElements ScatterND "
    "HardSigmoid HardSwish Identity IsInf IsNaN LayerNormalization LeakyRelu Log LogSoftmax Mish "
    "Neg Not QuickGelu RMSNormalization Reciprocal Relu RotaryEmbedding Round Selu Sigmoid Sign "
    "SimplifiedLayerNormalization Sin Softmax Softplus Sqrt Tanh Trilu".split()
)
_BROADCAST = frozenset(
    "Add And BitwiseAnd Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or Pow "
    "Sub Where Xor".split()
)
_REDUCE = frozenset(f"Reduce{name}" for name in "L2 Max Mean Min Prod Sum SumSquare".split())


def shape_of(known: Known, node: ir.Node) -> Sizes | None:
    """The shape of a node's first output; None where not even the rank is known."""
    if node.op_type in _SAME:
        return known.shape(node, 0)
    if node.op_type in _BROADCAST:
        return _met(known, node)
    if node.op_type in _REDUCE:
        return _reduced(known, node)
    if node.domain == QGRAPH_DOMAIN and node.op_type.startswith("Linear"):
        return _rows_of_first(known, node)
    rule = _SHAPES.get(node.op_type)
    return rule(known, node) if rule is not None else None


def _met(known: Known, node: ir.Node) -> Sizes | None:
    found: Sizes = []
    for index in range(len(node.inputs)):
        given = known.shape(node, index)
        if given is None:
            return None
        found = broadcast(found, given)
    return found


def _reshaped(known: Known, node: ir.Node) -> Sizes | None:
    wanted, given = known.ints(node, 1), known.shape(node, 0)
    if wanted is None:
        return blank(known.shape(node, 1))
    zero_copies = not node.attributes.get_int("allowzero", 0)
    made: list[Size | None] = []
    for axis, each in enumerate(wanted):
        if each is not None and each.number == 0 and zero_copies:
            each = given[axis] if given is not None and axis < len(given) else None
        made.append(each)
    free = [axis for axis, each in enumerate(made) if each is not None and each.number == -1]
    if free:
        others = product([each for axis, each in enumerate(made) if axis not in free])
        total = product(given) if given is not None else None
        whole = total is not None and others is not None and len(free) == 1
        made[free[0]] = total.over(others) if whole and total and others else None
    return made


def _transposed(known: Known, node: ir.Node) -> Sizes | None:
    given, perm = known.shape(node, 0), node.attributes.get("perm")
    if given is None:
        return None
    return [given[int(a)] for a in perm.as_ints()] if perm is not None else given[::-1]


def _multiplied(known: Known, node: ir.Node) -> Sizes | None:
    first, second = known.shape(node, 0), known.shape(node, 1)
    if first is None or second is None or len(first) < 2 or len(second) < 2:
        return None
    return [*broadcast(first[:-2], second[:-2]), first[-2], second[-1]]


def _linear(known: Known, node: ir.Node) -> Sizes | None:
    given, size = known.shape(node, 0), node.attributes.get_int("N", 0)
    return [*given[:-1], Size.of(size)] if given and size else None


def _rows_of_first(known: Known, node: ir.Node) -> Sizes | None:
    """Of products whose number of columns is a number, and known as such."""
    given = known.shape(node, 0)
    return [*given[:-1], None] if given else None


def _looked_up_packed(known: Known, node: ir.Node) -> Sizes | None:
    at = known.shape(node, 1)
    return [*at, None] if at is not None else None


def _convolved(known: Known, node: ir.Node) -> Sizes | None:
    given = known.shape(node, 0)
    return [given[0], *[None] * (len(given) - 1)] if given else None


def _picked(known: Known, node: ir.Node) -> Sizes | None:
    given, at = known.shape(node, 0), known.shape(node, 1)
    if given is None or not at or at[-1] is None or at[-1].number is None:
        return None
    batch = node.attributes.get_int("batch_dims", 0)
    return [*at[:-1], *given[batch + at[-1].number :]]


def _general(known: Known, node: ir.Node) -> Sizes | None:
    first, second = known.shape(node, 0), known.shape(node, 1)
    if first is None or second is None:
        return None
    rows = first[1 if node.attributes.get_int("transA", 0) else 0]
    return [rows, second[0 if node.attributes.get_int("transB", 0) else 1]]


def _looked_up(known: Known, node: ir.Node) -> Sizes | None:
    table, at = known.shape(node, 0), known.shape(node, 1)
    if table is None or at is None:
        return None
    axis = node.attributes.get_int("axis", 0) % max(1, len(table))
    return [*table[:axis], *at, *table[axis + 1 :]]


def _expanded(known: Known, node: ir.Node) -> Sizes | None:
    given, wanted = known.shape(node, 0), known.ints(node, 1)
    return broadcast(given, wanted) if given is not None and wanted is not None else None


def _with_ones(known: Known, node: ir.Node) -> Sizes | None:
    given, axes = known.shape(node, 0), known.axes(node, 1)
    if given is None or axes is None:
        return None
    rank = len(given) + len(axes)
    ones = {axis % rank for axis in axes}
    rest = iter(given)
    return [Size.of(1) if axis in ones else next(rest) for axis in range(rank)]


def _without_ones(known: Known, node: ir.Node) -> Sizes | None:
    given, axes = known.shape(node, 0), known.axes(node, 1)
    if not given or axes is None:
        return None
    gone = {axis % len(given) for axis in axes}
    return [each for axis, each in enumerate(given) if axis not in gone]


def _concatenated(known: Known, node: ir.Node) -> Sizes | None:
    parts = [known.shape(node, index) for index in range(len(node.inputs))]
    axes = [part for part in parts if part]
    if len(axes) < len(parts) or len({len(part) for part in axes}) != 1:
        return None
    axis = node.attributes.get_int("axis", 0) % len(axes[0])
    columns = list(zip(*axes, strict=True))
    made = [next((each for each in column if each is not None), None) for column in columns]
    made[axis] = Size.of(0)
    for each in columns[axis]:
        total = made[axis]
        made[axis] = total + each if total is not None and each is not None else None
    return made


def _reduced(known: Known, node: ir.Node) -> Sizes | None:
    given, axes = known.shape(node, 0), known.axes(node, 1)
    if not given or axes is None:
        return None
    gone = {axis % len(given) for axis in axes}
    if node.attributes.get_int("keepdims", 1):
        return [Size.of(1) if axis in gone else each for axis, each in enumerate(given)]
    return [each for axis, each in enumerate(given) if axis not in gone]


def _sliced(known: Known, node: ir.Node) -> Sizes | None:
    given, axes = known.shape(node, 0), known.axes(node, 3)
    starts, ends, steps = known.ints(node, 1), known.ints(node, 2), known.numbers(node, 4)
    if given is None or starts is None or ends is None or len(starts) != len(ends):
        return None
    made = list(given)
    for index, axis in enumerate(axes if axes is not None else range(len(starts))):
        step = steps[index] if steps is not None else 1
        made[axis] = _span(given[axis], starts[index], ends[index]) if step == 1 else None
    return made


def _span(size: Size | None, start: Size | None, end: Size | None) -> Size | None:
    """How many elements lie between two places of an axis."""
    if size is None or start is None or end is None or start.number is None:
        return None
    first, last, length = start.number, end.number, size.number
    if length is not None and last is not None:
        return Size.of(len(range(length)[first:last]))
    if first:
        return None
    if last is not None:
        return size if last > 2**31 else None
    if end == size:
        return size
    return at_most(length, end) if length is not None and end.is_positive else None


def split_shapes(known: Known, node: ir.Node) -> list[list[Size | None]]:
    """The shapes of a Split's outputs; none where its input's rank is not known."""
    given, parts = known.shape(node, 0), known.numbers(node, 1)
    if not given:
        return []
    axis, count = node.attributes.get_int("axis", 0) % len(given), len(node.outputs)
    size = given[axis]
    if parts is None:
        equal = size.over(Size.of(count)) if size is not None and len(node.inputs) < 2 else None
        return [[*given[:axis], equal, *given[axis + 1 :]]] * count
    return [[*given[:axis], Size.of(part), *given[axis + 1 :]] for part in parts]


def _counted(known: Known, node: ir.Node) -> Sizes | None:
    start, end, step = (_whole(known, node, index) for index in range(3))
    if start is None or end is None or step != Size.of(1):
        return None
    return [end - start]


def _whole(known: Known, node: ir.Node, index: int) -> Size | None:
    """A scalar; ranges of floats have whole numbers too."""
    found, number = known.ints(node, index), scalar(node.inputs[index])
    if found:
        return found[0]
    return Size.of(int(number)) if number is not None and number.is_integer() else None


def _packed_rule(op: KernelOp) -> Rule:
    if op.kind == "gather":
        return _looked_up_packed
    return _linear if op is NBITS else _rows_of_first


_SHAPES: dict[str, Rule] = {
    **{name: _packed_rule(op) for name, op in CONTRIB_OPS.items()},
    "Attention": _rows_of_first,
    "Concat": _concatenated,
    "Conv": _convolved,
    "Expand": _expanded,
    "Gather": _looked_up,
    "GatherElements": lambda known, node: known.shape(node, 1),
    "GatherND": _picked,
    "Gemm": _general,
    "MatMul": _multiplied,
    "Range": _counted,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Squeeze": _without_ones,
    "Transpose": _transposed,
    "Unsqueeze": _with_ones,
}
