"""Torch's reason for not exporting a module, as one line that names the module."""

from __future__ import annotations

import keyword
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_LONGEST = 400
_LONGEST_CODE = 100
# What runs between forward and the error; everything else is the module's own code.
_TRACERS = {"torch", "sympy", "mpmath", "numpy", "onnx", "onnx_ir", "onnxscript", "qgraph"}
_TRACERS |= sys.stdlib_module_names
_WAYS_OUT = (
    (
        r"op='qgraph\.",
        "its weights are packed by qgraph already: use the .onnx file that it was made from",
    ),
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
    if isinstance(reason, SyntaxError):
        return _about_names(source, name, reason)
    node = _fx_node(error) if type(error).__name__ == "ConversionError" else None
    if node is not None and node.op == "output":
        return (
            f"{name} cannot become an ONNX graph: forward returns something besides tensors, "
            f"which ONNX outputs must be ({line(reason)}): return tensors only"
        )
    path = _path_of_node(node) if node is not None else _path_in_frames(error, source)
    where = f"{name}, module {path}," if path else name
    text = f"{type(reason).__name__}: {line(reason)}"
    way_out = next((way for pattern, way in _WAYS_OUT if re.search(pattern, str(reason))), _OTHER)
    return f"{where} cannot be exported: {text}{_code(error)}; {way_out}"


def _about_names(source: Any, name: str, reason: SyntaxError) -> str:
    """Torch writes Python source with the names of modules in it, and does not quote them."""
    state = source.state_dict  # a method of modules, a property of exported programs
    keys = state() if callable(state) else state
    odd = next((key for key in keys if _is_odd(key)), None)
    found = f", such as that of {odd!r}" if odd is not None else ""
    return (
        f"{name} cannot be exported: torch makes Python source of the names of submodules and "
        f"parameters{found} ({line(reason)}): rename it, without quotes, line breaks and Python's "
        "keywords"
    )


def _is_odd(key: str) -> bool:
    return bool(re.search(r"[\"\\\n\r]", key)) or any(map(keyword.iskeyword, key.split(".")))


def _code(error: BaseException) -> str:
    """The line of the module's code that was running, if any: file, number and text."""
    for frame, number in _frames(error):
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _TRACERS or file.startswith("<"):
            continue
        text = linecache.getline(file, number).strip()[:_LONGEST_CODE]
        shown = f": {text}" if text else ""
        return f" (line {number} of {Path(file).name}{shown})"
    return ""


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


def root(error: BaseException) -> BaseException:
    """The error that all the others were raised from."""
    *_, last = _chain(error)
    return last


def line(error: BaseException) -> str:
    """The first line that says something, without colors, cut to a readable length."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = next((each for each in lines if each), "no message")
    if re.match(r"Constraints violated", found):
        found = next((each.lstrip("- ") for each in lines if each.startswith("- ")), found)
    found = re.sub(r" *(Alternatively|For more information).*", "", found)
    return found if len(found) <= _LONGEST else f"{found[:_LONGEST]}…"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Every frame that the error and its causes went through, innermost first, and its line."""
    for each in _chain(error):
        found: list[tuple[FrameType, int]] = []
        trace: TracebackType | None = each.__traceback__
        while trace is not None:
            found.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        yield from reversed(found)


def _fx_node(error: BaseException) -> Any:
    """The node of the traced program that could not be translated, or None."""
    from torch.fx import Node

    for frame, _ in _frames(error):
        node = frame.f_locals.get("node")
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
    for frame, _ in _frames(error):
        found = names.get(id(frame.f_locals.get("self")), "")
        if found:
            return found
    return ""
