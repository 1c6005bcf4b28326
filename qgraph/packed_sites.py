"""Sites that read packed codes: fused ops, and the portable form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import onnx_ir as ir

from qgraph.block_sums import block_sums
from qgraph.errors import GraphError
from qgraph.expert_sites import role_of_rows
from qgraph.formats.base import parse
from qgraph.integer_sites import integer_product
from qgraph.kernel_ops import CONTRIB_OPS, KernelOp, reading_op
from qgraph.site import CONTRIB, Role, Site
from qgraph.view import is_view_op
from qgraph.weight_origin import static_dims


def _on_packed(node: ir.Node) -> Site | None:
    """The site of a fused op, by what its entry says of it."""
    op = reading_op(node)
    assert op is not None
    if op.kind == "gather":
        return _on_gather(node, op)
    return _on_integer_product(node, op) if op.is_integer else _on_product(node, op)


def _on_product(node: ir.Node, op: KernelOp) -> Site:
    """Its sizes are attributes, or those of codes `[N, K]` of a whole number in a byte."""
    at = op.parts["codes"]
    if "N" in op.attributes:
        n, k = op.number(node, "N"), op.number(node, "K")
    else:
        n, width = _matrix(node, at)
        k = width * 8 // parse(op.format).bits
    return dataclasses.replace(_fused(node, at, "linear", n, k), sums=block_sums(node))


def _on_integer_product(node: ir.Node, op: KernelOp) -> Site | None:
    """`[K, N]` codes, and what quantizes the activation."""
    found = integer_product(node)
    if found is None:
        return None
    at = op.parts["codes"]
    k, n = _matrix(node, at)
    site = _fused(node, at, "linear", n, k)
    return dataclasses.replace(site, dtype=found.x.dtype, integer=found)


def _on_gather(node: ir.Node, op: KernelOp) -> Site:
    at = op.parts["codes"]
    data, scales = op.read(node, "codes"), op.read(node, "scales")
    shape = data.shape if data is not None else None
    if shape is not None and len(shape) < 2:
        raise GraphError(_no_matrix(node, at, shape))
    n = int(shape[0]) if shape is not None and isinstance(shape[0], int) else 0
    bits = op.number(node, "bits")
    k = int(shape[1]) * 8 // bits if shape is not None and isinstance(shape[1], int) else 0
    dtype = scales.dtype if scales is not None else None
    role = role_of_rows(op.read(node, "x"))
    return dataclasses.replace(_fused(node, at, role, n, k), dtype=dtype)


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


PACKED_FINDERS: dict[tuple[str, str], Callable[[ir.Node], Site | None]] = dict.fromkeys(
    ((CONTRIB, op_type) for op_type in CONTRIB_OPS), _on_packed
)


def without_float_parts(sites: list[Site]) -> list[Site]:
    """Sites but for float products that are parts of others.

    Those of the input columns that linears of quantized activations keep in float, and of minimums.
    """
    parts = [s.integer.float_part for s in sites if s.integer is not None]
    mine = {id(part.node) for part in parts if part is not None}
    mine |= {id(node) for s in sites if s.sums is not None for node in s.sums.added}
    return [site for site in sites if id(site.node) not in mine]
