"""Weights of bitsandbytes checkpoints: what their tensors say, checked, and how rows are read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

import numpy as np

from qgraph.checkpoints.base import Entry
from qgraph.checkpoints.tensors import (
    Stored,
    StoredTensor,
    bias_of,
    called,
    finite,
    part,
    wanted,
)
from qgraph.errors import InputError
from qgraph.formats.base import GROUPS, Array, QuantizedWeight, parse
from qgraph.formats.bitsandbytes import NESTED, Bnb4, scale_levels

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
INT8_TOP = np.float32(127)
_LARGEST_STATE = 1 << 16


@dataclasses.dataclass(frozen=True)
class State:
    """What `weight.quant_state` says, checked.

    block: elements that share a scale.
    nested: scales that share a scale, 0 where they are not quantized; mean: what they lack then.
    """

    kind: str
    n: int
    k: int
    block: int
    nested: int = 0
    mean: float = 0.0

    @property
    def scales(self) -> int:
        """How many there are."""
        return -(-self.n * self.k // self.block)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Bnb4Entry(Entry):
    """One linear of 4 bits; `stored` by the names behind the module's.

    repeats: groups of the format that have one scale of the file; 1 where blocks divide rows.
    """

    state: State
    repeats: int

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        nb = self.k // self.format.group
        which = np.arange(start * nb, stop * nb) // self.repeats
        first, last = int(which[0]), int(which[-1]) + 1
        which -= first
        parts = {"codes": self._bytes(start, stop)}
        if self.format == _format(self.state.kind, self.format.group, double=True):
            nested = self._nested(first, last)[which][::NESTED]
            mean = np.full_like(nested, self.state.mean)
            codes = self.stored["weight.absmax"].rows(first, last)[which]
            parts |= {"scales": codes, "nested": np.stack([nested, mean], axis=1)}
        else:
            parts["scales"] = self._scales(first, last)[which]
        fmt = self.format
        return fmt.unpack(parts, stop - start, self.k, fmt.default_layout)  # type: ignore[arg-type]

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: level·scale, by the file's own levels."""
        packed = self._bytes(start, stop)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        size, first = self.state.block, start * self.k // self.state.block
        scales = self._scales(first, -(-stop * self.k // size))
        at = start * self.k - first * size
        spread = np.repeat(scales, size)[at:][: len(codes)]
        levels = self.stored["weight.quant_map"].array()[codes]
        found: Array = (levels * spread).reshape(stop - start, self.k)
        return found

    def _bytes(self, start: int, stop: int) -> Array:
        """Two codes in each, u8 `[n·K/2]`."""
        return self.stored["weight"].rows(start * self.k // 2, stop * self.k // 2)

    def _scales(self, start: int, stop: int) -> Array:
        """Scales `start:stop` of the file, float32."""
        stored = self.stored["weight.absmax"]
        found = stored.rows(start, stop)
        if not self.state.nested:
            return finite(stored, found.astype(np.float32, copy=False), start)
        levels = self.stored["weight.nested_quant_map"].array()
        return levels[found] * self._nested(start, stop) + np.float32(self.state.mean)

    def _nested(self, start: int, stop: int) -> Array:
        """The scale of each of scales `start:stop`, float32."""
        stored, size = self.stored["weight.nested_absmax"], self.state.nested
        first = start // size
        few = finite(stored, stored.rows(first, -(-stop // size)), first)
        return np.repeat(few, size)[start - first * size :][: stop - start]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Int8Entry(Entry):
    """One linear of LLM.int8; `stored` has "weight" and "SCB"."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        codes = self.stored["weight"].rows(start, stop)
        return QuantizedWeight(codes, self._scales(start, stop))

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: code·(SCB/127)."""
        codes = self.stored["weight"].rows(start, stop).astype(np.float32)
        found: Array = codes * self._scales(start, stop)
        return found

    def _scales(self, start: int, stop: int) -> Array:
        stored = self.stored["SCB"]
        return finite(stored, stored.rows(start, stop), start)[:, None] / INT8_TOP


def _format(kind: str, group: int, *, double: bool) -> Bnb4:
    fmt = parse(kind, group=group)
    assert isinstance(fmt, Bnb4)
    return dataclasses.replace(fmt, double=double)


def four_bits(stored: Stored, module: str, parts: Mapping[str, StoredTensor]) -> Bnb4Entry:
    """A linear of 4 bits.

    Raises:
        InputError: a tensor is missing, or does not fit the state; levels that are not ours.
    """
    weight = part(module, parts, "weight")
    state = _state(module, parts)
    group = min(math.gcd(state.k, state.block), max(GROUPS))
    if group not in GROUPS:
        raise InputError(
            f"{weight.path}: {weight.name} has blocks of {state.block} across rows of {state.k}, "
            "which no group of 16 or more divides: it has no format here"
        )
    if weight.nbytes * 2 != state.n * state.k:
        raise InputError(
            f"{weight.path}: {weight.name} has {weight.nbytes} bytes, and its state says "
            f"[{state.n}, {state.k}], which takes {state.n * state.k // 2}"
        )
    repeats = state.block // group
    absmax = part(module, parts, "weight.absmax")
    wanted(absmax, [np.uint8 if state.nested else np.float32], (state.scales,))
    _check_levels(part(module, parts, "weight.quant_map"), _format(state.kind, group, double=False))
    return Bnb4Entry(
        name=called(module, "weight"),
        n=state.n,
        k=state.k,
        format=_format(state.kind, group, double=_stays_double(module, parts, state, repeats)),
        bias=bias_of(module, stored.tensors),
        stored={
            **parts,
            "weight": dataclasses.replace(weight, dtype=np.dtype(np.uint8), shape=(weight.nbytes,)),
        },
        state=state,
        repeats=repeats,
    )


def _stays_double(
    module: str, parts: Mapping[str, StoredTensor], state: State, repeats: int
) -> bool:
    """Whether scales are quantized as our format has it; others become floats, exactly."""
    if not state.nested:
        return False
    nested = part(module, parts, "weight.nested_absmax")
    wanted(nested, [np.float32], (-(-state.scales // state.nested),))
    levels = wanted(part(module, parts, "weight.nested_quant_map"), [np.float32], (256,))
    same = np.array_equal(finite(levels, levels.array()), scale_levels())
    return same and state.nested * repeats % NESTED == 0


def _check_levels(stored: StoredTensor, fmt: Bnb4) -> None:
    """Refuse levels that are not the format's."""
    found = wanted(stored, [np.float32], (16,)).array()
    other = np.flatnonzero(found != fmt.levels)
    if len(other):
        at = int(other[0])
        raise InputError(
            f"{stored.path}: {stored.name} has {found[at]} as level {at}, and {fmt.name} has "
            f"{fmt.levels[at]}: wanted the levels of bitsandbytes"
        )


def _state(module: str, parts: Mapping[str, StoredTensor]) -> State:
    """The state of a weight of 4 bits.

    Raises:
        InputError: there is none, or what it says is no such thing.
    """
    kind = next((kind for kind in KINDS if STATE + kind in parts), KINDS[0])
    stored = part(module, parts, STATE + kind)
    if stored.nbytes > _LARGEST_STATE:
        raise InputError(f"{stored.path}: {stored.name} has {stored.nbytes} bytes, wanted JSON")
    try:
        said = json.loads(stored.array().tobytes())
        (n, k), block = said["shape"], said["blocksize"]
        nested = said["nested_blocksize"] if "weight.nested_absmax" in parts else 0
        mean = float(said["nested_offset"]) if nested else 0.0
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{stored.path}: {stored.name} is no state of a weight ({error!r}): wanted JSON with "
            "shape [N, K], blocksize and, for quantized scales, nested_blocksize and nested_offset"
        ) from None
    sizes = (n, k, block, nested or 1)
    if not all(type(size) is int and size > 0 for size in sizes) or block not in BLOCKS:
        raise InputError(
            f"{stored.path}: {stored.name} says shape {[n, k]}, blocksize {block} and "
            f"nested_blocksize {nested}: wanted sizes above 0 and blocks of "
            f"{', '.join(map(str, BLOCKS))}"
        )
    if not math.isfinite(mean):
        raise InputError(f"{stored.path}: {stored.name} says nested_offset {mean}")
    return State(kind, n, k, block, nested, mean)


def int8(stored: Stored, module: str, parts: Mapping[str, StoredTensor]) -> Int8Entry:
    """A linear of LLM.int8.

    Raises:
        InputError: a tensor is missing, of another shape, or tiled.
    """
    weight, scb = part(module, parts, "weight"), part(module, parts, "SCB")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError(
            f"{weight.path}: {weight.name} is {list(weight.shape)}, wanted a matrix with elements"
        )
    n, k = weight.shape
    wanted(weight, [np.int8], (n, k))
    wanted(scb, [np.float32], (n,))
    form = parts.get("weight_format")
    if form is not None and (form.nbytes != form.dtype.itemsize or form.array().any()):
        raise InputError(
            f"{form.path}: {form.name} says that the weight is tiled for one kind of GPU: wanted "
            "0, row by row, as current versions of bitsandbytes save it"
        )
    return Int8Entry(
        name=called(module, "weight"),
        n=n,
        k=k,
        format=parse("int8-row"),
        bias=bias_of(module, stored.tensors),
        stored={"weight": weight, "SCB": scb},
    )
