"""Sizes of axes as polynomials of symbols: `batch * sequence`, `past + 1`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from qgraph.constants import small_ints

LONGEST = 64
"""Elements of the longest vector of integers that is followed."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A sum of products: `terms` maps sorted symbols to their integer factor, zeros left out."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @classmethod
    def of(cls, value: int | str) -> Size:
        """A number, or the symbol of an axis; `past + sequence` is read as a sum."""
        if isinstance(value, str):
            return _parsed(value)
        return _made({(): value})

    @property
    def number(self) -> int | None:
        """The number that it is, where no symbol is in it."""
        if not self.terms:
            return 0
        symbols, factor = self.terms[0]
        return factor if len(self.terms) == 1 and not symbols else None

    @property
    def is_positive(self) -> bool:
        """Whether it cannot be negative: sizes of axes are not."""
        return all(factor > 0 for _, factor in self.terms)

    @property
    def dim(self) -> int | str:
        """As shapes spell it."""
        number = self.number
        if number is not None:
            return number
        return " + ".join(_spelled(symbols, factor) for symbols, factor in self.terms)

    def __add__(self, other: Size) -> Size:
        """The sum."""
        found = dict(self.terms)
        for symbols, factor in other.terms:
            found[symbols] = found.get(symbols, 0) + factor
        return _made(found)

    def __mul__(self, other: Size) -> Size:
        """The product."""
        found: dict[tuple[str, ...], int] = {}
        for first, a in self.terms:
            for second, b in other.terms:
                symbols = tuple(sorted(first + second))
                found[symbols] = found.get(symbols, 0) + a * b
        return _made(found)

    def __sub__(self, other: Size) -> Size:
        """The difference."""
        return self + other * Size.of(-1)

    def over(self, other: Size) -> Size | None:
        """The quotient, where it is exact; None where that is not known."""
        if len(other.terms) != 1:
            return Size.of(1) if self == other and self.terms else None
        (below, divisor), found = other.terms[0], dict[tuple[str, ...], int]()
        for symbols, factor in self.terms:
            left = list(symbols)
            if factor % divisor or any(below.count(each) > left.count(each) for each in below):
                return None
            for each in below:
                left.remove(each)
            found[tuple(left)] = factor // divisor
        return _made(found)


Sizes: TypeAlias = Sequence[Size | None]
"""The axes of a value, or the elements of a vector of integers; None where unknown."""


def _made(terms: Mapping[tuple[str, ...], int]) -> Size:
    return Size(tuple(sorted((symbols, factor) for symbols, factor in terms.items() if factor)))


def _spelled(symbols: tuple[str, ...], factor: int) -> str:
    words = [*([] if factor == 1 and symbols else [str(factor)]), *symbols]
    return "*".join(words)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Size:
    try:
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return _made({(text,): 1})


def _read(tree: ast.expr) -> Size:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return Size.of(tree.value)
    if isinstance(tree, ast.Name):
        return _made({(tree.id,): 1})
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add | ast.Sub | ast.Mult):
        left, right = _read(tree.left), _read(tree.right)
        if isinstance(tree.op, ast.Add):
            return left + right
        return left - right if isinstance(tree.op, ast.Sub) else left * right
    raise ValueError(ast.unparse(tree))


def sizes_of(shape: ir.Shape | None) -> list[Size | None] | None:
    """The axes of a shape; None where its rank is unknown."""
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return [None if dim is None else Size.of(dim) for dim in dims]


def broadcast(first: Sizes, second: Sizes) -> list[Size | None]:
    """The shape of an element-wise result; an axis of two symbols is unknown."""
    rank = max(len(first), len(second))
    ones: list[Size | None] = [Size.of(1)] * rank
    padded = [[*ones[len(each) :], *each] for each in (first, second)]
    return [_met(a, b) for a, b in zip(*padded, strict=True)]


def _met(a: Size | None, b: Size | None) -> Size | None:
    if a == b:
        return a
    for this, other in ((a, b), (b, a)):
        if this is not None and (this.number == 1 or _is_at_most(this, other)):
            return other
    return next((each for each in (a, b) if each is not None and each.number is not None), None)


def at_most(limit: int, size: Size) -> Size:
    """The smaller of a number and a size, as exporters spell it too."""
    return _made({(f"Min({limit}, {size.dim})",): 1})


def _is_at_most(size: Size, other: Size | None) -> bool:
    """Whether `size` is the smaller of `other` and a number above 1: then both meet in `other`."""
    symbols, factor = size.terms[0] if len(size.terms) == 1 else ((), 0)
    found = re.fullmatch(r"Min\((\d+), (.*)\)", symbols[0]) if len(symbols) == factor == 1 else None
    return found is not None and int(found[1]) > 1 and Size.of(found[2]) == other


def product(sizes: Sizes) -> Size | None:
    """The number of elements; None where a size is unknown."""
    total = Size.of(1)
    for each in sizes:
        if each is None:
            return None
        total = total * each
    return total


class Known:
    """What is known of the values that nodes read: shapes, and elements of vectors of integers."""

    def __init__(self) -> None:
        self.elements: dict[ir.Value, list[Size | None]] = {}

    def shape(self, node: ir.Node, index: int) -> list[Size | None] | None:
        """The shape of an input."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return sizes_of(value.shape) if value is not None else None

    def ints(self, node: ir.Node, index: int) -> list[Size | None] | None:
        """The elements of an input of integers; a scalar is one element."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return None
        if value in self.elements:
            return self.elements[value]
        constant = small_ints(value, LONGEST) if value.is_initializer() else None
        return None if constant is None else [Size.of(each) for each in constant]

    def numbers(self, node: ir.Node, index: int) -> list[int] | None:
        """The same, where all of them are known numbers."""
        found = [None if each is None else each.number for each in self.ints(node, index) or [None]]
        return None if None in found else [each for each in found if each is not None]

    def axes(self, node: ir.Node, index: int) -> list[int] | None:
        """Axes, from an input or, before opset 13, the attribute."""
        attribute = node.attributes.get("axes")
        if attribute is not None:
            return [int(each) for each in attribute.as_ints()]
        return self.numbers(node, index)
