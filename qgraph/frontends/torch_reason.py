"""Torch's reason for not exporting a module, as one line that names the module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_LONGEST = 400
_WAYS_OUT = (
    (
        r"data-dependent",
        "a branch or shape depends on values: use torch.cond, torch.where or torch._check, or "
        "make it depend on shapes only",
    ),
    (
        r"No ONNX function found|No decompositions registered",
        "this op has no ONNX translation: write it with other ops",
    ),
    (
        r"When `dynamic_shapes`|`dynamic_shapes` .*(specified|contains|match)",
        "give dynamic_shapes one entry for each input that is in args and kwargs",
    ),
    (
        r"Constraints violated|not marked|specializ",
        "the module fixes a size that dynamic_shapes leaves open: leave that axis out, or use "
        "torch.export.Dim.AUTO",
    ),
    (
        r"positional argument|keyword argument|unexpected keyword|missing .* argument",
        "give args and kwargs as forward takes them",
    ),
)
_OTHER = "torch.export.export(module, args) shows all of it"


def explain(error: BaseException, source: Any, name: str) -> str:
    """One message: the module, torch's reason in one line, the way out.

    Args:
        error: what torch raised.
        source: the module or exported program.
        name: what `source` is called.
    """
    reason = _first_cause(error)
    node = _fx_node(error) if type(error).__name__ == "ConversionError" else None
    if node is not None and node.op == "output":
        return (
            f"{name} cannot become an ONNX graph: forward returns something besides tensors, "
            f"which ONNX outputs must be ({_line(reason)}): return tensors only"
        )
    path = _path_of_node(node) if node is not None else _path_in_frames(error, source)
    where = f"{name}, module {path}," if path else name
    text = f"{type(reason).__name__}: {_line(reason)}"
    way_out = next((way for pattern, way in _WAYS_OUT if re.search(pattern, str(reason))), _OTHER)
    return f"{where} cannot be exported: {text}; {way_out}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _first_cause(error: BaseException) -> BaseException:
    """What the exporter's own errors were raised from; they wrap it in pages of advice."""
    found = error
    while found.__cause__ is not None and "onnx" in type(found).__module__:
        found = found.__cause__
    return found


def _line(error: BaseException) -> str:
    """The first line that says something, without colors, cut to a readable length."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    line = next((line for line in lines if line), "no message")
    if re.match(r"Constraints violated", line):
        line = next((each.lstrip("- ") for each in lines if each.startswith("- ")), line)
    line = re.sub(r" *(Alternatively|For more information).*", "", line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _frames(error: BaseException) -> Iterator[dict[str, Any]]:
    """The variables of every frame that the error and its causes went through, innermost first."""
    for each in _chain(error):
        found: list[dict[str, Any]] = []
        trace: TracebackType | None = each.__traceback__
        while trace is not None:
            found.append(trace.tb_frame.f_locals)
            trace = trace.tb_next
        yield from reversed(found)


def _fx_node(error: BaseException) -> Any:
    """The node of the traced program that could not be translated, or None."""
    from torch.fx import Node

    for variables in _frames(error):
        node = variables.get("node")
        if isinstance(node, Node):
            return node
    return None


def _path_of_node(node: Any) -> str:
    """Where in the module an fx node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if entry[0]]
    return paths[-1] if paths else ""


def _path_in_frames(error: BaseException, source: Any) -> str:
    """The innermost submodule whose forward was running."""
    if not hasattr(source, "named_modules"):
        return ""
    names: dict[int, str] = {id(module): name for name, module in source.named_modules() if name}
    for variables in _frames(error):
        found = names.get(id(variables.get("self")), "")
        if found:
            return found
    return ""
