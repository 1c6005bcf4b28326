"""A graph as a torch module: straight-line Python that torch.export and torch.compile trace.

Each ONNX node becomes one call of its function in the table, each constant a parameter or buffer
under its own name, and each body of an If, Loop or Scan a module that is handed what it reads.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch import Tensor, fx, nn

from qgraph.errors import InputError
from qgraph.runtimes.torch.attributes import attributes_of, body_attributes, check_arguments
from qgraph.runtimes.torch.constants import LITERAL, Constants
from qgraph.runtimes.torch.element_types import FLOATS, ElementTypes
from qgraph.runtimes.torch.missing import NodeError, called, check_operators, located
from qgraph.runtimes.torch.module import ONNX, Executor
from qgraph.runtimes.torch.onnx_ops.host import DTYPES, ints, to_tensor
from qgraph.runtimes.torch.table import Entry, find


def build(model: ir.Model) -> fx.GraphModule:
    """The module that computes what `model`, in canonical form, says.

    It takes the graph's inputs by position, as tensors, and returns its outputs as a tuple.
    Float constants are parameters that want no gradient, others are buffers; both have their
    initializers' names where these are plain (letters, digits and _:/- between dots, no keyword
    and no name that the module has), else `constant_` and the name made plain. Products are
    computed in the dtype of their weight, so that `half()` and `bfloat16()` work on the module;
    Cast nodes stay as they are.

    Raises:
        InputError: operators or attributes that the executor lacks, with the nodes' names.
    """
    check_operators(model)
    root = nn.Module()
    scope = _Scope(Constants(root), model.graph.opset_imports, {}, None)
    graph = scope.build(model.graph.inputs, model.graph, model.graph.outputs)
    return _module(root, graph)


def build_function(function: ir.Function, attributes: Mapping[str, int]) -> fx.GraphModule:
    """The module that computes a model-local function called with `attributes`.

    Raises:
        InputError: as `build`.
    """
    root = nn.Module()
    scope = _Scope(Constants(root), function.opset_imports, attributes, None)
    return _module(root, scope.build(function.inputs, function, function.outputs))


def _module(root: nn.Module, graph: fx.Graph) -> Executor:
    graph.eliminate_dead_code()
    return Executor(root, graph, "Executor")


def _is_small(value: ir.Value) -> bool:
    """Whether a value is known to be a number, or a vector that may be a literal."""
    if value.shape is None or len(value.shape) > 1:
        return False
    return all(isinstance(size, int) and size <= LITERAL for size in value.shape)


def _sizes(value: ir.Value) -> tuple[int, ...] | None:
    """The sizes of a value's axes, 0 for one that is no number; None where its rank is open."""
    if value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


