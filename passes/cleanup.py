"""Remove what nobody reads: nodes, constants, functions, opset imports."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from qgraph.constants import drop_constant, let_go
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.report import Step
from qgraph.scopes import nodes, scopes


@dataclasses.dataclass(frozen=True)
class Cleanup(Pass):
    """Dead float weights stay in a file until their initializers are removed.

    before:  w = Transpose(W); y = MatMulNBits(x, codes, …)
    after:   y = MatMulNBits(x, codes, …)
    """

    name: ClassVar[str] = "cleanup"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Remove dead nodes (last reader first), then constants, functions and imports."""
        model = graph.model
        for scope in reversed(scopes(model.graph)):
            for node in reversed(list(scope)):
                if not any(output.uses() or output.is_graph_output() for output in node.outputs):
                    let_go(node)
                    scope.remove(node, safe=True)
        for scope in scopes(model.graph):
            for value in list(scope.initializers.values()):
                drop_constant(value)
        _drop_functions(model)
        return []


def _drop_functions(model: ir.Model) -> None:
    """Functions that nothing calls, and the imports of domains that nothing is in."""
    pending = list(nodes(model.graph))
    used, called = {""}, set[ir.OperatorIdentifier]()
    while pending:
        node = pending.pop()
        used.add(node.domain)
        function = model.functions.get(node.op_identifier())
        if function is not None and function.identifier() not in called:
            called.add(function.identifier())
            pending += nodes(function.graph)
    for identifier in [item for item in model.functions if item not in called]:
        del model.functions[identifier]
    for domain in [item for item in model.opset_imports if item not in used]:
        del model.opset_imports[domain]
