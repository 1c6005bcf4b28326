"""The float constants of a graph that a checkpoint has too: norms, biases, layers left in float."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from qgraph.constants import FLOATS, open_array
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.scopes import scopes
from qgraph.selectors import ALIASES

if TYPE_CHECKING:
    from qgraph.checkpoints.base import FloatTensor

AT_ONCE = 1_000_000
"""Elements compared, or held in memory, at once; larger constants are read when written."""
_PARAMETERS = (".weight", ".bias")


@dataclasses.dataclass
class Taken:
    """What became of the float constants of a graph.

    same, replaced, missing: their names; `missing` look like parameters, and the checkpoint has
    none of their name.
    """

    same: list[str] = dataclasses.field(default_factory=list)
    replaced: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)

    def notes(self, shown: int = 3) -> list[str]:
        """What a user should know, a sentence each."""
        found = []
        if self.replaced:
            found.append(
                f"{len(self.replaced)} float constants have the checkpoint's values in place of "
                f"the graph's: {_some(self.replaced, shown)}"
            )
        if self.missing:
            found.append(
                f"{len(self.missing)} float constants are not in the checkpoint and stay as the "
                f"graph has them: {_some(self.missing, shown)}"
            )
        return found


def _some(names: list[str], shown: int) -> str:
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")


def take_floats(
    model: ir.Model,
    floats: Mapping[str, FloatTensor],
    bound: Mapping[int, tuple[str, bool]],
    quantized: Iterable[int],
) -> Taken:
    """Give each float constant of `model` the values that the checkpoint has under its name.

    Args:
        model: changed in place.
        floats: the checkpoint's, by name.
        bound: constants that are known under another name, by `id` of their value: the name, and
            whether the constant is the parameter turned around.
        quantized: `id`s of the constants that quantized weights replace.

    Raises:
        InputError: a constant and its parameter have different shapes, or the parameter is no
            float; names both.
    """
    found, done = Taken(), set(quantized)
    for scope in scopes(model.graph):
        for value in scope.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype not in FLOATS or id(value) in done:
                continue
            names = (value.name or "", *value.meta.get(ALIASES, ()))
            name, turned = bound.get(id(value), ("", False))
            name = name or next((each for each in names if each in floats), "")
            if not name:
                if any(each.endswith(_PARAMETERS) for each in names):
                    found.missing.append(names[0])
                continue
            _take(value, floats[name], turned, found)
    return found


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
