"""The proof of a fusion: the old region and the new nodes, run side by side on random inputs."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.passes.fusion import Candidate
from qgraph.scopes import bodies

Evaluate: TypeAlias = Callable[[bytes, Sequence[Mapping[str, Array]]], list[dict[str, Array]]]
"""Runs a model as it is written, on each of several feeds."""
_SIZES = ((2, 5, 3, 7, 4, 6), (1, 1, 4, 3, 2, 5))
"""What symbolic dimensions become, in the order in which they are met: two trials. The second
one is a step of decoding: one row, one token."""
_LONGEST = 320
"""The largest number that may be a length beyond which a region is tried: a check stays cheap."""
_COUNTING = frozenset(
    "CumSum Equal Gather Greater GreaterOrEqual Less LessOrEqual Mod Range Slice Trilu".split()
)
"""Ops by which what a region does may depend on how long its inputs are."""
_LISTED = 64
_SCALES = (1.5, 0.02)
"""Standard deviations of float inputs: in the second trial epsilons matter."""
_COARSE = {ir.DataType.FLOAT16: 1e-2, ir.DataType.BFLOAT16: 6e-2}
"""The tolerance of results that are rounded to half precision along the way."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What running both found: `error` relative to the largest element; `why` it is no proof."""

    error: float
    why: str = ""


class FusionCheck:
    """Checks candidates; those whose regions are one and the same are run once."""

    def __init__(self, model: ir.Model, evaluate: Evaluate) -> None:
        self.model, self.evaluate = model, evaluate
        self._known: dict[Hashable, Trial] = {}

    def __call__(self, candidate: Candidate, new: Sequence[ir.Value]) -> Trial:
        """Compare what `new` computes with the old outputs of `candidate`."""
        if candidate.proof is None:
            return self._checked(candidate, new)
        key = (candidate.fusion, candidate.proof)
        if key not in self._known:
            self._known[key] = self._checked(candidate, new)
        return self._known[key]

    def _checked(self, candidate: Candidate, new: Sequence[ir.Value]) -> Trial:
        try:
            cut = Cut(self.model, candidate.inputs)
            data = cut.model([*candidate.outputs, *new])
            key = hashlib.sha256(data + repr(cut.types(candidate)).encode()).digest()
            if key not in self._known:
                self._known[key] = self._run(candidate, cut, data)
            return self._known[key]
        except (InputError, RuntimeError, _CannotCheckError) as error:
            return Trial(np.inf, str(error))

    def _run(self, candidate: Candidate, cut: Cut, data: bytes) -> Trial:
        trials = candidate.trials or ({}, {})
        feeds = [
            cut.feeds(candidate, _SIZES[index % 2], _SCALES[index % 2], known)
            for index, known in enumerate(trials)
        ]
        feeds += self._far(candidate, cut)
        worst = 0.0
        for made in self.evaluate(data, feeds):
            found = list(made.values())
            half = len(candidate.outputs)
            for old, new in zip(found[:half], found[half:], strict=True):
                if old.shape != new.shape or old.dtype != new.dtype:
                    was, now = _spelled(old), _spelled(new)
                    return Trial(np.inf, f"the region gives {was}, the new op {now}")
                worst = max(worst, _difference(old, new))
        limit = max([candidate.tolerance, *(_COARSE.get(d, 0.0) for d in cut.computed)])
        why = "" if worst <= limit else f"results differ by {worst:.2g}, wanted {limit:.0e} at most"
        return Trial(worst, why)

    def _far(self, candidate: Candidate, cut: Cut) -> list[dict[str, Array]]:
        """Inputs beyond the lengths at which the old region may change, where it takes them."""
        if not cut.counts:
            return []
        count = len(_SIZES[0])
        beyond = min([cut.longest + 2, *(rows - count for rows in cut.looked_up)])
        if beyond < count:
            return []
        sizes = (1, *range(beyond, beyond + count))
        feed = cut.feeds(candidate, sizes, _SCALES[0])
        old = Cut(self.model, candidate.inputs)
        data = old.model(candidate.outputs)
        read = {str(old.values[value].name) for value in old.inputs}
        try:
            self.evaluate(data, [{name: feed[name] for name in feed if name in read}])
        except (InputError, RuntimeError):  # a table has no more rows: there is no answer
            return []
        return [feed]


