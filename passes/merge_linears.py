"""The linears of queries, keys and values as one, where their reader takes them packed.

One MatMulNBits reads its activation, and rounds it to int8, once instead of three times. Gate and
up projections stay apart: what one product gains at a single row (2 %), the Split behind it loses
many times over at prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.formats.base import PARTS, Part
from qgraph.passes.fuse_bias import LINEAR, bias_of
from qgraph.passes.fusion import MICROSOFT, Attributes, Builder, Candidate, FusionContext, Miss
from qgraph.passes.matching import only_reader
from qgraph.passes.merged_source import MergedSource, can_merge
from qgraph.quant_tensor import QuantTensor

_READER = "GroupQueryAttention"
_PLACES: dict[Part, int] = {"codes": 1, "scales": 2, "zeros": 3}
_SPELLING = "three MatMulNBits of one activation, format and kernel, read by one attention"


def merge_linears(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
    """Q, K and V of an attention that takes them as one."""
    for node in context.nodes(_READER):
        values = list(node.inputs[:3])
        linears = [value.producer() if value is not None else None for value in values]
        found = [each for each in linears if each is not None and each.op_type == LINEAR]
        if node.graph is None or len(found) != 3 or found[0].inputs[0] is not found[1].inputs[0]:
            continue
        edge = _obstacle(found, context)
        if edge:
            yield Miss("merge_linears", node, _SPELLING, edge)
        else:
            yield _candidate(node, found, context)


def _obstacle(linears: Sequence[ir.Node], context: FusionContext) -> str:
    """Why linears cannot become one; empty where they can."""
    first = linears[0]
    for node in linears:
        if node.inputs[0] is not first.inputs[0]:
            return f"{node.name} and {first.name} read different activations"
        if only_reader(node.outputs[0]) is None:
            return f"{node.outputs[0].name} is read elsewhere too"
        if _kernel(node) != _kernel(first):
            return f"{node.name} and {first.name} differ in bits, block, level or zero points"
        if len(node.inputs) > 4 and node.inputs[4] is not None:
            return f"{node.name} reads its groups by an index"
        if str(node.name) in context.findings.apart:
            return f"{node.name} failed a check when it was one with others"
    if len({node.inputs[1] for node in linears}) < len(linears):
        return "two of them share one weight"
    if any(len(value.uses()) > 1 for node in linears for value in node.inputs[1:4] if value):
        return "one of their weights is shared with another site"
    tensors = [_tensors(node) for node in linears]
    if all(tensors):
        layouts = {tuple(t[part].layout.of(part) for part in t) for t in tensors}
        if len(layouts) > 1 or not can_merge([t["codes"].source for t in tensors]):
            return "their formats differ, or a number of rows is no multiple of 8"
    elif any(tensors) or not all(_stored(node) for node in linears):
        return "some of their weights came packed in the file, or are no constants"
    elif len({_stored(node) for node in linears}) > 1:
        return "their weights came packed in arrays of different types"
    biases = [bias_of(node) for node in linears]
    if any(bias is not None and bias.const_value is None for bias in biases):
        return "one of their biases is no constant"
    return ""


def _kernel(node: ir.Node) -> tuple[object, ...]:
    names = ("K", "bits", "block_size", "accuracy_level")
    present = [value is not None for value in node.inputs[1:4]]
    return (*(node.attributes.get_int(name, 0) for name in names), *present, bias_of(node) is None)


def _tensors(node: ir.Node) -> dict[Part, QuantTensor]:
    """The parts of a weight that this run packs; empty where it is not such a one."""
    found: dict[Part, QuantTensor] = {}
    for part in PARTS:
        place = _PLACES.get(part)
        value = node.inputs[place] if place is not None and place < len(node.inputs) else None
        if value is None:
            continue
        if not isinstance(value.const_value, QuantTensor):
            return {}
        found[part] = value.const_value
    return found


def _stored(node: ir.Node) -> tuple[object, ...]:
    """Type and row of each part of a weight that came packed; empty where one is no constant."""
    found: list[object] = []
    for value in node.inputs[1:4]:
        tensor = value.const_value if value is not None and value.is_initializer() else None
        if value is not None and (tensor is None or value.is_graph_input()):
            return ()
        found.append(None if tensor is None else (tensor.dtype, *tensor.shape.numpy()[1:]))
    return tuple(found)


def _stacked(values: Sequence[ir.Value | None], name: str) -> ir.LazyTensor | None:
    """Parts that came packed, row behind row: each row takes whole bytes, and none is changed."""
    tensors = [v.const_value for v in values if v is not None and v.const_value is not None]
    if not tensors:
        return None
    first, *more = tensors[0].shape.numpy()
    rows = first + sum(tensor.shape.numpy()[0] for tensor in tensors[1:])

    def stacked() -> ir.TensorProtocol:
        array = np.concatenate([tensor.numpy() for tensor in tensors])
        for tensor in tensors:
            release(tensor)
        return ir.Tensor(array, dtype=tensors[0].dtype, name=name)

    return ir.LazyTensor(stacked, tensors[0].dtype, ir.Shape([rows, *more]), name=name)


def _candidate(node: ir.Node, linears: Sequence[ir.Node], context: FusionContext) -> Candidate:
    activation = linears[0].inputs[0]
    assert activation is not None
    name = f"{linears[0].name}/qkv"
    merged = tuple(str(each.name) for each in linears)
    made = context.made.get(node)
    rest = [v for v in made.inputs if v not in node.inputs[:3]] if made is not None else []

    def build(builder: Builder, _given: Sequence[ir.Value]) -> Sequence[ir.Value]:
        packed = builder.op(
            LINEAR,
            [activation, *_parts(builder, linears, name)],
            domain=MICROSOFT,
            attributes={**_attributes(linears[0]), "N": sum(_rows(each) for each in linears)},
            dtype=linears[0].outputs[0].dtype,
            shape=_packed_shape(linears),
            name=name,
        )
        return builder.again(node, [packed, None, None, *node.inputs[3:]])

    return Candidate(
        "merge_linears", node, tuple(dict.fromkeys((activation, *rest))),
        tuple(value for value in node.outputs if value.name),
        f"{MICROSOFT}::{LINEAR}", build, merged=merged, proof=_proof(node, linears),
        feeds=made.feeds if made is not None else {}, dims=made.dims if made is not None else {},
        reason=f"{', '.join(merged)} in one",
    )  # fmt: skip


def _parts(builder: Builder, linears: Sequence[ir.Node], name: str) -> list[ir.Value | None]:
    """The inputs of the one linear behind its activation: parts of the weight, and the bias."""
    tensors = [_tensors(node) for node in linears]
    packed = all(tensors)
    source = MergedSource([each["codes"].source for each in tensors], name) if packed else None
    found: list[ir.Value | None] = [None] * 5
    for part, place in _PLACES.items():
        label = f"{name}.{part}"
        tensor: ir.TensorProtocol | None = None
        if source is not None and part in tensors[0]:
            tensor = QuantTensor(source, part, tensors[0][part].layout, "")
        elif source is None:
            given = [node.inputs[place] for node in linears if place < len(node.inputs)]
            tensor = _stacked(given, label)
        if tensor is not None:
            found[place - 1] = builder.initializer(label, tensor)
    biases = [bias_of(node) for node in linears]
    arrays = [each.const_value.numpy() for each in biases if each is not None and each.const_value]
    if arrays:
        found[-1] = builder.constant(f"{name}.bias", np.concatenate(arrays))
    return found


def _attributes(node: ir.Node) -> Attributes:
    names = ("K", "bits", "block_size", "accuracy_level")
    return {name: node.attributes.get_int(name, 0) for name in names if name in node.attributes}


def _rows(node: ir.Node) -> int:
    return node.attributes.get_int("N", 0)


def _packed_shape(linears: Sequence[ir.Node]) -> list[int | str | None] | None:
    shape = linears[0].outputs[0].shape
    if shape is None:
        return None
    front = [dim if isinstance(dim, int) else dim.value for dim in shape[:-1]]
    return [*front, sum(_rows(node) for node in linears)]


def _proof(node: ir.Node, linears: Sequence[ir.Node]) -> tuple[object, ...]:
    """What the candidates that one check proves have in common; bytes are checked as written."""
    attributes = sorted((name, str(attr.value)) for name, attr in node.attributes.items())
    given = tuple(value is not None for value in node.inputs)
    kinds = ((_rows(each), _kernel(each), _stored(each)) for each in linears)
    return (*attributes, *given, *kinds)
