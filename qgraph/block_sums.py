"""Minimums of groups beside MatMulNBits: y = MatMulNBits(x, …) + sums(x) · mᵀ.

The part of a fused site that a kernel without float zero points leaves out: sums(x) `[…, nb]` are
those of the activation's blocks along K, made once for all linears that read it, m `[N, nb]` the
minimums (`formats.minimums`).

    wide = Cast <to = FLOAT> (x)                    where x is not float32
    whole = Pad (wide, …)                           where the last block is partial
    sums = ReduceSum <keepdims = 0> (Reshape(whole, [0, …, nb, G]), [-1])
    added = MatMul(sums, Transpose(m))
    y = Add(MatMulNBits(x, codes, scales), Cast(added))

In a float16 model all this may be float32 between casts (`widen_products`): x is what they cast.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qgraph.constants import small_ints
from qgraph.kernel_ops import NBITS, reading_op
from qgraph.scopes import is_onnx


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSums:
    """What stands around a MatMulNBits whose groups have minimums.

    minimums: the constant m, float32 `[N, nb]`.
    sums: the nodes that make the block sums, first to last; other sites may read their result.
    added: the site's own nodes: Transpose, MatMul, a Cast where there is one, Add.
    """

    minimums: ir.Value
    sums: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]

    @property
    def output(self) -> ir.Value:
        """The result of the site."""
        return self.added[-1].outputs[0]

    @property
    def rank(self) -> int:
        """Of the activation."""
        reshape = next(node for node in self.sums if node.op_type == "Reshape")
        return len(small_ints(reshape.inputs[1]) or ()) - 1


def block_sums(node: ir.Node) -> BlockSums | None:
    """What a MatMulNBits node is added to, where it is minimums times block sums of its input."""
    if reading_op(node) is not NBITS or NBITS.read(node, "zeros") is not None:
        return None
    output = node.outputs[0]
    uses = list(output.uses())
    if len(uses) != 1 or output.is_graph_output() or not is_onnx(uses[0].node, "Add"):
        return None
    add = uses[0].node
    other = add.inputs[1 - uses[0].idx]
    cast = _producer(other, "Cast")
    product = _producer(cast.inputs[0] if cast is not None else other, "MatMul")
    if product is None:
        return None
    turned = _producer(product.inputs[1], "Transpose")
    minimums = turned.inputs[0] if turned is not None else None
    sums = _sums(product.inputs[0], node)
    if turned is None or minimums is None or sums is None or not _fits(minimums, node):
        return None
    own = (turned, product, *([cast] if cast is not None else []), add)
    return BlockSums(minimums, sums, own)


def _fits(minimums: ir.Value, node: ir.Node) -> bool:
    """Whether a value is a constant of the shape and type that minimums have."""
    tensor = minimums.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return False
    n, count = node.attributes.get_int("N", 0), _blocks(node)[0]
    return tuple(tensor.shape.numpy()) == (n, count)


def _blocks(node: ir.Node) -> tuple[int, int]:
    """Blocks in a row, and their size."""
    k, size = (node.attributes.get_int(name, 0) for name in ("K", "block_size"))
    return (-(-k // size) if size else 0), size


def _sums(value: ir.Value | None, node: ir.Node) -> tuple[ir.Node, ...] | None:
    """The nodes that make the sums of the blocks of what `node` multiplies."""
    reduce = _producer(value, "ReduceSum")
    reshape = _producer(reduce.inputs[0], "Reshape") if reduce is not None else None
    if reduce is None or reshape is None:
        return None
    shape = small_ints(reshape.inputs[1]) or []
    last = len(shape) - 1
    axes = list(reduce.attributes.get_ints("axes", ()))
    axes = axes or (small_ints(reduce.inputs[1]) if len(reduce.inputs) > 1 else None) or []
    summed = reduce.attributes.get_int("keepdims", 1) == 0 and axes in ([last], [-1])
    if not summed or shape != [0] * (last - 1) + list(_blocks(node)):
        return None
    wide = _producer(node.inputs[0], "Cast")
    given = (node.inputs[0], *(wide.inputs[:1] if wide is not None else ()))
    found, value = [reshape, reduce], reshape.inputs[0]
    lacking = -node.attributes.get_int("K", 0) % _blocks(node)[1]
    pad = _producer(value, "Pad") if lacking else None
    if pad is not None and _pads(pad) == [0] * (2 * last - 1) + [lacking]:
        found.insert(0, pad)
        value = pad.inputs[0]
    elif lacking:
        return None
    cast = _producer(value, "Cast") if value not in given else None
    if cast is not None and cast.attributes.get_int("to", 0) == ir.DataType.FLOAT:
        found.insert(0, cast)
        value = cast.inputs[0]
    return tuple(found) if value in given else None


def _pads(pad: ir.Node) -> list[int] | None:
    """What a Pad with zeros adds; None for another one."""
    if pad.attributes.get_string("mode", "constant") != "constant" or any(pad.inputs[2:]):
        return None
    given = pad.attributes.get_ints("pads", ())
    return list(given) or (small_ints(pad.inputs[1]) if len(pad.inputs) > 1 else None)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    producer = value.producer() if value is not None else None
    return producer if producer is not None and is_onnx(producer, op_type) else None
