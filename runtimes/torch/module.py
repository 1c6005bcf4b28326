"""The module that the executor builds: an fx.GraphModule that pickles as its graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from qgraph.runtimes.torch.table import table

ONNX = "onnx"
"""Key of `fx.Node.meta`: the (name, operator, domain) of the ONNX node."""


class Executor(fx.GraphModule):
    """Runs an ONNX graph; pickle and torch.save keep its graph node by node.

    fx itself would pickle the generated Python and trace it when it is read, which goes through
    the operators' functions and fails where they look at shapes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """The tensors and bodies, then the nodes, whose functions pickle by their operators."""
        root = nn.Module()
        for name in ("_parameters", "_buffers", "_modules", "training"):
            root.__dict__[name] = self.__dict__[name]
        return _restored, (root, [_row(node) for node in self.graph.nodes])


@dataclasses.dataclass(frozen=True)
class _Read:
    """In a pickle, the result of a node."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Operator:
    """In a pickle, the function of an operator."""

    domain: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Row:
    """One node of a pickled graph."""

    op: str
    name: str
    target: str | Callable[..., Any] | _Operator
    arguments: tuple[Any, Any]
    onnx: tuple[str, str, str] | None


def _row(node: fx.Node) -> _Row:
    arguments = map_arg((node.args, node.kwargs), lambda read: _Read(read.name))
    target = _operators().get(node.target, node.target)
    return _Row(node.op, node.name, target, arguments, node.meta.get(ONNX))


@functools.cache
def _operators() -> dict[Any, _Operator]:
    return {entry.function: _Operator(*key) for key, entry in table().items()}


def _restored(root: nn.Module, rows: Sequence[_Row]) -> Executor:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def argument(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Read) else value

    for row in rows:
        args, kwargs = map_aggregate(row.arguments, argument)
        target = row.target
        if isinstance(target, _Operator):
            target = table()[target.domain, target.name].function
        node = nodes[row.name] = graph.create_node(row.op, target, args, kwargs, row.name)
        if row.onnx is not None:
            node.meta[ONNX] = row.onnx
    module = Executor(root, graph, "Executor")
    module.train(root.training)
    return module
