"""One name for each node and value, unique across all scopes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import onnx_ir as ir

from qgraph.frontends.notes import Note
from qgraph.scopes import scopes
from qgraph.selectors import ALIASES, MODULE


class Names:
    """The names that are in use, of one kind (nodes or values)."""

    def __init__(self, names: set[str]) -> None:
        self._known = names
        self._taken: set[str] = set()

    def take(self, name: str) -> str:
        """`name` if it is free, else `name` with the first free suffix; it is then in use."""
        if name in self._taken:
            name = self.fresh(name)
        self._taken.add(name)
        return name

    def fresh(self, name: str) -> str:
        """`name`, or `name` with a suffix, that nothing had when the model came in or has now."""
        tries = itertools.chain((name,), (f"{name}_{i}" for i in itertools.count(1)))
        name = next(t for t in tries if t not in self._known and t not in self._taken)
        self._taken.add(name)
        return name


def name_values(model: ir.Model) -> tuple[Names, list[Note]]:
    """Name every value once; of two with one name the later in the walk is renamed.

    The main graph comes first, then the bodies in the order of their nodes, so that a name of
    the main graph (inputs and outputs above all) never changes.

    Returns:
        The names in use, and a note for each value that was renamed.
    """
    values = [value for scope in scopes(model.graph) for value in _values(scope)]
    names = Names({value.name for value in values if value.name})
    notes: list[Note] = []
    for value in values:
        old = value.name or ""
        new = names.take(old) if old else names.fresh("value")
        if new == old:
            continue
        value.name = new
        if old:
            add_alias(value, old)
            notes.append(_renamed("value", old, new))
    return names, notes


def name_nodes(model: ir.Model) -> list[Note]:
    """Name every node once, in the same order; a nameless one after its op and first output."""
    nodes = [node for scope in scopes(model.graph) for node in scope]
    names = Names({node.name for node in nodes if node.name})
    notes: list[Note] = []
    for node in nodes:
        old = node.name or ""
        node.name = names.take(old) if old else names.fresh(_called_after(node))
        if old and node.name != old:
            notes.append(_renamed("node", old, node.name))
    return notes


def add_alias(value: ir.Value, name: str) -> None:
    """Remember another name of `value`, for selectors and imports."""
    known: tuple[str, ...] = value.meta.get(ALIASES, ())
    if name and name != value.name and name not in known:
        value.meta[ALIASES] = (*known, name)


def aliases(value: ir.Value) -> tuple[str, ...]:
    """The other names of `value`: before a rename, of its copies, of the node that held it."""
    found: tuple[str, ...] = value.meta.get(ALIASES, ())
    return found


def keep_names(node: ir.Node, weight: ir.Value | None) -> None:
    """Save a site's module path and its weight's other names with the model.

    In bodies the exporter notes no module: there it is the one that the weight belongs to.
    """
    owner = (weight.name or "").rpartition(".")[0] if weight is not None else ""
    module = node.meta.setdefault(MODULE, owner)
    if module:
        node.metadata_props[MODULE] = str(module)
    if weight is not None and aliases(weight):
        weight.metadata_props[ALIASES] = json.dumps(aliases(weight))


def record_module(node: ir.Node) -> None:
    """Give a node the module path that was saved with it, or that the exporter noted."""
    kept = node.metadata_props.get(MODULE)
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = re.findall(r"'([^']*)'", scopes)
    if kept:
        node.meta[MODULE] = kept
    elif len(names) >= 2:
        # The last name is the node's own; the one before it is the module's.
        node.meta[MODULE] = names[-2]


def record_aliases(model: ir.Model) -> None:
    """Give each initializer its saved names, and those of its copies by Identity nodes."""
    for scope in scopes(model.graph):
        for value in scope.initializers.values():
            for name in _saved(value):
                add_alias(value, name)
            for copy in _copies(value):
                add_alias(value, copy)


def _saved(value: ir.Value) -> list[str]:
    """The names that `keep_names` saved; files can say anything."""
    try:
        found = json.loads(value.metadata_props.get(ALIASES, "[]"))
    except (json.JSONDecodeError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _copies(value: ir.Value) -> Iterator[str]:
    for node in value.consumers():
        if node.op_type == "Identity" and node.domain == "":
            yield node.outputs[0].name or ""
            yield from _copies(node.outputs[0])


def _values(scope: ir.Graph) -> Iterator[ir.Value]:
    """What a scope defines, each once; outputs that a node leaves out have no name to keep."""
    yield from scope.inputs
    yield from (v for v in tuple(scope.initializers.values()) if not v.is_graph_input())
    for node in scope:
        yield from (v for v in node.outputs if v.name or v.uses() or v.is_graph_output())


def _called_after(node: ir.Node) -> str:
    first = next((value.name for value in node.outputs if value.name), "")
    return f"{node.op_type}_{first}" if first else node.op_type


def _renamed(kind: str, old: str, new: str) -> Note:
    return Note("RENAMED", new, f"{kind} {old!r} is now {new!r}: another {kind} has that name")