class _CannotCheckError(Exception):
    """The region cannot be run on its own; the message says why."""


class Cut:
    """A copy of all that lies between some inputs and some outputs, under names of its own."""

    def __init__(self, model: ir.Model, inputs: Iterable[ir.Value]) -> None:
        self.source = model
        self.values: dict[ir.Value, ir.Value] = {}
        self.inputs: list[ir.Value] = []
        self.constants: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        for value in inputs:
            self._input(value)

    def model(self, outputs: Sequence[ir.Value]) -> bytes:
        """The model that computes `outputs`, each under a name of its own, serialized."""
        results = []
        for index, value in enumerate(outputs):
            self._visit(value)
            copied = ir.Node("", "Identity", [self.values[value]], name=f"out{index}")
            result = copied.outputs[0]
            result.name = f"output{index}"
            if value.dtype is not None:
                result.type = ir.TensorType(value.dtype)
            self.nodes.append(copied)
            results.append(result)
        imports = self.source.opset_imports
        domains = {"", *(node.domain for node in self.nodes)}
        graph = ir.Graph(
            [self.values[value] for value in self.inputs],
            results,
            nodes=self.nodes,
            initializers=self.constants,
            opset_imports={domain: imports.get(domain, 1) for domain in sorted(domains)},
            name="region",
        )
        functions = [f for f in self.source.functions.values() if f.domain in domains]
        model = ir.Model(graph, ir_version=self.source.ir_version, functions=functions)
        data: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
        return data

    def types(self, candidate: Candidate) -> list[tuple[Any, ...]]:
        """Type and shape of each input, which with the model's bytes say what is checked."""
        return [(value.dtype, _shape(value, candidate)) for value in self.inputs]

    @property
    def computed(self) -> set[ir.DataType]:
        """The types of what its nodes give, results and all on the way to them."""
        made = (value for value in self.values if value not in self.inputs and value.producer())
        return {value.dtype for value in made if value.dtype is not None}

    @property
    def counts(self) -> bool:
        """Whether something in it may change at a certain length."""
        return any(node.op_type in _COUNTING for node in self.nodes)

    @property
    def looked_up(self) -> list[int]:
        """How many rows the constants have that it looks rows up in: no text has more tokens."""
        tables = [node.inputs[0] for node in self.nodes if node.op_type == "Gather"]
        tensors = [value.const_value for value in tables if value is not None]
        return [int(t.shape.numpy()[0]) for t in tensors if t is not None and t.size > _LISTED]

    @property
    def longest(self) -> int:
        """The largest number in it that may be a length and can be tried; rows of tables too."""
        found = {0}
        for value in self.constants:
            tensor = value.const_value
            assert tensor is not None
            found.update(int(size) for size in tensor.shape.numpy())
            if tensor.dtype.is_integer() and tensor.size <= _LISTED:
                found.update(int(number) for number in tensor.numpy().reshape(-1))
        return max(number for number in found if number <= _LONGEST)

    def feeds(
        self,
        candidate: Candidate,
        sizes: Sequence[int],
        scale: float,
        known: Mapping[str, int] | None = None,
    ) -> dict[str, Array]:
        """Random inputs; symbols become sizes in the order in which they are met, or as known."""
        symbols = _Symbols(candidate.dims, sizes, known or {})
        generator = np.random.default_rng(len(self.nodes))
        found = {}
        for value in self.inputs:
            shape = tuple(symbols.size(dim) for dim in _shape(value, candidate))
            make = candidate.feeds.get(value.name or "")
            name = str(self.values[value].name)
            assert value.dtype is not None
            dtype = value.dtype.numpy()
            if make is not None:
                found[name] = make(generator, shape).astype(dtype)
            elif value.dtype.is_floating_point():
                found[name] = (scale * generator.standard_normal(shape)).astype(dtype)
            else:
                found[name] = generator.integers(0, 2, shape).astype(dtype)
        return found

    def _input(self, value: ir.Value) -> None:
        if value in self.values:
            return
        if value.dtype is None:
            raise _CannotCheckError(f"the type of {value.name} is not known")
        copy = ir.Value(name=f"input{len(self.inputs)}", type=ir.TensorType(value.dtype))
        self.values[value] = copy
        self.inputs.append(value)

    def _visit(self, result: ir.Value) -> None:
        """Copy what `result` needs, its producers first."""
        pending = [result]
        while pending:
            value = pending[-1]
            node = value.producer()
            if value in self.values:
                pending.pop()
            elif value.const_value is not None and value.is_initializer():
                self._constant(value)
            elif node is None:
                self._input(value)
            else:
                needed = [v for v in node.inputs if v is not None and v not in self.values]
                pending += needed
                if not needed:
                    self._node(node)

    def _constant(self, value: ir.Value) -> None:
        tensor = value.const_value
        assert tensor is not None
        name = f"constant{len(self.constants)}"
        array = np.array(tensor.numpy())
        release(tensor)
        copy = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=ir.Tensor(array, dtype=tensor.dtype, name=name),
        )
        self.values[value] = copy
        self.constants.append(copy)

    def _node(self, node: ir.Node) -> None:
        if bodies(node):
            raise _CannotCheckError(f"node {node.name} ({node.op_type}) holds a graph of its own")
        inputs = [None if value is None else self.values[value] for value in node.inputs]
        attributes = list(node.attributes.values())
        count = len(self.nodes)
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes,
            num_outputs=len(node.outputs), name=f"node{count}",
        )  # fmt: skip
        for index, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
            new.name = f"value{count}_{index}" if old.name else ""
            self.values[old] = new
        self.nodes.append(copy)


