"""Expressions of symbolic sizes in a `.pt2`: whether they are arithmetic, and end soon.

Loading hands them to sympy's parser, which is Python's `eval`. A text of a few bytes can also
ask for a number that no memory holds, so literals and exponents are bounded.
"""

from __future__ import annotations

import ast
import math
import re

_FUNCTIONS = set(
    "Symbol Integer Rational Float Add Mul Pow Max Min Mod PythonMod FloorDiv CleanDiv CeilDiv "
    "CeilToInt FloorToInt ModularIndexing Where LShift RShift PowByNatural FloatPow FloatTrueDiv "
    "IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity Abs ceiling "
    "floor sqrt Piecewise ExprCondPair And Or Not Equality Unequality LessThan GreaterThan "
    "StrictLessThan StrictGreaterThan Eq Ne Lt Le Gt Ge "
    "IsNonOverlappingAndDenseIndicator".split()
)
_GROWING = {"Pow", "PowByNatural", "FloatPow", "LShift"}
"""Functions whose second argument says how many digits the result has."""
_METHODS = {"size", "stride", "storage_offset"}
_ATTRIBUTES = _METHODS | {"shape"}
_NODES = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop,
    ast.Compare, ast.cmpop, ast.Call, ast.keyword, ast.Constant, ast.Name, ast.Load,
    ast.Attribute, ast.Subscript, ast.Tuple,
)  # fmt: skip
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_LONGEST = 20_000
_LARGEST = 2**64
_MOST_BITS = 10_000_000


def is_arithmetic(text: str) -> bool:
    """Whether a Python expression only reckons with sizes; it is parsed, never evaluated."""
    if len(text) > _LONGEST:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    subscripts = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    symbols = [
        argument
        for node in nodes
        if isinstance(node, ast.Call) and _called(node) == "Symbol"
        for argument in node.args
    ]
    quoted = {id(node) for node in (*subscripts, *symbols)}
    return all(_is_allowed(node, quoted) for node in nodes) and _ends_soon(tree.body, nodes)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


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
        return isinstance(node.value, float | bool) or (
            isinstance(node.value, int) and node.value < _LARGEST
        )
    return isinstance(node, _NODES)


def _ends_soon(tree: ast.expr, nodes: list[ast.AST]) -> bool:
    """Whether no power, shift, precision or repeated tuple makes the result huge."""
    for node in nodes:
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
        if any(map(_is_sequence, sides)):
            return False
        # A second argument of Float is its precision, in digits.
        if isinstance(node, ast.Call) and _called(node) == "Float" and not _has_one_argument(node):
            return False
    try:
        return _bits(tree) <= _MOST_BITS
    except RecursionError:
        return False


def _has_one_argument(node: ast.Call) -> bool:
    return len(node.args) == 1 and not node.keywords


def _bits(node: ast.AST) -> float:
    """An upper bound of the bits that the largest number within an expression has."""
    if isinstance(node, ast.Constant | ast.Name | ast.Attribute | ast.Subscript):
        return 64
    exponent = _exponent(node)
    inner = sum(_bits(child) for child in ast.iter_child_nodes(node) if child is not exponent)
    if exponent is None:
        return inner
    size = _magnitude(exponent)
    return math.inf if size is None else inner * max(1, size)


def _exponent(node: ast.AST) -> ast.expr | None:
    """The exponent of a power, or the number of bits of a shift to the left."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        return node.right
    if isinstance(node, ast.Call) and _called(node) in _GROWING:
        return node.args[1] if len(node.args) == 2 else node
    return None


def _magnitude(node: ast.expr) -> int | None:
    """The magnitude of a literal, rounded up; None for what is none."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _magnitude(node.operand)
    if isinstance(node, ast.Call) and _called(node) in ("Integer", "Rational", "Float"):
        return _magnitude(node.args[0]) if node.args else None
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return int(min(abs(node.value), float(_LARGEST))) + (not isinstance(node.value, int))
    return None


def _is_sequence(node: ast.expr) -> bool:
    """Whether it is a tuple, or the whole shape or strides of an input, which `*` would repeat."""
    if isinstance(node, ast.Attribute):
        return node.attr == "shape"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("size", "stride") and not node.args
    return isinstance(node, ast.Tuple)
