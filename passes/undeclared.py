"""For a while, axes are known by what the inputs call them and what ops make of that.

Exporters write names on outputs that do not hold: an attention mask of `past + 1` tokens, a cache
that is as long after a step as before it. What is read out of such names would be wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import onnx_ir as ir

from qgraph.scopes import nodes


@contextlib.contextmanager
def undeclared(graph: ir.Graph) -> Iterator[Callable[[], None]]:
    """Forget the names of all axes but those of inputs; inputs and outputs get theirs back.

    A name of an input that is a sum or a product stands for itself meanwhile.

    Yields:
        What gives the values between them, where nothing else is known by then, their old names:
        good enough to try a fusion with, and not to compute anything from.
    """
    inputs = [value.shape for value in graph.inputs]
    outputs = [value.shape for value in graph.outputs]
    for value in graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([_itself(value, axis) for axis in range(len(value.shape))])
    said: list[tuple[ir.Value, ir.Shape]] = []
    results = set(graph.outputs)
    made = (value for node in nodes(graph) for value in node.outputs)
    for value in (each for each in made if each.shape is not None):
        assert value.shape is not None
        result = value in results
        if not result:
            said.append((value, value.shape))
        value.shape = ir.Shape(
            [dim if isinstance(dim, int) and not result else None for dim in value.shape]
        )
    try:
        yield lambda: _complete(said)
    finally:
        for values, shapes in ((graph.inputs, inputs), (graph.outputs, outputs)):
            for value, shape in zip(values, shapes, strict=True):
                value.shape = shape


def _complete(said: list[tuple[ir.Value, ir.Shape]]) -> None:
    for value, old in said:
        if value.shape is not None and len(value.shape) == len(old):
            pairs = zip(value.shape, old, strict=True)
            value.shape = ir.Shape([b if _is_open(a) else a for a, b in pairs])


def _is_open(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is None


def _itself(value: ir.Value, axis: int) -> int | str | None:
    assert value.shape is not None
    dim = value.shape[axis]
    if isinstance(dim, int) or dim.value is None or dim.value.isidentifier():
        return dim if isinstance(dim, int) else dim.value
    return re.sub(r"\W", "_", f"{value.name}_{axis}")
