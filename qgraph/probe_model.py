"""One site as a model of its own, whose weights point into the written data file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qgraph.block_sums import BlockSums
from qgraph.constants import constant_value, from_bytes
from qgraph.formats.base import Array, Part
from qgraph.integer_sites import IntegerProduct
from qgraph.probe import Probe, dequantized_rows, given_bias, x_type
from qgraph.site import QGRAPH_DOMAIN
from qgraph.stored_weight import read_bytes


def one_site_model(probe: Probe, model: ir.Model) -> bytes:
    """`probe`'s node alone, in the opsets of `model`; its stored inputs stay where they are.

    Where it multiplies quantized activations, all that stands around it.
    """
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []
    x = ir.Value(name="x", type=ir.TensorType(x_type(probe))) if probe.x is not None else None
    inputs: list[ir.Value | None] = []
    for index, value in enumerate(probe.node.inputs if probe.integer is None else ()):
        if value is None or index == probe.x:
            inputs.append(None if value is None else x)
            continue
        constant = _given(probe, index, value)
        initializers.append(constant)
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose":
            nodes.append(ir.node("Transpose", [constant], {"perm": [1, 0]}))
            constant = nodes[-1].outputs[0]
        elif producer is not None and producer.op_type != "Gather":
            shape = _constant(f"{constant.name}_shape", np.array([probe.key.n, -1], np.int64))
            initializers.append(shape)
            nodes.append(ir.Node("", "Reshape", [constant, shape]))
            constant = nodes[-1].outputs[0]
        inputs.append(constant)
    if probe.integer is not None and x is not None:
        _add_product(probe, probe.integer, x, nodes, initializers)
    else:
        attributes = list(probe.node.attributes.values())
        checked = ir.Node(probe.node.domain, probe.node.op_type, inputs, attributes, name="checked")
        nodes.append(checked)
    if probe.sums is not None and x is not None:
        _add_sums(probe, probe.sums, x, nodes, initializers)
    if probe.kind == "gather" and probe.key.block and probe.key.k % probe.key.block:
        ends = {"starts": 0, "ends": probe.key.k, "axes": -1}
        slices = [_constant(name, np.array([at], np.int64)) for name, at in ends.items()]
        initializers += slices
        nodes.append(ir.Node("", "Slice", [nodes[-1].outputs[0], *slices]))
    y = nodes[-1].outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.from_numpy(np.dtype(probe.key.dtype)))
    graph = ir.Graph(
        [x] if x is not None else [], [y], nodes=nodes, initializers=initializers,
        opset_imports=dict(model.opset_imports), name="check",
    )  # fmt: skip
    functions = list(model.functions.values()) if probe.node.domain == QGRAPH_DOMAIN else []
    one = ir.Model(graph, ir_version=model.ir_version, functions=functions)
    return bytes(ir.to_proto(one).SerializeToString())


def _given(probe: Probe, index: int, value: ir.Value) -> ir.Value:
    """The constant that the checked node reads at `index`: a bias of our own, else as stored."""
    if index == probe.bias:
        return _constant("bias", given_bias(probe))
    if index in probe.positions:
        return _stored(probe, probe.positions[index])
    assert value.const_value is not None
    return constant_value(
        f"constant_{index}", probe.constants.get(value.name or "", value.const_value)
    )


def _add_sums(
    probe: Probe, sums: BlockSums, x: ir.Value, nodes: list[ir.Node], initializers: list[ir.Value]
) -> None:
    """Copies of the nodes that add minimums to the last one's result, in the order they run."""
    activation = probe.node.inputs[0]
    assert activation is not None
    known = {activation: x, probe.node.outputs[0]: nodes[-1].outputs[0]}
    first = sums.sums[0].inputs[0]
    if first is not None:  # the activation, or what was cast to it
        known[first] = x
    known[sums.minimums] = _stored(probe, "minimums")
    initializers.append(known[sums.minimums])
    _add_copies((*sums.sums, *sums.added), known, probe, nodes, initializers)


def _add_product(
    probe: Probe,
    integer: IntegerProduct,
    x: ir.Value,
    nodes: list[ir.Node],
    initializers: list[ir.Value],
) -> None:
    """Copies of the nodes from the float activation `x` to the result."""
    known = {integer.x: x}
    for index, value in enumerate(probe.node.inputs):
        if value is not None and (index in probe.positions or index == probe.bias):
            known[value] = _given(probe, index, value)
            initializers.append(known[value])
    _add_copies(integer.nodes, known, probe, nodes, initializers)


def _add_copies(
    copied: Sequence[ir.Node],
    known: dict[ir.Value, ir.Value],
    probe: Probe,
    nodes: list[ir.Node],
    initializers: list[ir.Value],
) -> None:
    """Copies of nodes, in the order they run, and of the constants that are not `known` yet."""
    for node in copied:
        for value in node.inputs:
            if value is not None and value not in known and value.const_value is not None:
                stored = probe.constants.get(value.name or "", value.const_value)
                known[value] = constant_value(f"constant_{len(initializers)}", stored)
                initializers.append(known[value])
        inputs = [None if value is None else known[value] for value in node.inputs]
        copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()))
        known[node.outputs[0]] = copy.outputs[0]
        nodes.append(copy)


def _stored(probe: Probe, part: Part) -> ir.Value:
    """An initializer whose bytes are those stored; only the first rows where that is enough."""
    stored = probe.weight.parts[part]
    shape, length = list(stored.shape.numpy()), stored.nbytes
    if probe.kind == "dequantize" and shape:
        rows = dequantized_rows(probe)
        spec = probe.weight.source.parts(probe.weight.layout)[part]
        shape[spec.axis] = spec.slices(0, rows)[1]
        length = probe.weight.raw(part, 0, rows).nbytes
    tensor: ir.TensorProtocol
    if isinstance(stored, ir.ExternalTensor):
        tensor = ir.ExternalTensor(
            stored.location, stored.offset, length, stored.dtype,
            shape=ir.Shape(shape), name=part, base_dir=stored.base_dir,
        )  # fmt: skip
    else:
        raw = read_bytes(stored, 0, length).tobytes()
        tensor = from_bytes(raw, stored.dtype, shape, part)
    return constant_value(part, tensor)


def _constant(name: str, array: Array) -> ir.Value:
    return constant_value(name, ir.tensor(array, name=name))
