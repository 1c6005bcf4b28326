"""The float constants of a graph that a checkpoint has too: norms, biases, layers left in float."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.binding import end_alike, some
from qgraph.constants import FLOATS, open_array
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.scopes import scopes
from qgraph.selectors import ALIASES
from qgraph.wording import counted, plural

if TYPE_CHECKING:
    from qgraph.checkpoints.base import FloatTensor

AT_ONCE = 1_000_000
"""Elements compared, or held in memory, at once; larger constants are read when written."""
_PARAMETERS = (".weight", ".bias")


@dataclasses.dataclass
class Taken:
    """What became of the float constants of a graph.

    same, replaced, missing: their names; `missing` look like parameters, and the checkpoint has
    none of their name. suggested: those that were found by the end of their names.
    left: every constant that keeps the graph's values.
    unused: names of the checkpoint's tensors that none of them has.
    """

    same: list[str] = dataclasses.field(default_factory=list)
    replaced: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    suggested: list[str] = dataclasses.field(default_factory=list)
    left: list[ir.Value] = dataclasses.field(default_factory=list)
    unused: list[str] = dataclasses.field(default_factory=list)

    def notes(self, shown: int = 3) -> list[str]:
        """What a user should know, a sentence each."""
        found = []
        if self.replaced:
            found.append(
                f"{_so_many(self.replaced)} {plural(len(self.replaced), 'has', 'have')} the "
                f"checkpoint's values in place of the graph's: {some(self.replaced, shown)}"
            )
        if self.missing:
            found.append(
                f"{_so_many(self.missing)} {plural(len(self.missing), 'is', 'are')} not in the "
                f"checkpoint and {plural(len(self.missing), 'stays', 'stay')} as the graph has "
                f"{plural(len(self.missing), 'it', 'them')}: {some(self.missing, shown)}"
            )
        if self.unused:
            found.append(
                f"{counted(len(self.unused), 'float tensor')} of the checkpoint "
                f"{plural(len(self.unused), 'is', 'are')} not in the graph, which computes without "
                f"{plural(len(self.unused), 'it', 'them')} or with the graph's own: "
                f"{some(self.unused, shown)}"
            )
        return [*found, *self.suggestions(shown)]

    def suggestions(self, shown: int = 3) -> list[str]:
        """What was found by likeness."""
        if not self.suggested:
            return []
        return [
            f"{_so_many(self.suggested)} "
            f"{plural(len(self.suggested), 'has no tensor of its', 'have no tensor of their')} "
            f"name, and one was found by the end of its name: {some(self.suggested, shown)}"
        ]


def _so_many(found: Sized) -> str:
    return counted(len(found), "float constant")


class BoundFloats(NamedTuple):
    """What a constant is to hold.

    name: of the parameter. turned: whether the constant is that turned around.
    """

    name: str
    tensor: FloatTensor
    turned: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class SomeRows:
    """Rows `first:first + n` of a matrix of floats, as a tensor of its own."""

    whole: FloatTensor
    first: int
    n: int

    @property
    def name(self) -> str:
        """Whose rows, and which."""
        return f"{self.whole.name}[{self.first}:{self.first + self.n}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(n, K)`."""
        return (self.n, *self.whole.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the whole."""
        return self.whole.dtype

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of these."""
        return self.whole.rows(self.first + start, self.first + stop)


def take_floats(
    model: ir.Model,
    floats: Mapping[str, FloatTensor],
    bound: Mapping[int, BoundFloats],
    quantized: Iterable[int],
) -> Taken:
    """Give each float constant of `model` the values that the checkpoint has under its name.

    Args:
        model: changed in place.
        floats: the checkpoint's, by name.
        bound: what constants hold that sites read, by `id` of their value.
        quantized: `id`s of the constants that quantized weights replace.

    Raises:
        InputError: a constant and its parameter have different shapes, or the parameter is no
            float; names both.
    """
    found, done = Taken(), set(quantized)
    used = {given.name for given in bound.values()}
    for value in _constants(model):
        if id(value) in done:
            continue
        names = _names(value)
        used |= set(names)
        known = [BoundFloats(each, floats[each]) for each in names if each in floats]
        given = bound.get(id(value)) or next(iter(known), None)
        if given is None:
            found.left.append(value)
        else:
            _take(value, given.tensor, given.turned, found)
    free = {name: tensor for name, tensor in floats.items() if name not in used}
    for value, name in _by_end(found.left, free):
        found.suggested.append(f"{value.name} → {name}")
        found.left.remove(value)
        _take(value, free.pop(name), False, found)
    named = [value for value in found.left if any(n.endswith(_PARAMETERS) for n in _names(value))]
    found.missing += [value.name or "" for value in named]
    found.unused += [name for name, tensor in free.items() if tensor.dtype.kind not in "iub"]
    return found


def _constants(model: ir.Model) -> list[ir.Value]:
    """Every float constant, of all scopes."""
    values = [value for scope in scopes(model.graph) for value in scope.initializers.values()]
    return [v for v in values if v.const_value is not None and v.const_value.dtype in FLOATS]


def _names(value: ir.Value) -> tuple[str, ...]:
    return (value.name or "", *value.meta.get(ALIASES, ()))


def _by_end(values: list[ir.Value], free: Mapping[str, FloatTensor]) -> list[tuple[ir.Value, str]]:
    """Parameters, and tensors of that shape whose names end alike, where that leaves no doubt."""
    pairs = []
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        shape = tuple(tensor.shape.numpy())
        own = [name for name in _names(value) if name.endswith(_PARAMETERS)]
        pairs += [
            (value, name)
            for name, given in free.items()
            if given.shape == shape and any(_ends_alike(name, each) for each in own)
        ]
    times = Counter([id(value) for value, _ in pairs]), Counter([name for _, name in pairs])
    return [pair for pair in pairs if times[0][id(pair[0])] == times[1][pair[1]] == 1]


def _ends_alike(one: str, other: str) -> bool:
    """Whether two names of one kind of parameter end alike."""
    kind = one.rpartition(".")[2] == other.rpartition(".")[2]
    return kind and end_alike(one, other)


def _take(value: ir.Value, given: FloatTensor, turned: bool, found: Taken) -> None:
    tensor = value.const_value
    assert tensor is not None
    dims = tuple(int(d) for d in tensor.shape.numpy())
    shape = given.shape[::-1] if turned else given.shape
    if shape != dims:
        raise InputError(
            f"the graph's {value.name} is {list(dims)}, and the checkpoint's {given.name} "
            f"{list(shape)}: the two are not of one model"
        )
    if given.dtype.kind in "iub":
        raise InputError(f"the checkpoint's {given.name} is {given.dtype.name}: wanted floats")
    if holds(tensor, given, turned):
        found.same.append(value.name or "")
        return
    new: ir.TensorProtocol = ir.LazyTensor(
        lambda: ir.tensor(_values(given, turned, tensor.dtype), name=value.name),
        dtype=tensor.dtype,
        shape=ir.Shape(dims),
        name=value.name,
    )
    value.const_value = new if tensor.size > AT_ONCE else ir.tensor(new.numpy(), name=value.name)
    found.replaced.append(value.name or "")


def _values(given: FloatTensor, turned: bool, dtype: ir.DataType) -> Array:
    """All of a parameter in the graph's type and orientation."""
    values = given.rows(0, given.shape[0] if given.shape else 1)
    values = np.ascontiguousarray(values.T) if turned else values
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype.numpy(), copy=False)
    if (
        np.isfinite(values.astype(np.float32)).all()
        and not np.isfinite(narrow.astype(np.float32)).all()
    ):
        raise InputError(
            f"the checkpoint's {given.name} holds values that {dtype.name.lower()}, the type of "
            "the graph's constant, does not: import onto the model in float32"
        )
    return narrow


def holds(tensor: ir.TensorProtocol, given: FloatTensor, turned: bool = False) -> bool:
    """Whether a constant holds a parameter's values (turned around), block of rows by block."""
    own = open_array(tensor)
    if turned:
        own = own.T
    if not given.shape:
        return bool(np.array_equal(own, given.rows(0, 1).astype(own.dtype)))
    size = given.shape[0]
    step = max(1, AT_ONCE // max(1, int(np.prod(given.shape[1:], dtype=np.int64))))
    blocks = ((start, min(start + step, size)) for start in range(0, size, step))
    with np.errstate(over="ignore"):
        return all(
            np.array_equal(own[start:stop], given.rows(start, stop).astype(own.dtype))
            for start, stop in blocks
        )
