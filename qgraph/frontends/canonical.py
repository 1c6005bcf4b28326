"""Canonical form: the one shape in which passes see a graph (`qgraph.verify` states it)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from qgraph import function_inlining
from qgraph.errors import GraphError, InputError
from qgraph.formats.onnx_function import DOMAIN
from qgraph.frontends import lifting, naming, shapes
from qgraph.frontends.notes import Note
from qgraph.node_form import check_nodes
from qgraph.scopes import scopes

_LOCAL = re.compile(
    r"""File "|\.py[(:"', ]|\.py$|(?:^|[\s"'=(\[])(?:/[\w.~-]+){2,}|\b[A-Za-z]:\\""", re.MULTILINE
)
_EXPORTER = ("pkg.", "namespace")


def canonicalize(
    model: ir.Model, trusted: Callable[[ir.Function], bool] = lambda function: False
) -> list[Note]:
    """Bring `model` into canonical form, in place; float weights stay as they are, bit for bit.

    Args:
        model: as `onnx_file.load` or the torch exporter made it.
        trusted: whether a function of the domain "qgraph" has the body that we generate; one
            that has not is inlined like any other.

    Returns:
        What was changed, and what could not be done.

    Raises:
        InputError: the graph cannot be represented; the message says why and the way out.
    """
    notes = _opsets(model)
    check_nodes(model)
    _strip_metadata(model)
    notes += _sort(model)
    function_inlining.inline_functions(model, lambda f: f.domain == DOMAIN and trusted(f))
    notes += _import_domains(model)
    notes += _fix_initializers(model)
    names, renamed = naming.name_values(model)
    notes += renamed
    notes += shapes.infer_shapes(model)
    lifting.lift_constants(model, names)
    notes += naming.name_nodes(model)
    naming.record_aliases(model)
    return notes


def _opsets(model: ir.Model) -> list[Note]:
    """Spell the default domain one way."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if "ai.onnx" in graph.opset_imports:
            version = graph.opset_imports.pop("ai.onnx")
            graph.opset_imports.setdefault("", version)
    opset = model.graph.opset_imports.get("", 0)
    if 0 < opset < 13:
        return [
            Note("OPSET_BELOW_13", "", f"opset {opset}: the unlowered functions need 13 and later")
        ]
    return []


def _strip_metadata(model: ir.Model) -> None:
    """Drop stack traces, local paths and exporters' notes; the model's own properties stay."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for scope in scopes(graph):
            _strip(scope)
            for value in (*scope.inputs, *scope.initializers.values()):
                _strip(value)
                _strip(value.const_value)
            for node in scope:
                naming.record_module(node)
                _strip(node)
                for value in node.outputs:
                    _strip(value)
    if model.doc_string and _is_local(model.doc_string):
        model.doc_string = None


def _strip(item: Any) -> None:
    """Clean a graph, node, value or tensor."""
    if item is None:
        return
    if isinstance(item, ir.serde.TensorProtoTensor):
        item.raw.ClearField("doc_string")
        item.raw.ClearField("metadata_props")
    if item.doc_string and _is_local(item.doc_string):
        item.doc_string = None
    props = item.metadata_props
    for key in [k for k, v in props.items() if k.startswith(_EXPORTER) or _is_local(v)]:
        del props[key]


def _is_local(text: str | bytes) -> bool:
    """Whether a text holds stack traces or local paths; what is no UTF-8 arrives as bytes."""
    return isinstance(text, bytes) or _LOCAL.search(text) is not None


def _sort(model: ir.Model) -> list[Note]:
    """Bring nodes into an order in which each value is made before it is read."""
    notes = []
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if _is_sorted(graph):
            continue
        try:
            graph.sort()
        except ValueError:
            raise GraphError(
                f"the nodes of graph {graph.name or 'main'!r} read each other in a circle; "
                "export the model again"
            ) from None
        notes.append(Note("SORTED", graph.name or "", "nodes stood before what they read: sorted"))
    return notes


def _is_sorted(graph: ir.Graph) -> bool:
    seen: set[ir.Node] = set()
    for node in graph.all_nodes():
        # A node with bodies counts as seen when its bodies are entered; they read around it.
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen:
                return False
        seen.add(node)
    return True


def _import_domains(model: ir.Model) -> list[Note]:
    """Import each domain that nodes use; runtimes take a contrib domain without, we do not."""
    notes = []
    imports = model.graph.opset_imports
    for domain in sorted({node.domain for node in model.graph.all_nodes()} - imports.keys()):
        if domain == "":
            raise InputError(
                "the model uses ONNX's own ops but imports no opset for them; "
                "export it again with an opset import"
            )
        imports[domain] = 1
        notes.append(
            Note("OPSET_IMPORT_ADDED", domain, f"domain {domain!r} is now imported, version 1")
        )
    return notes


def _fix_initializers(model: ir.Model) -> list[Note]:
    """Let no initializer be a graph input, nor a body's input be an initializer."""
    notes = []
    for scope in scopes(model.graph):
        both = [value for value in scope.inputs if value.is_initializer()]
        for value in both:
            name = value.name or ""
            if scope is not model.graph:
                # If, Loop and Scan always feed their bodies' inputs.
                del scope.initializers[name]
                value.const_value = None
            elif model.ir_version >= 4:
                notes.append(
                    Note(
                        "OVERRIDABLE_INPUT",
                        name,
                        f"weight {name!r} was a graph input with a default; it is now a constant",
                    )
                )
        if scope is model.graph and both:
            fed = [value for value in scope.inputs if not value.is_initializer()]
            scope.inputs.clear()
            scope.inputs.extend(fed)
    # Before version 4 every initializer was an input, so the file must say that it is newer.
    model.ir_version = max(model.ir_version or 0, 4)
    return notes
