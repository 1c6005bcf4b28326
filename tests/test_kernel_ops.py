"""The table of kernel ops, against the schemas of ONNX Runtime and ONNX, and the torch runtime."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as pybind_state

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD, AttentionOp
from qgraph.kernel_ops import (
    CONTRIB_OPS,
    DEQUANTIZE_LINEAR,
    KERNEL_OPS,
    MATMUL_NBITS,
    OWN_DEQUANTIZE,
    OWN_LINEAR,
    reading_op,
)
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.torch.table import table

SPELLED = {
    "A": "x", "indices": "x", "a_scale": "x_scale", "input_scale": "x_scale",
    "a_zero_point": "x_zero", "B": "codes", "data": "codes", "b_scale": "scales",
    "absmax": "scales", "weight_scale": "scales", "weight_scale_2": "tensor",
    "zero_points": "zeros", "b_zero_point": "weight_zero", "g_idx": "order",
}  # fmt: skip
"""What ONNX Runtime's schemas call what an op reads, where that is another word."""
SCHEMAS = {
    schema.name: schema
    for schema in pybind_state.get_all_operator_schema()
    if schema.domain == CONTRIB
}


def default_of(attribute: Any) -> int | None:
    """What a schema says of an attribute that a node leaves out; None where it may not."""
    spelled = onnx.AttributeProto.FromString(attribute._default_value)
    return None if attribute.required else spelled.i


@pytest.mark.parametrize("name", CONTRIB_OPS)
def test_entries_are_what_the_schemas_say(name: str) -> None:
    op, schema = CONTRIB_OPS[name], SCHEMAS[name]
    assert op.inputs == tuple(SPELLED.get(each.name, each.name) for each in schema.inputs)
    assert op.least == schema.min_input
    attributes = {key: default_of(schema.attributes[key]) for key in op.attributes}
    assert dict(op.attributes) == attributes
    assert set(op.required) == {key for key, each in schema.attributes.items() if each.required}


def test_dequantize_linear_is_what_its_schema_says() -> None:
    op, schema = KERNEL_OPS[DEQUANTIZE_LINEAR], onnx.defs.get_schema("DequantizeLinear")
    assert [each.name for each in schema.inputs] == ["x", "x_scale", "x_zero_point"]
    assert op.inputs == ("codes", "scales", "zeros")
    assert op.least == schema.min_input


TORCH = [name for name in CONTRIB_OPS if (CONTRIB, name) in table()]


@pytest.mark.parametrize("name", TORCH)
def test_the_torch_runtime_reads_the_same(name: str) -> None:
    op = CONTRIB_OPS[name]
    given = table()[CONTRIB, name].signature.parameters.values()
    empty = inspect.Parameter.empty
    places = [each for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert len(places) == len(op.inputs)
    assert sum(each.default is empty for each in places) == op.least
    numbers = {each.name: each.default for each in given if each.kind is each.KEYWORD_ONLY}
    for attribute, default in op.attributes.items():
        assert numbers[attribute] == (empty if default is None else default)


def test_the_torch_runtime_has_all_but_products_of_bytes() -> None:
    assert set(CONTRIB_OPS) - set(TORCH) == {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}


@pytest.mark.parametrize(
    "domain, op_type, found",
    [
        ("qgraph", "LinearNf4V1", OWN_LINEAR),
        ("qgraph", "DequantizeUint4V1", OWN_DEQUANTIZE),
        ("", "DequantizeLinear", DEQUANTIZE_LINEAR),
        (CONTRIB, "MatMulNBits", MATMUL_NBITS),
        ("", "MatMulNBits", None),
        (CONTRIB, "DequantizeLinear", None),
        (CONTRIB, "Gelu", None),
    ],
)
def test_the_op_of_a_node(domain: str, op_type: str, found: str | None) -> None:
    op = reading_op(ir.Node(domain, op_type, []))
    assert (op.name if op is not None else None) == found


@pytest.mark.parametrize("op", [GROUPED_QUERY, MULTI_HEAD])
def test_attention_reads_and_gives_what_its_schema_says(op: AttentionOp) -> None:
    schema = SCHEMAS[op.op_type]
    assert op.inputs == tuple(each.name for each in schema.inputs)
    names = [each.name for each in schema.outputs]
    node = ir.Node(CONTRIB, op.op_type, [], num_outputs=len(names))
    given = dict(zip(node.outputs, names, strict=True))
    assert [given[value] for value in op.presents(node)] == ["present_key", "present_value"]


def test_inputs_are_arranged_by_what_they_are() -> None:
    op = CONTRIB_OPS["MatMulNBits"]
    parts = {"scales": "s", "codes": "c", "minimums": "m"}
    assert op.arranged(parts, x="x", bias="b") == ["x", "c", "s", None, None, "b"]
    gather = CONTRIB_OPS["GatherBlockQuantized"]
    assert gather.arranged({**parts, "zeros": "z"}, x="ids") == ["c", "ids", "s", "z"]
    with pytest.raises(AssertionError, match="does not read"):
        gather.arranged(parts, bias="b")


NEXT = """
import numpy as np, onnx, onnx_ir as ir
from qgraph import kernel_ops
from qgraph.kernel_ops import KernelOp, Since

op = KernelOp(
    "com.microsoft::MatMulNext", ("x", "bias", "codes", "scales"), "linear", 4,
    {"K": None, "N": None, "block_size": 32}, "own", "nf4", (Since((1, 31)),),
)
kernel_ops.KERNEL_OPS[op.name] = kernel_ops.CONTRIB_OPS[op.op_type] = op

import qgraph
from qgraph.decoder_head import head_of
from qgraph.errors import GraphError
from qgraph.kernel_choice import kernel_of
from qgraph.runtime_needs import needs

text = '''<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[1, M, 64] x) => (float[1, M, 32] y) {
    [next] y = com.microsoft.MatMulNext <K = 64, N = 32> (x, , codes, scales)
}'''
model = onnx.parser.parse_model(text)
for name, array in {"codes": np.ones((32, 32), np.uint8), "scales": np.ones((32, 2), "f4")}.items():
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
graph = qgraph.capture(ir.serde.deserialize_model(model))
(site,) = graph.sites()
print(site.state, site.n, site.k, site.weight_name, site.position, kernel_of(site))
print(needs(graph.model).line)
print(head_of(graph.model, "y").linear.name)
del model.graph.node[0].attribute[:]
try:
    qgraph.capture(ir.serde.deserialize_model(model))
except GraphError as error:
    print(error)
"""


def test_the_next_op_costs_one_entry() -> None:
    done = subprocess.run([sys.executable, "-c", NEXT], capture_output=True, text=True, check=True)
    site, release, head, malformed = done.stdout.splitlines()
    assert site == "fused 32 64 codes 2 MatMulNext codes=nf4 block=64"
    assert release.startswith("runs on ONNX Runtime 1.31 and later: MatMulNext (1 node)")
    assert head == "next"
    assert "has no attribute" in malformed
