"""The weight that a site of a finished model really reads, whatever op packs it."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.adopted import StoredSource, adopt, stored_source
from qgraph.errors import InputError
from qgraph.formats.base import Part, parse
from qgraph.kernel_choice import format_of, layout_of, query_of
from qgraph.kernel_ops import MATMUL_FP8, NBITS, reading_op
from qgraph.quant_tensor import QuantSource, QuantTensor
from qgraph.sites import Refusal, Site

_MOVES = ("Reshape", "Gather")
"""Ops between a packed constant and what reads it: another shape, or rows of it."""


def packed_source(site: Site, k: int) -> QuantSource | None:
    """The quantized rows of a site's weight; None where it is float, or in no format of ours.

    k: the length of a row; a table's op knows it with padding only.
    """
    if site.state in ("dequantize", "qdq"):
        source = adopt(site) if site.weight is not None else None
        return source if isinstance(source, QuantSource) else None
    if site.state == "float":
        return None
    parts = _constants(site)
    codes = parts.get("codes")
    if isinstance(codes, QuantTensor):
        return codes.source
    if codes is None or "scales" not in parts:
        return None
    if site.state == "portable":
        function = site.node.op_type.replace("Linear", "Dequantize", 1)
        found = stored_source(site.node, function, parts, site.weight_name)
        return found if not isinstance(found, Refusal) else None
    return _fused(site, k, parts)


def _fused(site: Site, k: int, parts: dict[Part, ir.TensorProtocol]) -> StoredSource | None:
    """What the op's attributes and constants say."""
    if site.op == NBITS.op_type and NBITS.read(site.node, "order") is not None:
        return None  # its groups are not contiguous
    query = query_of(site)
    # Scales of 128 columns each; rows that share them hold copies.
    text = "fp8-e4m3:scale=block" if query.op == MATMUL_FP8 else format_of(query)
    scale_dtype = parts["scales"].dtype
    if site.dtype is not None and not scale_dtype.is_floating_point():
        scale_dtype = site.dtype
    try:
        fmt = parse(text)
        layout = layout_of(fmt, query)
        specs = fmt.parts(site.n, k, scale_dtype, layout)
    except InputError:
        return None
    found = dict(zip(specs, parts.values(), strict=False))
    same = all(found[part].size == spec.size for part, spec in specs.items() if part in found)
    if len(found) != len(specs) or not same:
        return None
    return StoredSource(found, fmt, site.n, k, scale_dtype, site.weight_name, layout)


def _constants(site: Site) -> dict[Part, ir.TensorProtocol]:
    """The packed constants that a site reads, in the order of the node's inputs."""
    node, op = site.node, reading_op(site.node)
    found: dict[Part, ir.TensorProtocol] = {}
    if op is None:
        return found
    for part in op.parts:
        value = op.read(node, part)
        producer = value.producer() if value is not None else None
        while value is not None and producer is not None and producer.op_type in _MOVES:
            value = producer.inputs[0]
            producer = value.producer() if value is not None else None
        if value is not None and value.const_value is not None:
            found[part] = value.const_value
    minimums = site.sums.minimums.const_value if site.sums is not None else None
    return found if minimums is None else {**found, "minimums": minimums}
