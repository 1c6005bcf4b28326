"""Axes that are as long as each other wherever a graph runs, whatever its inputs call them.

Exporters name the length of each cache on its own. The probabilities of an attention are as long
as its keys, its values and its mask, or there is no product: those lengths are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from qgraph.passes.attention_core import Core, OtherwiseError, core_of, native_core
from qgraph.passes.attention_heads import unviewed
from qgraph.passes.attention_past import joined_of
from qgraph.passes.dims import sizes_of


def unify_lengths(graph: ir.Graph) -> bool:
    """Call caches by the name of the first where attention makes them equally long.

    Returns:
        Whether a name changed: more shapes can be inferred then.
    """
    known: dict[str, str] = {}
    for node in graph:
        if node.op_type in ("Softmax", "Attention") and not node.domain:
            names = [_first(known, name) for name in _lengths(node)]
            known |= {name: names[0] for name in names if name != names[0]}
    renamed = {name: _first(known, name) for name in known}
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if renamed and value.shape is not None:
            value.shape = ir.Shape([_called(dim, renamed) for dim in value.shape])
    return bool(renamed)


def _first(known: dict[str, str], name: str) -> str:
    while name in known:
        name = known[name]
    return name


def _lengths(node: ir.Node) -> Iterator[str]:
    """The lengths of the caches of one attention, as inputs and its mask call them."""
    try:
        core = core_of(node) if node.op_type == "Softmax" else native_core(node)
    except OtherwiseError:
        return
    if core is None:
        return
    pasts = [_past(value) for value in (core.key, core.value)]
    if None in pasts:
        return
    yield from sorted({*_of_masks(core)})
    yield from (past for past in pasts if past is not None)


def _past(value: ir.Value) -> str | None:
    """What the input of a cache calls its length."""
    found = unviewed(value)
    joined = joined_of(found.value) if found is not None else None
    dims = joined.past.shape if joined is not None else None
    dim = dims[2] if dims is not None and len(dims) == 4 else 0
    return None if isinstance(dim, int) else dim.value


def _of_masks(core: Core) -> Iterator[str]:
    """The lengths of caches that masks are made for: what they are longer than the queries."""
    queries = sizes_of(core.query.shape)
    new = queries[2] if queries is not None and len(queries) == 4 else None
    for term in core.terms:
        sizes = sizes_of(term.value.shape)
        total = sizes[-1] if sizes else None
        if total is not None and new is not None:
            past = (total - new).dim
            if isinstance(past, str) and past.isidentifier():
                yield past


def _called(dim: int | ir.SymbolicDim, renamed: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda found: renamed.get(found[0], found[0]), dim.value)
