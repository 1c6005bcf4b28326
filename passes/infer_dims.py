"""Shapes that exporters compute in the graph, found from the names of the inputs' axes.

TorchScript's exporter reshapes to vectors that it puts together of Shape, Gather and Concat; ONNX's
shape inference gives up there, and all that follows has no shape.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx_ir as ir

from qgraph.passes.dims import LONGEST, Known, Sizes, sizes_of
from qgraph.passes.int_rules import INTS
from qgraph.passes.shape_rules import shape_of, split_shapes
from qgraph.scopes import bodies


def infer_dims(graph: ir.Graph) -> Mapping[ir.Value, Sizes]:
    """Fill in shapes, and sizes of axes, that are unknown; what is known stays.

    What an If gives has the sizes that both of its bodies say.

    Returns:
        The elements of the vectors and scalars of integers that are made of sizes.
    """
    known = Known()
    _infer(graph, known)
    return known.elements


def _infer(graph: ir.Graph, known: Known) -> None:
    for node in graph:
        rule = INTS.get(node.op_type)
        if rule is not None and not node.domain:
            found = rule(known, node)
            if found is not None and len(found) <= LONGEST:
                known.elements[node.outputs[0]] = list(found)
        if node.op_type == "Split":
            for value, shape in zip(node.outputs, split_shapes(known, node), strict=False):
                _fill(value, shape)
        elif node.op_type == "If" and not node.domain:
            _infer_if(node, known)
        elif node.outputs and _has_unknown(node.outputs[0]):
            _fill(node.outputs[0], shape_of(known, node))


def _infer_if(node: ir.Node, known: Known) -> None:
    branches = bodies(node)
    for body in branches:
        _infer(body, known)
    for value, *made in zip(node.outputs, *(body.outputs for body in branches), strict=True):
        said: list[Sizes | None] = [sizes_of(each.shape) for each in made]
        _fill(value, functools.reduce(_agreed, said))


def _agreed(first: Sizes | None, second: Sizes | None) -> Sizes | None:
    if first is None or second is None or len(first) != len(second):
        return None
    return [a if a == b else None for a, b in zip(first, second, strict=True)]


def _has_unknown(value: ir.Value) -> bool:
    shape = sizes_of(value.shape)
    return shape is None or None in shape


def _fill(value: ir.Value, made: Sizes | None) -> None:
    if made is None or value.type is None:  # a shape without a type cannot be written
        return
    known = sizes_of(value.shape) or [None] * len(made)
    if len(known) == len(made):
        both = [a if a is not None else b for a, b in zip(known, made, strict=True)]
        value.shape = ir.Shape([None if each is None else each.dim for each in both])
