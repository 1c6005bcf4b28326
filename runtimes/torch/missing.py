"""What the executor lacks or cannot do, in the words of an error."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.errors import InputError, QGraphError
from qgraph.runtimes.torch.table import find
from qgraph.scopes import nodes

_SHOWN = 3


class NodeError(InputError):
    """What names the node at which it arose."""


def called(node: ir.Node) -> str:
    """A node in an error."""
    return f"node {node.name or '(unnamed)'}"


def reason(error: Exception) -> str:
    """Why torch, numpy or Python refused, on one line; with the kind where that is what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RuntimeError | ValueError | TypeError | IndexError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def located(where: str, error: Exception) -> QGraphError:
    """What is raised for an error at a node, whose name and operator are `where`."""
    if isinstance(error, InputError) and not isinstance(error, NodeError):
        return NodeError(f"{where}: {error}")
    if isinstance(error, QGraphError):
        return error
    return NodeError(f"{where}: {reason(error)}")


def check_operators(model: ir.Model) -> None:
    """Raise InputError naming each operator that the table lacks and the nodes that want it."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for node in nodes(model.graph):
        constant = node.op_type == "Constant" and node.domain == ""
        if not constant and find(node.domain, node.op_type) is None:
            lacking.setdefault((node.domain, node.op_type), []).append(node.name or "?")
    if not lacking:
        return
    parts = []
    for (domain, name), found in lacking.items():
        version = model.graph.opset_imports.get(domain, 1)
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        where = ", ".join(found[:_SHOWN])
        parts.append(f"{domain or 'ai.onnx'}::{name} (opset {version}; node {where}{more})")
    kinds = "one kind of operator" if len(parts) == 1 else f"{len(parts)} kinds of operators"
    raise InputError(
        f"the torch executor lacks {kinds} of this model: {'; '.join(parts)}. "
        "Run it on ONNX Runtime, or export it without"
    )
