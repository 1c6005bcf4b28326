"""What a graph asks of shapes, answered once: by a number, or by the shape of a graph input.

Exporters ask each layer's values for their shapes, which would keep alive what a fusion replaces.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qgraph.constants import FLOATS
from qgraph.passes.dims import Size, Sizes
from qgraph.rewrite import Rewriter

_ASKING = frozenset(
    "Add Cast Concat ConstantOfShape Div Equal Gather Identity Mul Reshape Shape Slice Squeeze Sub "
    "Unsqueeze Where".split()
)
"""Ops that compute sizes out of shapes."""
_INDEXED = frozenset({"Gather", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
"""Those whose further inputs say which sizes, and are none themselves."""
_LONGEST = 8


def fold_shapes(rewriter: Rewriter, elements: Mapping[ir.Value, Sizes]) -> int:
    """Fold in the main graph; how many answers changed.

    elements: of the vectors and scalars of integers that are made of sizes (`infer_dims`).
    """
    graph = rewriter.model.graph
    answers = _Answers(rewriter, graph)
    asked = [node for node in graph if _asks(node)]
    folded = 0
    for node in asked:
        value = node.outputs[0]
        new = answers.get(value, elements.get(value)) if _is_read(value) else None
        if new is not None:
            value.replace_all_uses_with(new)
            folded += 1
    rewriter.drop_unused(asked)
    return folded


def _asks(node: ir.Node) -> bool:
    """Whether it computes sizes; one cast to a float is no size any more, but what asked for it."""
    if node.domain or node.op_type not in _ASKING:
        return False
    return node.op_type != "Cast" or node.outputs[0].dtype not in FLOATS


def _is_read(value: ir.Value) -> bool:
    """Whether something else than the computation of another size reads it, and it is one."""
    if value.is_graph_output() or value.dtype is None or not value.dtype.is_integer():
        return False
    rank = len(value.shape) if value.shape is not None else 2
    return rank < 2 and any(
        not _asks(use.node) or (use.idx and use.node.op_type in _INDEXED) for use in value.uses()
    )


class _Answers:
    """Nodes that say the sizes of a graph's inputs, each made once."""

    def __init__(self, rewriter: Rewriter, graph: ir.Graph) -> None:
        self._rewriter, self._graph = rewriter, graph
        self._made: dict[object, ir.Value] = {}
        self._places: dict[str, tuple[ir.Value, int]] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    self._places.setdefault(dim.value, (value, axis))

    def get(self, value: ir.Value, sizes: Sizes | None) -> ir.Value | None:
        """A value that holds what `value` does; None where graph inputs do not say all of it."""
        if sizes is None or len(sizes) > _LONGEST or value.dtype is None:
            return None
        known = [size for size in sizes if size is not None and self._is_said(size)]
        scalar = value.shape is not None and not len(value.shape)
        if len(known) < len(sizes) or (scalar and len(known) != 1):
            return None
        return self._get(tuple(known), scalar, value.dtype)

    def _is_said(self, size: Size) -> bool:
        """Whether it is a sum of a number and axes of inputs."""
        return all(
            not symbols or (len(symbols) == factor == 1 and symbols[0] in self._places)
            for symbols, factor in size.terms
        )

    def _get(self, sizes: tuple[Size, ...], scalar: bool, dtype: ir.DataType) -> ir.Value:
        key = (sizes, scalar, dtype)
        if key not in self._made:
            self._made[key] = self._make(sizes, scalar, dtype)
        return self._made[key]

    def _make(self, sizes: tuple[Size, ...], scalar: bool, dtype: ir.DataType) -> ir.Value:
        numbers = [size.number for size in sizes]
        if None not in numbers:
            array = np.array(numbers, dtype.numpy())
            return self._rewriter.constant("sizes", array[0] if scalar else array)
        int64 = ir.DataType.INT64
        if dtype != int64:
            whole = self._get(sizes, scalar, int64)
            return self._op("Cast", [whole], dtype, 0 if scalar else len(sizes), to=dtype.value)
        if scalar:
            return self._op("Squeeze", [self._get(sizes, False, dtype)], dtype, 0)
        if len(sizes) > 1:
            parts = [self._get((size,), False, dtype) for size in sizes]
            return self._op("Concat", parts, dtype, len(sizes), axis=0)
        *rest, last = sizes[0].terms
        if not rest:
            return self._of_input(last[0][0])
        parts = [self._get((Size(tuple(terms)),), False, dtype) for terms in (rest, [last])]
        return self._op("Add", parts, dtype, 1)

    def _of_input(self, symbol: str) -> ir.Value:
        value, axis = self._places[symbol]
        shape = self._op("Shape", [value], ir.DataType.INT64, len(value.shape or ()))
        index = self._rewriter.constant("axis", np.array([axis], np.int64))
        return self._op("Gather", [shape, index], ir.DataType.INT64, 1)

    def _op(
        self, op_type: str, inputs: list[ir.Value], dtype: ir.DataType, length: int, **given: int
    ) -> ir.Value:
        """A node whose result has `length` elements; 0 is a scalar."""
        node = self._rewriter.node(
            op_type, inputs, name=f"sizes/{op_type}", attributes={**given}, dtype=dtype,
            shape=[length] if length else [],
        )  # fmt: skip
        self._graph.append(node)
        return node.outputs[0]
