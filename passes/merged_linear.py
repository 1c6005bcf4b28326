"""Linears of packed weights as one, that holds all their rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.formats.base import Part
from qgraph.kernel_ops import NBITS
from qgraph.passes.fusion import MICROSOFT, Attributes, Builder
from qgraph.passes.matching import only_reader
from qgraph.passes.merged_source import MergedSource, can_merge
from qgraph.passes.packed_linear import NUMBERS, OPS, Behind, Linear
from qgraph.quant_tensor import QuantTensor
from qgraph.row_branches import MANY


def obstacle(linears: Sequence[Linear], apart: Collection[str], *, leaves: bool = False) -> str:
    """Why linears cannot become one; empty where they can.

    apart: those that must not. leaves: whether outputs are those of a body, which nobody in it
    reads.
    """
    first = linears[0]
    for each in linears:
        if each.activation is not first.activation:
            return f"{each.name} and {first.name} read different activations"
        if read := _read_elsewhere(each, leaves):
            return f"{read} is read elsewhere too"
        if each.kind != first.kind:
            return f"{each.name} and {first.name} differ in bits, block, level or zero points"
        if OPS[each.product.op_type] is NBITS and len(each.shared) > 1:
            return f"{each.name} reads its groups by an index"
        if each.shared != first.shared or any(_is_vector(v) for v in each.shared):
            return f"{each.name} and {first.name} read different scales or zero points"
        if each.name in apart:
            return f"{each.name} failed a check when it was one with others"
    return _of_weights(linears)


def _of_weights(linears: Sequence[Linear]) -> str:
    products = [each.product for each in linears]
    if len({node.inputs[1] for node in products}) < len(linears):
        return "two of them share one weight"
    op = OPS[products[0].op_type]
    parts = [value for node in products for part in op.parts if (value := op.read(node, part))]
    if any(len(value.uses()) > 1 for value in parts):
        return "one of their weights is shared with another site"
    tensors = [_tensors(node) for node in products]
    if all(tensors):
        layouts = {tuple(t[part].layout.of(part) for part in t) for t in tensors}
        if len(layouts) > 1 or not can_merge([t["codes"].source for t in tensors]):
            return "their formats differ, or a number of rows is no multiple of 8"
    elif any(tensors) or not all(_stored(node) for node in products):
        return "some of their weights came packed in the file, or are no constants"
    elif len({_stored(node) for node in products}) > 1:
        return "their weights came packed in arrays of different types"
    if any(each.bias is not None and each.bias.const_value is None for each in linears):
        return "one of their biases is no constant"
    return ""


def _read_elsewhere(linear: Linear, leaves: bool) -> str:
    """The name of a value between product and output, or of this, that others read."""
    values = [linear.product.outputs[0], *(each.node.outputs[0] for each in linear.behind)]
    *inner, last = values
    for value in inner:
        if only_reader(value) is None:
            return str(value.name)
    alone = not last.uses() if leaves else only_reader(last) is not None
    return "" if alone else str(last.name)


def _is_vector(value: ir.Value | None) -> bool:
    """Whether it is a constant of several numbers: one to a channel, say."""
    tensor = value.const_value if value is not None else None
    return tensor is not None and tensor.size != 1


def _tensors(node: ir.Node) -> dict[Part, QuantTensor]:
    """The parts of a weight that this run packs; empty where it is not such a one."""
    found: dict[Part, QuantTensor] = {}
    op = OPS[node.op_type]
    for part in op.parts:
        value = op.read(node, part)
        if value is None:
            continue
        if not isinstance(value.const_value, QuantTensor):
            return {}
        found[part] = value.const_value
    return found


def _stored(node: ir.Node) -> tuple[object, ...]:
    """Type and row of each part of a weight that came packed; empty where one is no constant."""
    found: list[object] = []
    op = OPS[node.op_type]
    for part in op.parts:
        value, axis = op.read(node, part), op.row_axis(part)
        tensor = value.const_value if value is not None and value.is_initializer() else None
        if value is not None and (tensor is None or value.is_graph_input()):
            return ()
        if tensor is None:
            found.append(None)
            continue
        dims = tensor.shape.numpy()
        if len(dims) <= axis:  # one scale for the whole weight
            return ()
        found.append((tensor.dtype, *dims[:axis], *dims[axis + 1 :]))
    return tuple(found)


def merged_name(linears: Sequence[Linear]) -> str:
    """The name of the site that holds them; a copy for many rows is called as those are."""
    name = linears[0].name
    ending = MANY if name.endswith(MANY) else ""
    return f"{name.removesuffix(ending)}/qkv{ending}"


def merge(builder: Builder, linears: Sequence[Linear]) -> ir.Value:
    """One linear in place of several: its outputs are theirs, one behind the other."""
    first, name = linears[0], merged_name(linears)
    product = first.product
    given = _parts(builder, linears, name)
    value = builder.op(
        product.op_type,
        [given.get(place, value) for place, value in enumerate(product.inputs)],
        domain=MICROSOFT,
        attributes=_attributes(linears),
        dtype=product.outputs[0].dtype,
        shape=packed_shape(linears),
        name=name,
    )
    for at, step in enumerate(first.behind):
        value = _again(builder, step, value, [each.behind[at].other for each in linears], name)
    return value


def _again(
    builder: Builder, step: Behind, value: ir.Value, others: Sequence[ir.Value | None], name: str
) -> ir.Value:
    """One step behind the products, behind that of all their rows."""
    like, shape = step.node.outputs[0], value.shape
    if step.kind == "cast":
        to = step.node.attributes.get_int("to", 0)
        return builder.op(
            "Cast", [value], attributes={"to": to}, dtype=like.dtype, shape=shape,
            name=f"{name}/narrow",
        )  # fmt: skip
    if step.kind == "rows":
        return builder.op(
            "Mul", [value, step.other], dtype=like.dtype, shape=shape, name=f"{name}/rows"
        )
    if step.kind == "bias":
        added = _added(builder, others, name)
        return builder.op("Add", [value, added], dtype=like.dtype, shape=shape, name=f"{name}/bias")
    arrays = [each.const_value.numpy() for each in others if each is not None and each.const_value]
    weight = builder.constant(f"{name}.floats", np.concatenate(arrays, axis=1))
    product = builder.op(
        "MatMul", [step.gathered, weight], dtype=like.dtype, shape=shape,
        name=f"{name}/float_columns",
    )  # fmt: skip
    return builder.op("Add", [value, product], dtype=like.dtype, shape=shape, name=f"{name}/sum")


def _added(builder: Builder, values: Sequence[ir.Value | None], name: str) -> ir.Value | None:
    """What they add, as one constant; linears in two bodies that add the same share it."""
    known: ir.Value | None = builder.context.memo.get(("added", *values))
    if known is not None and known.is_initializer():
        return known
    arrays = [each.const_value.numpy() for each in values if each is not None and each.const_value]
    if not arrays:
        return None
    made = builder.constant(f"{name}.bias", np.concatenate(arrays))
    builder.context.memo[("added", *values)] = made
    return made


def _parts(builder: Builder, linears: Sequence[Linear], name: str) -> dict[int, ir.Value | None]:
    """By input what belongs to rows: parts of the weight, and the bias."""
    op = OPS[linears[0].product.op_type]
    tensors = [_tensors(each.product) for each in linears]
    packed = all(tensors)
    source = MergedSource([each["codes"].source for each in tensors], name) if packed else None
    found: dict[int, ir.Value | None] = {}
    for part, place in op.parts.items():
        label = f"{name}.{part}"
        tensor: ir.TensorProtocol | None = None
        if source is not None and part in tensors[0]:
            tensor = QuantTensor(source, part, tensors[0][part].layout, "")
        elif source is None:
            values = [op.read(each.product, part) for each in linears]
            tensor = _stacked(values, op.row_axis(part), label)
        found[place] = builder.initializer(label, tensor) if tensor is not None else None
    if op.bias is not None:
        found[op.bias] = _added(builder, [each.bias for each in linears], name)
    return found


def _stacked(values: Sequence[ir.Value | None], axis: int, name: str) -> ir.LazyTensor | None:
    """Parts that came packed, one behind the other: rows take whole bytes, and none is changed."""
    tensors = [v.const_value for v in values if v is not None and v.const_value is not None]
    if not tensors:
        return None
    shape = list(tensors[0].shape.numpy())
    shape[axis] = sum(int(tensor.shape.numpy()[axis]) for tensor in tensors)

    def stacked() -> ir.TensorProtocol:
        array = np.concatenate([tensor.numpy() for tensor in tensors], axis=axis)
        for tensor in tensors:
            release(tensor)
        return ir.Tensor(array, dtype=tensors[0].dtype, name=name)

    return ir.LazyTensor(stacked, tensors[0].dtype, ir.Shape(shape), name=name)


def _attributes(linears: Sequence[Linear]) -> Attributes:
    given = linears[0].product.attributes
    found: Attributes = {name: given.get_int(name, 0) for name in NUMBERS if name in given}
    return {**found, "N": rows_of(linears)} if "N" in given else found


def rows_of(linears: Sequence[Linear]) -> int:
    """The channels of all of them."""
    return sum(each.rows for each in linears)


def packed_shape(linears: Sequence[Linear]) -> list[int | str | None] | None:
    """The shape of all their outputs, one behind the other; None where one's is not known."""
    shape = linears[0].output.shape
    if shape is None:
        return None
    front = [dim if isinstance(dim, int) else dim.value for dim in shape[:-1]]
    return [*front, rows_of(linears)]


def reading(attention: ir.Node) -> tuple[object, ...]:
    """What attentions that one check proves have in common."""
    attributes = sorted((name, str(attr.value)) for name, attr in attention.attributes.items())
    return (*attributes, *(value is not None for value in attention.inputs))


def proof(linears: Sequence[Linear]) -> tuple[object, ...]:
    """What linears that one check proves have in common; bytes are checked as written."""
    return tuple((each.rows, each.kind, _stored(each.product)) for each in linears)
