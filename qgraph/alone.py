"""Linears alone, timed as they run within a model: enough copies that no cache holds them.

A model that decodes reads each weight once for each token, from memory. One linear that is run
again and again would find its weight in the cache, and what a run costs besides would count more
than the linear. So a model of copies is run, each with a weight of its own, where there are few
rows; with many rows the weight is read for all of them at once, and one linear will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.constants import constant_value, from_bytes
from qgraph.one_op import X, Y
from qgraph.scopes import bodies
from qgraph.timing import Timing, interleave

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime, Session

CACHE_BYTES = 48_000_000
"""Copies are made until their weights take this, more than the caches of most processors."""
MOST_COPIES = 96
FEW_ROWS = 16
"""Up to this many rows copies are run."""
_STEP = 16
"""Bytes, a multiple of all element sizes."""
_SHARED_BYTES = 1024
"""Smaller constants are no weights: copies share them."""


def time_alone(
    runtime: Runtime,
    models: Mapping[str, ir.Model],
    rows: Sequence[int],
    *,
    rounds: int,
    threads: int = 0,
) -> dict[int, dict[str, Timing]]:
    """Seconds of one linear for each number of rows, all `models` turn by turn.

    models: of one linear each, `x` `[M, K]` → `y` `[M, N]`, all of the same K.

    Raises:
        InputError: the runtime refuses a model.
    """
    found: dict[int, dict[str, Timing]] = {}
    for few in (True, False):
        counts = [count for count in rows if (count <= FEW_ROWS) == few]
        if not counts:
            continue
        sessions: dict[str, tuple[Session, int, NDArray[Any]]] = {}
        for name, model in models.items():
            copies = copies_of(model) if few else 1
            opened = runtime.open(repeated(model, copies), threads=threads, spinning=False)
            sessions[name] = (opened, copies, _activation(model, max(counts)))
        for count in counts:
            runs: dict[str, Callable[[], object]] = {
                name: functools.partial(session.run, {X: x[:count]})
                for name, (session, _, x) in sessions.items()
            }
            timings = interleave(runs, rounds)
            found[count] = {name: t.each(sessions[name][1]) for name, t in timings.items()}
    return {count: found[count] for count in rows}


def copies_of(model: ir.Model) -> int:
    """How many copies of a linear take more than the caches hold; one where it has bodies."""
    if any(bodies(node) for node in model.graph):
        return 1
    sizes = [v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value]
    return min(MOST_COPIES, max(1, -(-CACHE_BYTES // max(1, sum(sizes)))))


def repeated(model: ir.Model, copies: int) -> ir.Model:
    """A model of `copies` linears that read one activation, each with a weight of its own.

    The weights have the elements of the given one, each in another order. The output is the sum
    of all first columns, `[M]`; one copy is the model as it is.
    """
    if copies == 1:
        return model
    (x,) = model.graph.inputs
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(model.graph.opset_imports), name="copies")
    shared = ir.Value(name=X, shape=x.shape, type=x.type)
    graph.inputs.append(shared)
    first = constant_value("first", ir.tensor(np.array(0, np.int64), name="first"))
    graph.initializers.add(first)
    common = {x: shared}
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.nbytes < _SHARED_BYTES:
            common[value] = constant_value(str(value.name), value.const_value)
            graph.initializers.add(common[value])
    columns = []
    for at in range(copies):
        result = _copy(model.graph, graph, dict(common), at)
        column = ir.Node("", "Gather", [result, first], [ir.AttrInt64("axis", -1)])
        graph.append(column)
        columns.append(column.outputs[0])
    total = ir.Node("", "Sum", columns)
    graph.append(total)
    y = total.outputs[0]
    y.name, y.type = Y, model.graph.outputs[0].type
    graph.outputs.append(y)
    functions = list(model.functions.values())
    return ir.Model(graph, ir_version=model.ir_version, functions=functions)


def _copy(source: ir.Graph, target: ir.Graph, known: dict[ir.Value, ir.Value], at: int) -> ir.Value:
    """One copy of the nodes and weights of `source`; its result."""
    for value in source.initializers.values():
        if value not in known and value.const_value is not None:
            known[value] = constant_value(f"{value.name}_{at}", _turned(value.const_value, at))
            target.initializers.add(known[value])
    for node in source:
        inputs = [None if value is None else known[value] for value in node.inputs]
        attributes = list(node.attributes.values())
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.type = old.type
            known[old] = new
        target.append(copy)
    return known[source.outputs[0]]


def _turned(tensor: ir.TensorProtocol, by: int) -> ir.TensorProtocol:
    """The elements of a weight in another order: a runtime may store equal constants once."""
    raw = np.frombuffer(tensor.tobytes(), np.uint8)
    turned = np.roll(raw, _STEP * by).tobytes()
    return from_bytes(turned, tensor.dtype, tensor.shape.numpy())


def _activation(model: ir.Model, rows: int) -> NDArray[Any]:
    """Gaussian activations `[rows, K]` of the type that the model takes."""
    (x,) = model.graph.inputs
    assert x.shape is not None and x.dtype is not None
    k = x.shape[1]
    assert isinstance(k, int)
    values = np.random.default_rng(1).standard_normal((rows, k), dtype=np.float32)
    return values.astype(x.dtype.numpy())
