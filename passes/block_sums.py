"""Float minimums of groups beside MatMulNBits; how they lie is told in `qgraph.block_sums`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.rewrite import Rewriter
from qgraph.sites import Site


class BlockSumsWriter:
    """Makes the sums of an activation's blocks once for all linears of a scope that read it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._sums: dict[tuple[ir.Value, int, ir.Graph], ir.Value] = {}

    def sums(
        self, site: Site, activation: ir.Value, rank: int, block: int
    ) -> tuple[list[ir.Node], ir.Value]:
        """The sums float32 `[…, nb]` of an activation `[…, K]`, and the nodes not placed yet."""
        key = (activation, block, site.scope)
        if key in self._sums:
            return [], self._sums[key]
        made: list[ir.Node] = []
        name = f"{activation.name}/sums_{block}"

        def add(
            op_type: str, value: ir.Value, *constant: Array, **options: int | list[int]
        ) -> ir.Value:
            constants = (self.rewriter.constant(f"{name}/{op_type}", each) for each in constant)
            made.append(self._node(op_type, [value, *constants], name, options=options))
            return made[-1].outputs[0]

        value = activation
        if site.dtype != ir.DataType.FLOAT:
            value = add("Cast", value, to=ir.DataType.FLOAT.value)
        blocks = -(-site.k // block)
        if lacking := blocks * block - site.k:
            pads = [0] * (2 * rank - 1) + [lacking]
            value = (
                add("Pad", value, pads=pads)
                if self._opset < 11
                else add("Pad", value, _ints(*pads))
            )
        value = add("Reshape", value, _ints(*[0] * (rank - 1), blocks, block))
        if self._opset < 13:
            value = add("ReduceSum", value, axes=[rank], keepdims=0)
        else:
            value = add("ReduceSum", value, _ints(rank), keepdims=0)
        self._sums[key] = value
        return made, value

    def added(
        self, site: Site, product: ir.Node, sums: ir.Value, minimums: ir.Value
    ) -> list[ir.Node]:
        """Nodes that add sums · mᵀ to the product; the last one gives the result."""
        assert site.dtype is not None
        name = f"{site.name}/minimums"
        turned = self._node("Transpose", [minimums], name, options={"perm": [1, 0]})
        nodes = [turned, self._node("MatMul", [sums, turned.outputs[0]], name)]
        if site.dtype != ir.DataType.FLOAT:
            back = {"to": site.dtype.value}
            nodes.append(self._node("Cast", nodes[-1].outputs, name, site.dtype, back))
        both = [product.outputs[0], nodes[-1].outputs[0]]
        return [*nodes, self._node("Add", both, name, site.dtype)]

    @property
    def _opset(self) -> int:
        return self.rewriter.model.opset_imports.get("", 1)

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        dtype: ir.DataType = ir.DataType.FLOAT,
        options: Mapping[str, int | list[int]] | None = None,
    ) -> ir.Node:
        attributes: dict[str, int | float | str | list[int]] = {**(options or {})}
        return self.rewriter.node(
            op_type, inputs, name=f"{name}/{op_type}", attributes=attributes, dtype=dtype
        )


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)
