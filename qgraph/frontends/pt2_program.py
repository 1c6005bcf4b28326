"""The program inside a `.pt2`: whether loading its JSON could run anything but tensor ops.

torch.export.load evaluates texts of that JSON: symbolic sizes go through sympy's parser, which
is Python's `eval`; guards and argument names become source that is executed; the name of an op
is looked up from the torch module on, and the op is run. So every text is held to what
torch.export.save writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from qgraph.frontends import pt2_expressions

Found = Iterator[tuple[str, str]]
"""What must not be there: (what it is, the text)."""

_PLAIN = re.compile(r"[\w.:@+\- ]*")
_TARGET = re.compile(
    r"torch\.ops\.(?!load_library|import_module|loaded_libraries)[a-z]\w*\.(?!from_file\b)"
    r"(?:[A-Za-z]\w*|_[A-Za-z]\w*|__(?:and|or|xor|lshift|rshift)__)(?:\.[A-Za-z]\w*)?"
    r"|torch\.sym_[a-z]+|torch\._sym_[a-z]+|math\.[a-z]\w*"
    r"|_operator\.(?:getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge"
    r"|and_|or_|xor|not_|invert|lshift|rshift|index)"
)
_FREE = {
    "as_string",
    "as_strings",
    "custom",
    "from_node",
    "nn_module_stack",
    "source_fn_stack",
    "stack_trace",
    "torch_fn",
    "torch_version",
}
"""Keys of texts that are only shown, or quoted where they become source."""

_TREE_TYPE = re.compile(r"(?:builtins|collections|torch|transformers)(?:\.\w+)+")


def violations(program: Any) -> Found:
    """Every text of a program's JSON that torch.export.save would not have written."""
    yield from _walk(program, "")


def _walk(item: Any, key: str) -> Found:
    if isinstance(item, dict):
        for name, value in item.items():
            if not _PLAIN.fullmatch(name):
                yield "name", name
            yield from _walk(value, name)
    elif isinstance(item, list):
        for value in item:
            yield from _walk(value, key)
    elif isinstance(item, str) and not _is_harmless(key, item):
        yield {"target": "op", "as_operator": "op"}.get(key, key), item


def _is_harmless(key: str, text: str) -> bool:
    if key in _FREE:
        return True
    if key in ("target", "as_operator"):
        return _TARGET.fullmatch(text) is not None
    if key == "forward_arg_names":
        return text.isidentifier()
    if key in ("expr_str", "guards_code"):
        return pt2_expressions.is_arithmetic(text)
    if key in ("in_spec", "out_spec"):
        return _is_tree(text)
    return _PLAIN.fullmatch(text) is not None


def _is_tree(text: str) -> bool:
    """Whether a pytree's description has only known containers and text keys."""
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return False
    return version == 1 and _is_subtree(tree)


def _is_subtree(tree: Any) -> bool:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"}:
        return False
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if not isinstance(children, list) or not all(map(_is_subtree, children)):
        return False
    if kind is None:
        return context is None
    if not isinstance(kind, str) or "defaultdict" in kind or not _TREE_TYPE.fullmatch(kind):
        return False
    try:
        keys = json.loads(context)
    except (ValueError, TypeError, RecursionError):
        return False
    return _are_keys(keys)


def _are_keys(keys: Any) -> bool:
    """None, numbers or identifiers, in lists; a mapping would name a module to import."""
    if isinstance(keys, list):
        return all(map(_are_keys, keys))
    return keys is None or isinstance(keys, int) or (isinstance(keys, str) and keys.isidentifier())
