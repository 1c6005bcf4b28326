"""Calls of model-local functions replaced by the functions' bodies.

onnx_ir's own pass gives the nodes of a body the names they have in the function, so that all
layers of one kind look alike; here they are called after the node that called. It also leaves
out calls with fewer outputs than the function and bodies that hand an input through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.scopes import bodies, scopes
from qgraph.wording import counted

Functions = Mapping[ir.OperatorIdentifier, ir.Function]


def inline_functions(model: ir.Model, keep: Callable[[ir.Function], bool]) -> None:
    """Inline every call, in all scopes, of a function that `keep` refuses; drop those functions.

    Raises:
        InputError: functions that call each other in a circle, or one whose opset the graph's
            cannot stand for.
    """
    kept = {key: function for key, function in model.functions.items() if keep(function)}
    inlined = {key: f for key, f in model.functions.items() if key not in kept}
    used = _called(model.graph, inlined)
    for function in kept.values():
        used |= _called(function.graph, inlined)
    for key in used:
        _join_opsets(model, inlined[key])
    for root in (model.graph, *(function.graph for function in kept.values())):
        _inline_in(root, inlined)
    model.functions.clear()
    model.functions.update(kept)


def _called(graph: ir.Graph, functions: Functions) -> set[ir.OperatorIdentifier]:
    """Every function that `graph` calls, through other functions too."""
    found: set[ir.OperatorIdentifier] = set()

    def visit(graph: ir.Graph, callers: tuple[ir.OperatorIdentifier, ...]) -> None:
        for key in {node.op_identifier() for node in graph.all_nodes()} & functions.keys():
            if key in callers:
                circle = " calls ".join("::".join(k[:2]) for k in (*callers, key))
                raise InputError(f"functions of the model call each other in a circle: {circle}")
            if key not in found:
                visit(functions[key].graph, (*callers, key))
                found.add(key)

    visit(graph, ())
    return found


def _join_opsets(model: ir.Model, function: ir.Function) -> None:
    """Let the graph import what the function does; ops must mean the same under both versions."""
    imports = model.graph.opset_imports
    for domain, version in function.opset_imports.items():
        if imports.setdefault(domain, version) == version:
            continue
        for op_type in {node.op_type for node in function.all_nodes() if node.domain == domain}:
            if _since(op_type, version, domain) != _since(op_type, imports[domain], domain):
                raise InputError(
                    f"function {function.domain}::{function.name} uses {op_type} of opset "
                    f"{version} (domain {domain or 'ai.onnx'!r}), the model imports "
                    f"{imports[domain]}, where {op_type} means something else. Convert the model "
                    "to one opset: onnx.version_converter, or export it again"
                )


def _since(op_type: str, version: int, domain: str) -> int:
    """The version since which an op has had the meaning that it has in `version`; 0: unknown."""
    try:
        return onnx.defs.get_schema(op_type, version, domain).since_version
    except onnx.defs.SchemaError:
        return 0


def _inline_in(scope: ir.Graph, functions: Functions) -> None:
    todo = list(reversed(list(scope)))
    while todo:
        node = todo.pop()
        function = functions.get(node.op_identifier())
        if function is not None:
            todo.extend(reversed(_inline_call(scope, node, function)))
            continue
        for body in bodies(node):
            _inline_in(body, functions)


def _inline_call(scope: ir.Graph, call: ir.Node, function: ir.Function) -> list[ir.Node]:
    """Put the body where `call` was; its nodes and values are called `call/name`."""
    if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
        raise InputError(
            f"node {call.name!r} calls {function.domain}::{function.name} with "
            f"{counted(len(call.inputs), 'input')} and {counted(len(call.outputs), 'output')}; "
            f"the function has {len(function.inputs)} and "
            f"{len(function.outputs)}. Export the model again"
        )
    try:
        body = function.clone().graph
    except RuntimeError as error:  # what the cloner says of a value that it has not met
        raise InputError(
            f"function {function.domain}::{function.name} reads a value that nothing in it "
            "defines. Export the model again"
        ) from error
    _bind_attributes(body, function, call)
    _prefix_names(body, call.name or call.outputs[0].name or function.name)
    missing = [None] * (len(body.inputs) - len(call.inputs))
    actual = dict(zip(body.inputs, (*call.inputs, *missing), strict=True))
    for formal, value in actual.items():
        for user, index in formal.uses():
            user.replace_input_with(index, value)
    results = [actual.get(value, value) for value in body.outputs][: len(call.outputs)]
    body.outputs.clear()
    nodes = list(body)
    body.remove(nodes)
    nodes += _hand_over(call, results, nodes)
    scope.insert_before(call, nodes)
    scope.remove(call, safe=True)
    return nodes


def _bind_attributes(body: ir.Graph, function: ir.Function, call: ir.Node) -> None:
    """Replace references to the function's attributes by what the call gives, or the default."""
    given = {name: attr for name, attr in function.attributes.items() if attr.value is not None}
    given.update(call.attributes)
    for node in list(body.all_nodes()):
        for attr in tuple(node.attributes.values()):
            if not attr.is_ref():
                continue
            bound = given.get(attr.ref_attr_name or "")
            if bound is None:
                del node.attributes[attr.name]
            elif bound.is_ref():
                node.attributes.add(ir.RefAttr(attr.name, bound.ref_attr_name or "", bound.type))
            else:
                value = bound.value
                if isinstance(value, ir.Graph):
                    value = value.clone(allow_outer_scope_values=True)
                node.attributes.add(ir.Attr(attr.name, bound.type, value))


def _prefix_names(body: ir.Graph, prefix: str) -> None:
    for scope in scopes(body):
        for node in scope:
            node.name = f"{prefix}/{node.name or node.op_type}"
            for value in node.outputs:
                value.name = f"{prefix}/{value.name}" if value.name else ""
        if scope is not body:
            for value in {*scope.inputs, *scope.initializers.values()}:
                value.name = f"{prefix}/{value.name}"


def _hand_over(
    call: ir.Node, results: list[ir.Value | None], nodes: list[ir.Node]
) -> list[ir.Node]:
    """Let the readers of the call read the body's results, under the names they knew.

    A result that the body does not produce, or hands over twice, passes through an Identity.
    """
    free = {value for node in nodes for value in node.outputs}
    added: list[ir.Node] = []
    for output, result in zip(call.outputs, results, strict=True):
        if result is not None and result not in free:
            added.append(ir.Node("", "Identity", [result], name=f"{call.name}/Identity"))
            result = added[-1].outputs[0]
        if result is None:
            for user, index in output.uses():
                user.replace_input_with(index, None)
            continue
        free.discard(result)
        result.name = output.name
        result.type = output.type if output.type is not None else result.type
        result.shape = output.shape if output.shape is not None else result.shape
        result.metadata_props.update(output.metadata_props)
        output.replace_all_uses_with(result, replace_graph_outputs=True)
    return added
