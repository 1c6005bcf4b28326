"""The bodies of the `qgraph` functions: files in the field hold them, so they never change."""

from __future__ import annotations

import hashlib

import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.formats.base import variants

FUNCTIONS = {
    function.name: function
    for name in registry.names("format")
    for fmt in variants(registry.load("format", name))
    for function in (fmt.function(13), fmt.linear(13))
}
HASHES = {
    "DequantizeFp4DoubleV1": "35de0ce9e7c60eab",
    "DequantizeFp4V1": "34ee95961cbaad04",
    "DequantizeFp8E4m3BlockV1": "beb163af2382a34b",
    "DequantizeFp8E4m3TensorV1": "bbff0dc1b0c80e5f",
    "DequantizeFp8E4m3V1": "bbff0dc1b0c80e5f",
    "DequantizeFp8E5m2BlockV1": "6a7edaf6d68db18b",
    "DequantizeFp8E5m2TensorV1": "3caf42662570793e",
    "DequantizeFp8E5m2V1": "3caf42662570793e",
    "DequantizeInt2V1": "cfb40b8ded79b2ee",
    "DequantizeInt4V1": "9bea3caa67eab545",
    "DequantizeInt8V1": "db3ffd8782cece00",
    "DequantizeMxfp4HalvesV1": "ce576cbc2a996f15",
    "DequantizeMxfp4V1": "fc57668ec275023f",
    "DequantizeMxfp8E4m3V1": "e39d12de02f92021",
    "DequantizeMxfp8E5m2V1": "b008f916afc18fdb",
    "DequantizeNf4DoubleV1": "46fbd9572204e9e5",
    "DequantizeNf4V1": "cdf6b6c38ac624ca",
    "DequantizeNvfp4V1": "b961b6dc1d97de06",
    "DequantizeUint2FloatZeroV1": "603ac3fc3a056bef",
    "DequantizeUint2V1": "f19c4a90fb76c779",
    "DequantizeUint4FloatZeroV1": "17cccc6231b0b020",
    "DequantizeUint4V1": "b1edd22816d75dfc",
    "DequantizeUint8FloatZeroV1": "3c0356d77304111f",
    "DequantizeUint8V1": "c7c0b0f459af5b95",
    "LinearFp4DoubleV1": "50ea5911ed0825a1",
    "LinearFp4V1": "7b0ef56932ae5b9d",
    "LinearFp8E4m3BlockV1": "771eea2ce89fb37e",
    "LinearFp8E4m3TensorV1": "089ec2a23ee888f2",
    "LinearFp8E4m3V1": "e034ba95900f6745",
    "LinearFp8E5m2BlockV1": "3d0c9b5e7c188855",
    "LinearFp8E5m2TensorV1": "88ceeba9c0469099",
    "LinearFp8E5m2V1": "6e5d553a623ac76f",
    "LinearInt2V1": "a9d5a35567d0eeb3",
    "LinearInt4V1": "f6e4681e7c1421fc",
    "LinearInt8V1": "39a586b10518812e",
    "LinearMxfp4HalvesV1": "7233e9d5eac2565c",
    "LinearMxfp4V1": "40e903973027422e",
    "LinearMxfp8E4m3V1": "d1a9d551524c5cff",
    "LinearMxfp8E5m2V1": "1d9d88d116ce1f67",
    "LinearNf4DoubleV1": "28034d04d9934cc6",
    "LinearNf4V1": "dbdb415c5c5290cc",
    "LinearNvfp4V1": "0192c36e70731695",
    "LinearUint2FloatZeroV1": "fd506916b25864ce",
    "LinearUint2V1": "1902bb81837d6906",
    "LinearUint4FloatZeroV1": "835715abb3667f68",
    "LinearUint4V1": "4a1665904ee27915",
    "LinearUint8FloatZeroV1": "73a44176f897060b",
    "LinearUint8V1": "7e5de9fa394cfe69",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_body_never_changes(name: str) -> None:
    """A change needs a new version in the name."""
    function = FUNCTIONS[name]
    lines = [f"{[v.name for v in function.inputs]} {list(function.attributes)}"]
    for node in ir.traversal.RecursiveGraphIterator(function):
        names = [
            [v.name if v is not None else "" for v in vs] for vs in (node.inputs, node.outputs)
        ]
        lines.append(f"{node.domain}::{node.op_type} {names} {spelled(node)}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert (name, digest) in HASHES.items()


def test_every_body_is_pinned() -> None:
    assert HASHES.keys() == FUNCTIONS.keys()


def spelled(node: ir.Node) -> list[str]:
    found = []
    for name, attribute in sorted(node.attributes.items()):
        if attribute.is_ref():
            found.append(f"{name} = @{attribute.ref_attr_name}")
        elif attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            found.append(f"{name} = {tensor.dtype.name} {tensor.numpy().tolist()}")
        elif attribute.type == ir.AttributeType.GRAPH:
            graph = attribute.as_graph()
            ends = [(v.name, v.dtype, len(v.shape or ())) for v in (*graph.inputs, *graph.outputs)]
            found.append(f"{name} = {ends}")
        else:
            found.append(f"{name} = {attribute.value}")
    return found
