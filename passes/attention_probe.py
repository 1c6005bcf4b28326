"""What masks and rotary tables hold, found by computing them: the same for every spelling.

A cone is the part of the graph that makes a few values out of graph inputs and constants. It is
computed on made-up inputs; what reads only the shape of a value is told that shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.fusion import Builder
from qgraph.passes.fusion_check import Cut
from qgraph.scopes import bodies

_LARGE = (1 << 31) - 1
"""Integers from here on stand for an end without bound, as in a slice to the last element."""


_LISTED = 64
"""Constants of more elements are tables, whose dimensions are lengths, and no lists of lengths."""
_DIVIDING = ("Div", "Mod", "Mul")
"""Ops behind which a constant may be reached later than at itself: at its product with another."""
_LEAST, _LOW = 1e-4, -1e3
_Run: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]


class NotComputedError(Exception):
    """A cone that cannot be computed on its own; the message says which edge is to blame."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many rows, tokens that look, and tokens before them that are looked at as well."""

    batch: int
    new: int
    past: int = 0

    @property
    def total(self) -> int:
        """The tokens that are looked at."""
        return self.past + self.new


@dataclasses.dataclass(frozen=True)
class Frame:
    """How one attention names its dimensions; a fixed one is an integer.

    past: None where there is no cache.
    """

    batch: int | str
    new: int | str
    past: int | str | None = None

    def sizes(self, batch: int, new: int, past: int = 0) -> Sizes:
        """These sizes, as far as the dimensions are free."""
        return Sizes(
            self.batch if isinstance(self.batch, int) else batch,
            self.new if isinstance(self.new, int) else new,
            0 if self.past is None else self.past if isinstance(self.past, int) else past,
        )

    @property
    def names(self) -> frozenset[str]:
        """The symbols among them."""
        dims = (self.batch, self.new, self.past)
        return frozenset(dim for dim in dims if isinstance(dim, str))

    def bindings(self, sizes: Sizes) -> dict[str, int]:
        """What the symbols stand for."""
        pairs = ((self.batch, sizes.batch), (self.new, sizes.new), (self.past, sizes.past))
        return {name: size for name, size in pairs if isinstance(name, str)}


