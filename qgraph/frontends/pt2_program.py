"""The program inside a `.pt2`: whether loading its JSON could run anything but tensor ops.

torch.export.load evaluates texts of that JSON: symbolic sizes go through sympy's parser, which
is Python's `eval`; guards and argument names become source that is executed; the name of an op
is looked up from the torch module on, and the op is run. So every text is held to what
torch.export.save writes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

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

_FUNCTIONS = set(
    "Symbol Integer Rational Float Add Mul Pow Max Min Mod PythonMod FloorDiv CleanDiv CeilDiv "
    "CeilToInt FloorToInt ModularIndexing Where LShift RShift PowByNatural FloatPow FloatTrueDiv "
    "IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity Abs ceiling "
    "floor sqrt Piecewise ExprCondPair And Or Not Equality Unequality LessThan GreaterThan "
    "StrictLessThan StrictGreaterThan Eq Ne Lt Le Gt Ge "
    "IsNonOverlappingAndDenseIndicator".split()
)
_METHODS = {"size", "stride", "storage_offset"}
_ATTRIBUTES = _METHODS | {"shape"}
_NODES = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop,
    ast.Compare, ast.cmpop, ast.Call, ast.keyword, ast.Constant, ast.Name, ast.Load,
    ast.Attribute, ast.Subscript, ast.Tuple,
)  # fmt: skip
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_TREE_TYPE = re.compile(r"(?:builtins|collections|torch|transformers)(?:\.\w+)+")
_LONGEST = 20_000


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
        return _is_arithmetic(text)
    if key in ("in_spec", "out_spec"):
        return _is_tree(text)
    return _PLAIN.fullmatch(text) is not None


def _is_arithmetic(text: str) -> bool:
    """Whether a Python expression only reckons with sizes; it is parsed, never evaluated."""
    if len(text) > _LONGEST:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    subscripts = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    symbols = [
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        for argument in node.args
        if node.func.id == "Symbol"
    ]
    quoted = {id(node) for node in (*subscripts, *symbols)}
    return all(_is_allowed(node, quoted) for node in ast.walk(tree))


def _is_allowed(node: ast.AST, quoted: set[int]) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        return (isinstance(called, ast.Name) and called.id in _FUNCTIONS) or (
            isinstance(called, ast.Attribute) and called.attr in _METHODS
        )
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES
    if isinstance(node, ast.Name):
        # A name that is no function is a symbol, or L, the inputs of a guard.
        return node.id in _FUNCTIONS or re.fullmatch(r"L|[suz]\d+|u?oo|int_oo", node.id) is not None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return id(node) in quoted and _SYMBOL.fullmatch(node.value) is not None
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float | bool)
    return isinstance(node, _NODES)


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
