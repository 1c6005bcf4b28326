"""Sites that read packed codes: fused ops, and the portable form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import onnx_ir as ir

from qgraph.block_sums import block_sums
from qgraph.capabilities import (
    DYNAMIC_QUANTIZE_MATMUL,
    GATHER_BLOCK_QUANTIZED,
    MATMUL_BNB4,
    MATMUL_FP4,
    MATMUL_FP8,
    MATMUL_INTEGER_TO_FLOAT,
    MATMUL_NBITS,
)
from qgraph.errors import GraphError
from qgraph.expert_sites import role_of_rows
from qgraph.integer_sites import integer_product
from qgraph.site import CONTRIB, Role, Site
from qgraph.view import is_view_op
from qgraph.weight_origin import static_dims


def _on_matmul_nbits(node: ir.Node) -> Site:
    n, k = (node.attributes.get_int(name, 0) for name in "NK")
    return dataclasses.replace(_fused(node, 1, "linear", n, k), sums=block_sums(node))


def _on_matmul_bnb4(node: ir.Node) -> Site:
    n, k = (node.attributes.get_int(name, 0) for name in "NK")
    return _fused(node, 1, "linear", n, k)


def _on_matmul_block_quantized(node: ir.Node) -> Site:
    """`[N, K]` codes of one byte, or of two in a byte."""
    n, width = _matrix(node, 1)
    return _fused(node, 1, "linear", n, width * (2 if node.op_type.endswith("Fp4Weight") else 1))


def _on_integer_product(node: ir.Node) -> Site | None:
    """`[K, N]` codes, and what quantizes the activation."""
    found = integer_product(node)
    if found is None:
        return None
    k, n = _matrix(node, 1)
    site = _fused(node, 1, "linear", n, k)
    return dataclasses.replace(site, dtype=found.x.dtype, integer=found)


def _on_gather_block_quantized(node: ir.Node) -> Site | None:
    data, scales = node.inputs[0], node.inputs[2]
    shape = data.shape if data is not None else None
    if shape is not None and len(shape) < 2:
        raise GraphError(_no_matrix(node, 0, shape))
    n = int(shape[0]) if shape is not None and isinstance(shape[0], int) else 0
    bits = node.attributes.get_int("bits", 4)
    k = int(shape[1]) * 8 // bits if shape is not None and isinstance(shape[1], int) else 0
    dtype = scales.dtype if scales is not None else None
    role = role_of_rows(node.inputs[1])
    return dataclasses.replace(_fused(node, 0, role, n, k), dtype=dtype)


def own_finder(node: ir.Node) -> Callable[[ir.Node], Site | None] | None:
    """The portable form: `qgraph::Linear…`, or `qgraph::Dequantize…` of gathered rows."""
    if node.op_type.startswith("Linear"):
        return _on_own_linear
    gathered = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return _on_gathered if gathered is not None and gathered.op_type == "Gather" else None


def _on_own_linear(node: ir.Node) -> Site:
    site = _fused(node, 1, "linear", _rows(node.inputs[1]), node.attributes.get_int("k", 0))
    return dataclasses.replace(site, state="portable")


def _on_gathered(node: ir.Node) -> Site | None:
    gather = node.inputs[0].producer() if node.inputs[0] is not None else None
    table = gather.inputs[0] if gather is not None else None
    if table is None or table.const_value is None:
        return None
    assert gather is not None
    role = role_of_rows(gather.inputs[1])
    site = _fused(node, 0, role, _rows(table), node.attributes.get_int("k", 0))
    return dataclasses.replace(site, state="portable", weight_name=table.name or "", position=1)


def _matrix(node: ir.Node, position: int) -> tuple[int, int]:
    """The sizes of the codes that input `position` gives; zeros where they are not known.

    Raises:
        GraphError: it is no matrix.
    """
    codes = node.inputs[position]
    dims = static_dims(codes.shape) if codes is not None else None
    if dims is None:
        return 0, 0
    if len(dims) != 2:
        raise GraphError(_no_matrix(node, position, dims))
    return dims[0], dims[1]


def _no_matrix(node: ir.Node, position: int, dims: Iterable[int | ir.SymbolicDim]) -> str:
    shape = ", ".join(map(str, dims))
    return (
        f"node {node.name} ({node.op_type}) is malformed: its input {position} has the shape "
        f"[{shape}], wanted a matrix of codes: export the model again"
    )


def _rows(codes: ir.Value | None) -> int:
    first = codes.shape[0] if codes is not None and codes.shape else 0
    return first if isinstance(first, int) else 0


def _fused(node: ir.Node, position: int, role: Role, n: int, k: int) -> Site:
    codes, activation = node.inputs[position], node.inputs[0]
    while codes is not None and (producer := codes.producer()) is not None and is_view_op(producer):
        codes = producer.inputs[0]
    return Site(
        name=node.name or "",
        node=node,
        op=node.op_type,
        role=role,
        state="fused",
        n=n,
        k=k,
        position=position,
        weight_name=(codes.name if codes is not None else None) or "",
        dtype=activation.dtype if activation is not None else None,
    )


PACKED_FINDERS: dict[tuple[str, str], Callable[[ir.Node], Site | None]] = {
    (CONTRIB, MATMUL_NBITS.partition("::")[2]): _on_matmul_nbits,
    (CONTRIB, MATMUL_BNB4.partition("::")[2]): _on_matmul_bnb4,
    (CONTRIB, MATMUL_FP8.partition("::")[2]): _on_matmul_block_quantized,
    (CONTRIB, MATMUL_FP4.partition("::")[2]): _on_matmul_block_quantized,
    (CONTRIB, GATHER_BLOCK_QUANTIZED.partition("::")[2]): _on_gather_block_quantized,
    (CONTRIB, DYNAMIC_QUANTIZE_MATMUL.partition("::")[2]): _on_integer_product,
    (CONTRIB, MATMUL_INTEGER_TO_FLOAT.partition("::")[2]): _on_integer_product,
}


def without_float_parts(sites: list[Site]) -> list[Site]:
    """Sites but for float products that are parts of others.

    Those of the input columns that linears of quantized activations keep in float, and of minimums.
    """
    parts = [s.integer.float_part for s in sites if s.integer is not None]
    mine = {id(part.node) for part in parts if part is not None}
    mine |= {id(node) for s in sites if s.sums is not None for node in s.sums.added}
    return [site for site in sites if id(site.node) not in mine]