class Cone:
    """What makes `targets` out of `values`, whose elements matter, and of shapes.

    values: what has to be given: those of `cut` that are reached, whatever makes them, and
        graph inputs.
    tables: the dimensions of its large constants.
    """

    def __init__(
        self,
        model: ir.Model,
        frame: Frame,
        targets: Sequence[ir.Value],
        cut: Iterable[ir.Value] = (),
    ) -> None:
        self.frame = frame
        self.targets = tuple(targets)
        self.values: list[ir.Value] = []
        self._integers: dict[ir.Value, set[int]] = {}
        self._numbers: dict[ir.Value, set[float]] = {}
        self.tables: set[int] = set()
        self._model = model
        self._shapes: list[ir.Node] = []
        self._nodes: dict[ir.Node, None] = {}
        self._run: _Run | None = None
        self._walk(set(cut))

    @property
    def integers(self) -> frozenset[int]:
        """The constants in it that may be a length or a window, and what they come to together.

        Added up, and multiplied where positions are divided or multiplied: a window of 16 blocks
        of 16 tokens ends at 256.
        """
        total, factor, found = 0, 1, set[int]()
        for node in self._nodes:
            for value in node.inputs:
                if value is None or self._hides(node, value):
                    continue
                integers = self._integers.get(value, set())
                found |= integers
                total += max(integers, default=0)
                factor *= self._factor(node, value)
        return frozenset({total * factor, *found})

    @property
    def numbers(self) -> frozenset[float]:
        """The small constants in it, as they are."""
        return frozenset().union(*self._numbers.values())

    @property
    def looked_up(self) -> list[int]:
        """How many rows the tables have that it looks rows up in."""
        gathers = [node for node in self._nodes if node.op_type == "Gather"]
        tables = [node.inputs[0] for node in gathers if not node.attributes.get_int("axis", 0)]
        return [
            value.const_value.shape.numpy()[0]
            for value in tables
            if value is not None and value.const_value is not None and len(value.const_value.shape)
        ]

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """Equal for two cones that compute the same of the same leaves."""
        places: dict[ir.Value | None, Hashable] = {None: None}
        for node in self._shapes:
            places[node.outputs[0]] = ("Shape", node.inputs[0], *_attributes(node))
        found: list[Hashable] = []
        for node in self._nodes:
            given = (places[v] if v in places else _leaf(v) for v in node.inputs)
            found.append((node.op_type, *_attributes(node), *given))
            places[node.outputs[0]] = len(found)
        return (*found, *(places[v] if v in places else _leaf(v) for v in self.targets))

    def compute(self, sizes: Sizes, values: Mapping[ir.Value, Array]) -> list[Array]:
        """The targets, where `values` gives all of `self.values`.

        Raises:
            NotComputedError: a shape is not known, or the graph itself fails at these sizes.
        """
        leaves = [*self.values, *(node.outputs[0] for node in self._shapes)]
        if self._run is None:
            self._run = _evaluator(Cut(self._model, leaves).model(self.targets))
        given = {value: array.shape for value, array in values.items()}
        bindings = self.frame.bindings(sizes)
        told = [_told(node, given, bindings) for node in self._shapes]
        feeds = [*(values[value] for value in self.values), *told]
        try:
            return self._run({f"input{i}": array for i, array in enumerate(feeds)})
        except Exception as error:  # whatever the evaluator of a foreign graph raises
            raise NotComputedError(f"it cannot be computed at {sizes}: {error}") from None

    def copied(
        self,
        builder: Builder,
        sizes: Sizes,
        given: Mapping[ir.Value, ir.Value],
        shapes: Mapping[ir.Value, Sequence[int]],
    ) -> list[ir.Value]:
        """The targets made anew of `given`, which stands for `self.values`, at these sizes.

        shapes: those of the values in `given`.
        """
        made: dict[ir.Value, ir.Value] = dict(given)
        for node in self._shapes:
            told = _told(node, shapes, self.frame.bindings(sizes))
            made[node.outputs[0]] = builder.constant("shape", told)
        for node in self._nodes:
            attributes = {name: attr.value for name, attr in node.attributes.items()}
            made[node.outputs[0]] = builder.op(
                node.op_type,
                [None if value is None else made.get(value, value) for value in node.inputs],
                attributes=attributes,
                dtype=node.outputs[0].dtype,
            )
        return [made[target] for target in self.targets]

    def _walk(self, cut: set[ir.Value]) -> None:
        """Find leaves and nodes, each node behind those that it reads."""
        known: set[ir.Value] = set()
        pending = list(self.targets)
        while pending:
            value = pending[-1]
            node = value.producer()
            if value in known or self._is_leaf(value, cut):
                known.add(pending.pop())
                continue
            assert node is not None
            if node.domain or bodies(node) or len(node.outputs) > 1:
                raise NotComputedError(f"{node.op_type} {node.name} makes part of it")
            needed = [each for each in node.inputs if each is not None and each not in known]
            pending += needed
            if not needed:
                self._nodes[node] = None
                known.add(pending.pop())

    def _is_leaf(self, value: ir.Value, cut: set[ir.Value]) -> bool:
        node = value.producer()
        if value in cut or (node is None and not value.is_initializer()):
            self.values.append(value)
        elif node is None:
            self._constant(value)
        elif node.op_type == "Shape" and not node.domain and self._is_told(node.inputs[0], cut):
            self._shapes.append(node)
        else:
            return False
        return True

    def _is_told(self, value: ir.Value | None, cut: set[ir.Value]) -> bool:
        """Whether the shape of a value is known once the frame has sizes."""
        if value is None or value.shape is None:
            return value in cut
        names = self.frame.names
        return value in cut or all(
            isinstance(dim, int) or (dim.value is not None and dim.free_symbols() <= names)
            for dim in value.shape
        )

    def _hides(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a constant makes scores vanish, as in `Where(seen, 0, −1e4)`."""
        floats = value.dtype is not None and value.dtype.is_floating_point()
        numbers = self._numbers.get(value, set())
        return floats and node.op_type in ("Where", "Mul") and max(numbers, default=0) <= _LOW

    def _factor(self, node: ir.Node, value: ir.Value) -> int:
        """How much later what follows a node is reached because of the constant `value`."""
        numbers = self._numbers.get(value, set())
        if node.op_type not in _DIVIDING or len(numbers) != 1:
            return 1
        size = abs(min(numbers))
        if value.dtype is not None and value.dtype.is_integer():
            return max(1, int(size))
        if node.op_type == "Mul":  # a large one makes what is added to scores, no position
            size = 1 / size if _LEAST <= size < 1 else 1
        return max(1, math.ceil(size))

    def _constant(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is None or value.is_graph_input():
            raise NotComputedError(f"{value.name} is an input that overrides a constant")
        if tensor.dtype.is_string():
            return
        if tensor.size > _LISTED:
            self.tables.update(int(size) for size in tensor.shape.numpy() if size > 1)
            return
        array = tensor.numpy().astype(np.float64).reshape(-1)
        array = array[np.abs(array) < _LARGE]
        whole = array[array == np.round(array)]
        self._integers[value] = {int(abs(item)) for item in whole}
        self._numbers[value] = {float(item) for item in array}


def _attributes(node: ir.Node) -> tuple[str, ...]:
    return tuple(sorted(str(attribute) for attribute in node.attributes.values()))


def _leaf(value: ir.Value | None) -> Hashable:
    """A small constant by what it holds, anything else by itself."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size > _LISTED:
        return value
    return (tensor.dtype, tuple(tensor.shape), tensor.tobytes())


def _told(
    node: ir.Node, given: Mapping[ir.Value, Sequence[int]], bindings: Mapping[str, int]
) -> Array:
    """What a Shape node says at these sizes."""
    value = node.inputs[0]
    assert value is not None
    sizes = given.get(value)
    if sizes is None:
        if value.shape is None:
            raise NotComputedError(f"the shape of {value.name} is not known")
        sizes = [_size(dim, bindings, value) for dim in value.shape]
    start = node.attributes.get_int("start", 0)
    return np.array(sizes[start : node.attributes.get_int("end", len(sizes))], np.int64)


def _size(dim: int | ir.SymbolicDim, bindings: Mapping[str, int], value: ir.Value) -> int:
    size = dim if isinstance(dim, int) else dim.evaluate(bindings)
    if not isinstance(size, int):
        raise NotComputedError(f"the shape {value.shape} of {value.name} is not known")
    return size


def _evaluator(data: bytes) -> _Run:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load_model_from_string(data))

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        with np.errstate(all="ignore"):
            return [np.asarray(array) for array in evaluator.run(None, dict(feeds))]

    return run
