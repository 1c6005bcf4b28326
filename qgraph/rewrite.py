"""The helpers through which passes change a graph: the only place that makes initializers.

Names stay unique, a replacement takes over the name, type and shape of what it replaces, and
what nobody reads any more goes away with its constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import constant_value, drop_constant, is_read, let_go
from qgraph.errors import GraphError
from qgraph.scopes import scopes


class Rewriter:
    """Edits one model; knows all its names, so that new ones never collide."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._names = set(_all_names(model))

    def unique(self, base: str) -> str:
        """`base`, or `base_1`, … if that is taken; the name is then taken."""
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def initializer(self, base: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A new constant of the main graph, visible in every body."""
        value = constant_value(self.unique(base), tensor)
        tensor.name = value.name
        self.model.graph.initializers.add(value)
        return value

    def constant(self, base: str, array: np.ndarray) -> ir.Value:
        """A new small constant of the main graph."""
        return self.initializer(base, ir.tensor(array))

    def lift_constants(self, scope: ir.Graph) -> None:
        """Make the Constant nodes of a scope initializers there, under the names they gave."""
        for node in list(scope):
            attribute = node.attributes.get("value")
            if node.op_type != "Constant" or node.domain or attribute is None:
                continue
            tensor, output = attribute.as_tensor(), node.outputs[0]
            tensor.name = output.name
            value = constant_value(output.name or "", tensor)
            output.replace_all_uses_with(value)
            scope.remove(node, safe=True)
            scope.register_initializer(value)

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        name: str,
        domain: str = "",
        attributes: dict[str, int | float | str | list[int]] | None = None,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | ir.Shape | None = None,
        outputs: int = 1,
    ) -> ir.Node:
        """A new node, not yet placed; its names, and that of its first output, are made unique."""
        unique = self.unique(name)
        # ir.node would try every kind of attribute, one slow isinstance after another.
        attrs = [_attribute(key, value) for key, value in (attributes or {}).items()]
        node = ir.Node(domain, op_type, inputs, attrs, name=unique, num_outputs=outputs)
        output = node.outputs[0]
        output.name = self.unique(f"{unique}_output")
        output.type = ir.TensorType(dtype) if dtype is not None else None
        output.shape = ir.Shape(shape) if shape is not None else None
        if domain not in self.model.opset_imports:
            self.model.opset_imports[domain] = 1
        return node

    def insert_before(self, anchor: ir.Node, nodes: Iterable[ir.Node]) -> None:
        """Place new nodes in front of `anchor`, in its scope."""
        graph = anchor.graph
        assert graph is not None
        graph.insert_before(anchor, list(nodes))

    def replace(self, old: ir.Node, new: Sequence[ir.Node]) -> None:
        """Put `new` (last one gives the result) where `old` was; it inherits names and type."""
        graph = old.graph
        if graph is None or len(old.outputs) != 1:
            raise GraphError(
                f"cannot replace {old.op_type} {old.name}: not a placed node of one output"
            )
        before, after = old.outputs[0], new[-1].outputs[0]
        name, kind, shape = before.name, before.type, before.shape
        graph.insert_before(old, list(new))
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        graph.remove(old, safe=True)
        before.name = None
        after.name, after.type, after.shape = name, kind, shape

    def drop_unused(self, nodes: Iterable[ir.Node]) -> None:
        """Remove those of `nodes` (readers last) that nobody reads now, and their constants."""
        for node in reversed(list(nodes)):
            if node.graph is None or any(is_read(output) for output in node.outputs):
                continue
            let_go(node)
            node.graph.remove(node, safe=True)

    def drop_constants(self, values: Iterable[ir.Value]) -> None:
        """Remove those of `values` that are constants which nobody reads any more."""
        for value in values:
            drop_constant(value)


def _attribute(name: str, value: int | float | str | list[int]) -> ir.Attr:
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    return ir.AttrString(name, value) if isinstance(value, str) else ir.AttrInt64s(name, value)


def _all_names(model: ir.Model) -> Iterable[str]:
    for graph in scopes(model.graph):
        yield from (value.name for value in graph.inputs if value.name)
        yield from graph.initializers
        for node in graph:
            if node.name:
                yield node.name
            yield from (value.name for value in node.outputs if value.name)