class _Scope:
    """One graph, or one body, on its way to an fx.Graph.

    parameters: the attributes of the function whose body this is.
    captures: in a body, the placeholder of each value from around it; bodies of one If share
        the list of those values.
    """

    def __init__(
        self,
        constants: Constants,
        opsets: Mapping[str, int],
        parameters: Mapping[str, int],
        outer: _Scope | None,
    ) -> None:
        self.constants = constants
        self.opsets = opsets
        self.parameters = parameters
        self.outer = outer
        self.root = constants.root if outer is None else nn.Module()
        self.graph = fx.Graph()
        self.values: dict[ir.Value, fx.Node] = {}
        self.hosts: set[ir.Value] = set()
        self.captures: dict[ir.Value, fx.Node] = {}
        self.like: ir.Value | None = None if outer is None else outer.like
        self.types: ElementTypes = ElementTypes() if outer is None else outer.types

    def build(
        self,
        inputs: Sequence[ir.Value],
        nodes: Sequence[ir.Node] | ir.Graph | ir.Function,
        outputs: Sequence[ir.Value],
        host_outputs: int = 0,
    ) -> fx.Graph:
        """The graph of `nodes`; its outputs are tensors, but for the first `host_outputs`."""
        fed = [value for value in inputs if not value.is_initializer()]
        for value in fed:
            self.values[value] = self._placeholder(value)
        if self.outer is None and fed:
            self.like = fed[0]
        if isinstance(nodes, ir.Graph):
            self.constants.add(nodes.initializers.values())
        for node in nodes:
            try:
                self._node(node)
            except Exception as error:  # operators raise many kinds for constants that do not fit
                where = f"{called(node)} ({node.op_type})"
                raise located(where, error) from error
        hosts = [self.any(value) for value in outputs[:host_outputs]]
        self.graph.output((*hosts, *(self.tensor(value) for value in outputs[host_outputs:])))
        return self.graph

    def _placeholder(self, value: ir.Value) -> fx.Node:
        """A parameter of the function, called like the value as far as Python allows."""
        name = re.sub(r"\W", "_", value.name or "", flags=re.ASCII)
        if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
            name = f"input_{name}"
        node = self.graph.placeholder(name)
        # fx prints `target` as the parameter and assigns it to `name`, which it has made unique:
        # two parameters input and input_1 would become input_1 = input, input_2 = input_1.
        node.target = node.name
        return node

    def _node(self, node: ir.Node) -> None:
        if self.constants.add_node(node, self.parameters):
            return
        found = find(node.domain, node.op_type)
        if found is None:
            raise NodeError(f"{called(node)}: the torch executor lacks {node.op_type}")
        entry, keywords = found
        options: dict[str, Any] = {**keywords, **attributes_of(node, entry, self.parameters)}
        self.types.add(node, entry, options)
        options |= self._wanted(node, entry)
        check_arguments(node, entry, options)
        if self._fold(node, entry, options) or self._keeps_host(node):
            return
        host = entry.host and all(self._takes_host(node, entry, i) for i in range(len(node.inputs)))
        arguments = [self._argument(node, entry, i, host) for i in range(len(node.inputs))]
        if body_attributes(node):
            arguments = self._with_bodies(node, arguments)
        if "stacked" in entry.wants:
            ((_, body),) = body_attributes(node)
            options["stacked"] = tuple((self.types.of(v), _sizes(v)) for v in body.outputs)
        call = self.graph.call_function(entry.function, tuple(arguments), options)
        call.meta[ONNX] = (node.name, node.op_type, node.domain)
        self._bind(node, call, "outputs" in entry.wants, host)

    def _wanted(self, node: ir.Node, entry: Entry) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if "opset" in entry.wants:
            options["opset"] = self.opsets.get(node.domain, 1)
        if "outputs" in entry.wants:
            options["outputs"] = len(node.outputs)
        if "types" in entry.wants:
            kinds = tuple(self.types.of(value) for value in node.inputs)
            if not (entry.host and all(kind in FLOATS for kind in kinds)):
                options["types"] = kinds
        if "like" in entry.wants:
            options["like"] = None if self.like is None else self.any(self.like)
        return options

    def _fold(self, node: ir.Node, entry: Entry, options: dict[str, Any]) -> bool:
        """Compute a node of integer literals now, where that gives a small vector or a number."""
        if not (entry.host or entry.hosts) or "outputs" in options or not node.inputs:
            return False
        literals = [self._literal(node, entry, i) for i in range(len(node.inputs))]
        if any(v is not None and lit is None for v, lit in zip(node.inputs, literals, strict=True)):
            return False
        if not entry.host and not _is_small(node.outputs[0]):
            return False
        if "like" in options:
            options = {**options, "like": None}
        try:
            result = entry.function(*literals, **options)
        except (ArithmeticError, InputError, LookupError, RuntimeError, TypeError, ValueError):
            # The node may lie in a branch that is never taken; where it runs, it fails then.
            return False
        if isinstance(result, Tensor):
            if result.ndim > 1 or result.numel() > LITERAL or result.is_floating_point():
                return False
            items = result.tolist()
            result = tuple(items) if isinstance(items, list) else items
        items = ints(result)
        if len(items) > LITERAL or not all(isinstance(item, int) for item in items):
            return False
        self.constants.know(node.outputs[0], result)
        return True

    def _keeps_host(self, node: ir.Node) -> bool:
        """Let a Cast of a host value be that value, where only shapes and bounds read it.

        As a float it would be data: Range's bounds are floats when its elements are.
        """
        if node.op_type != "Cast" or node.inputs[0] is None or not self._is_host(node.inputs[0]):
            return False
        value = node.outputs[0]
        if not ir.DataType(self.types.of(value)).is_floating_point():
            return False
        entries = [(find(use.node.domain, use.node.op_type), use.idx) for use in value.uses()]
        if value.is_graph_output() or any(e is None or i not in e[0].hosts for e, i in entries):
            return False
        literal = self.constants.literal(node.inputs[0])
        if literal is None:
            self.values[value] = self.any(node.inputs[0])
            self.hosts.add(value)
        else:
            self.constants.know(value, literal)
        return True

    def _literal(self, node: ir.Node, entry: Entry, index: int) -> Any:
        """A constant input as a literal: floats only where the function takes Python numbers."""
        value = node.inputs[index]
        if value is None:
            return None
        floats = index in entry.scalars or index in entry.hosts
        literal = self.constants.literal(value, floats=floats)
        vector = isinstance(literal, tuple) and index not in entry.hosts
        if vector and isinstance(literal[0] if literal else 0, float):
            return None
        return literal

    def _takes_host(self, node: ir.Node, entry: Entry, index: int) -> bool:
        value = node.inputs[index]
        return (
            value is None or self._is_host(value) or self._literal(node, entry, index) is not None
        )

    def _argument(self, node: ir.Node, entry: Entry, index: int, host: bool) -> Any:
        value = node.inputs[index]
        if value is None:
            return None
        literal = self._literal(node, entry, index)
        if index in entry.hosts or host:
            return self.any(value) if literal is None else literal
        scalar = literal is not None and not isinstance(literal, tuple)
        if scalar and (index in entry.scalars or entry.host):
            return literal
        return self.any(value) if entry.host else self.tensor(value)

    def _bind(self, node: ir.Node, call: fx.Node, several: bool, host: bool) -> None:
        for i, value in enumerate(node.outputs):
            result = call
            if several:
                result = self.graph.call_function(operator.getitem, (call, i))
                result.meta[ONNX] = call.meta[ONNX]
            self.values[value] = result
            rank = None if value.shape is None else len(value.shape)
            if (host and (rank is None or rank < 2)) or node.op_type in ("Shape", "Size"):
                self.hosts.add(value)

    def _is_host(self, value: ir.Value) -> bool:
        if value in self.hosts or self.constants.literal(value) is not None:
            return True
        return self.outer is not None and value not in self.values and self.outer._is_host(value)

    def any(self, value: ir.Value) -> Any:
        """What stands for a value here: a node, or a literal that was computed at build."""
        if value in self.values:
            return self.values[value]
        if value in self.captures:
            return self.captures[value]
        if self.constants.is_computed(value):
            return self.constants.literal(value)
        if self.outer is None:
            node = self.graph.get_attr(self.constants.attribute(value))
            self.values[value] = node
            return node
        self.captures[value] = self._placeholder(value)
        return self.captures[value]

    def tensor(self, value: ir.Value) -> Any:
        """The same, as a tensor where it may be a host value."""
        found = self.any(value)
        if not self._is_host(value) or (isinstance(found, fx.Node) and found.op == "get_attr"):
            return found
        like = None if self.like is None else self.any(self.like)
        dtype = DTYPES.get(self.types.of(value))
        return self.graph.call_function(to_tensor, (found, like, dtype))

    def _with_bodies(self, node: ir.Node, arguments: list[Any]) -> list[Any]:
        """The bodies as modules, the node's inputs, and what the bodies read from around them."""
        scopes = []
        captures: dict[ir.Value, None] = {}
        for _, body in body_attributes(node):
            scope = _Scope(self.constants, self.opsets, self.parameters, self)
            if node.op_type == "Loop":
                scope.hosts |= set(body.inputs[:2])
            scope.build(body.inputs, body, body.outputs, host_outputs=int(node.op_type == "Loop"))
            scopes.append(scope)
            captures |= dict.fromkeys(scope.captures)
        modules = [self.graph.get_attr(self._add_module(s.closed(captures))) for s in scopes]
        return [tuple(modules), tuple(arguments), tuple(self.any(value) for value in captures)]

    def closed(self, captures: Mapping[ir.Value, None]) -> fx.GraphModule:
        """The module of a body that takes its inputs, then the values of `captures`."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for value in captures:
            self.any(value)
            first.prepend(self.captures[value])
        return _module(self.root, self.graph)

    def _add_module(self, module: fx.GraphModule) -> str:
        count = 0
        while hasattr(self.root, name := f"body_{count}"):
            count += 1
        self.root.add_module(name, module)
        return name