class _Symbols:
    """Sizes for symbolic dimensions, one for each symbol; sums and products of them add up."""

    def __init__(
        self, dims: Mapping[str, str], sizes: Sequence[int], known: Mapping[str, int]
    ) -> None:
        self.dims, self.sizes = dims, sizes
        self.known = dict(known)

    def size(self, dim: int | str) -> int:
        """The size of one dimension."""
        if isinstance(dim, int):
            return dim
        text = self.dims.get(dim, dim)
        try:
            return self._value(ast.parse(text, mode="eval").body, dim)
        except SyntaxError:
            return self._symbol(text)

    def _value(self, tree: ast.expr, text: str) -> int:
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
            return tree.value
        if isinstance(tree, ast.Name):
            inner = self.dims.get(tree.id)
            return self.size(tree.id) if inner not in (None, tree.id) else self._symbol(tree.id)
        if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
            left, right = self._value(tree.left, text), self._value(tree.right, text)
            return int(_ARITHMETIC[type(tree.op)](left, right))
        return self._symbol(text)

    def _symbol(self, name: str) -> int:
        if name not in self.known:
            self.known[name] = self.sizes[len(self.known) % len(self.sizes)]
        return self.known[name]


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _shape(value: ir.Value, candidate: Candidate) -> list[int | str]:
    """A value's dimensions; an unnamed one is a symbol for its place, as in `?3.1`."""
    given = candidate.shapes.get(value.name or "")
    if given is not None:
        return list(given)
    if value.shape is None:
        raise _CannotCheckError(f"the shape of {value.name} is not known")
    rank = len(value.shape)
    found: list[int | str] = []
    for axis, dim in enumerate(value.shape):
        symbol = dim if isinstance(dim, int) else dim.value
        found.append(f"?{rank}.{axis}" if symbol is None else symbol)
    return found


def _difference(old: Array, new: Array) -> float:
    """The largest difference, relative to the largest element of `old`; NaN must be met by NaN."""
    if not old.size:
        return 0.0
    if not np.issubdtype(old.dtype, np.floating) and old.dtype.name != "bfloat16":
        return 0.0 if np.array_equal(old, new) else np.inf
    before, after = old.astype(np.float64), new.astype(np.float64)
    if not np.array_equal(np.isfinite(before), np.isfinite(after)):
        return np.inf
    finite = np.isfinite(before)
    if not finite.any():
        return 0.0
    scale = float(np.abs(before[finite]).max()) or 1.0
    return float(np.abs(before - after)[finite].max()) / scale


def _spelled(array: Array) -> str:
    return f"{array.dtype.name} {list(array.shape)}"


def evaluate_constants(
    model: ir.Model, values: Sequence[ir.Value], evaluate: Evaluate
) -> list[Array]:
    """What values that depend on constants alone are."""
    cut = Cut(model, ())
    data = cut.model(values)
    assert not cut.inputs, "constants depend on no input"
    return list(evaluate(data, [{}])[0].values())
