"""The weights of compressed-tensors: what is stored of each, and how it is written.

Integers, `[N, K]` with `weight_scale` `[N, nb]`, `[N, 1]` or one number: either `weight` int8, or
`weight_packed` int32, codes + 2^(bits−1) packed along K, with `weight_shape`; zero points likewise,
packed along N. W = (code − zero)·scale. Small floats: `weight_packed` u8, two E2M1 a byte, low half
first, with `weight_scale` E4M3 for 16 columns and `weight_global_scale`, by which it is divided
(NVFP4), or with `weight_scale` u8, 2^(byte − 127) for 32 columns (MXFP4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from qgraph.checkpoints import integers
from qgraph.checkpoints.base import Entry
from qgraph.checkpoints.integers import GroupedEntry
from qgraph.checkpoints.modelopt import Nvfp4Entry
from qgraph.checkpoints.mxfp4 import Mxfp4Entry
from qgraph.checkpoints.scales import SCALE_TYPES, checked, scale_dtype
from qgraph.checkpoints.tensors import (
    Stored,
    StoredTensor,
    bias_of,
    called,
    finite,
    part,
    wanted,
)
from qgraph.checkpoints.words import WORD_BITS, unpack_words, words_of
from qgraph.errors import InputError
from qgraph.formats.base import Array, Part, QuantizedWeight, parse
from qgraph.formats.mx import BLOCK, MXFP4, MXFP8
from qgraph.formats.nvfp4 import NVFP4
from qgraph.formats.packing import padded

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
RECIPROCAL = (
    "the tensor's scale is stored as its reciprocal: the last bit of a weight may differ from a "
    "division's",
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IntegerEntry(GroupedEntry):
    """Integer codes, packed ("weight_packed") or a byte each ("weight")."""

    def _codes(self, start: int, stop: int) -> Array:
        """uint8 `[n, K]`, 2^(bits−1) added, columns as the parameter has them."""
        if "weight_packed" in self.stored:
            words = self.stored["weight_packed"].rows(start, stop)
            return unpack_words(words, self.grid.bits, self.k)
        return self.stored["weight"].rows(start, stop).view(np.uint8) + np.uint8(self.grid.middle)

    def _scales(self, start: int, stop: int) -> Array:
        """`[n, nb]`."""
        tensor = self.stored["weight_scale"]
        return _of_rows(tensor, self.n, start, stop, lambda few, row: checked(tensor, few, row))

    def _zeros(self, start: int, stop: int) -> Array:
        """uint8 `[n, nb]`, 2^(bits−1) added."""
        tensor, middle = self.stored.get("weight_zero_point"), np.uint8(self.grid.middle)
        if tensor is None:
            nb = int(self.group_of.max()) + 1
            return np.full((stop - start, nb), middle, np.uint8)
        if tensor.dtype == np.int32:
            return unpack_words(tensor.array().T, self.grid.bits, self.n).T[start:stop]
        return _of_rows(tensor, self.n, start, stop, lambda few, _: few.view(np.uint8) + middle)


def _of_rows(tensor: StoredTensor, n: int, start: int, stop: int, read: Any) -> Array:
    """Rows of a tensor `[N, nb]`, `[N]`, or of one number for all, `[n, nb]`."""
    if tensor.shape[:1] == (n,):
        return np.asarray(read(tensor.rows(start, stop), start)).reshape(stop - start, -1)
    found: Array = read(tensor.array(), 0)
    return np.repeat(found.reshape(1, 1), stop - start, axis=0)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GlobalNvfp4Entry(Nvfp4Entry):
    """NVFP4 whose scale of the tensor is stored as its reciprocal, 448·6/amax."""

    def _read(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        codes, scales, whole = super()._read(start, stop)
        if not whole[0]:
            name = self.stored["weight_scale_2"].name
            raise InputError(f"{name} is 0, by which scales are divided: wanted 448·6/amax")
        return codes, scales, np.float32(1) / whole


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mxfp8Entry(Entry):
    """E4M3 with a power of two for 32 columns; `stored` has "weight" and "weight_scale"."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        weight = self.stored["weight"]
        codes = finite(weight, weight.rows(start, stop), start).view(np.uint8)
        scales = self._bytes(start, stop)
        whole = padded(codes, scales.shape[1] * BLOCK)  # the last block of a row may be shorter
        parts: dict[Part, Array] = {"codes": whole, "scales": scales}
        return self.format.unpack(parts, stop - start, self.k, self.format.default_layout)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: e4m3·2^(byte − 127)."""
        numbers = self.stored["weight"].rows(start, stop).astype(np.float32)
        exponents = np.repeat(self._bytes(start, stop).astype(np.int32) - 127, BLOCK, axis=1)
        return np.ldexp(numbers, exponents[:, : self.k])

    def _bytes(self, start: int, stop: int) -> Array:
        """u8 `[n, K/32]`; 255 is no number."""
        tensor = self.stored["weight_scale"]
        found = tensor.rows(start, stop)
        finite(tensor, found.view(ml_dtypes.float8_e8m0fnu), start)
        return found


def read_weight(
    stored: Stored, module: str, parts: Mapping[str, StoredTensor], said: Mapping[str, Any]
) -> Entry | None:
    """The quantized weight of a module, or None where it is in float or in fp8 with float scales.

    said: the arguments of the weights in the module's configuration, as far as known.
    """
    if "weight_packed" in parts or "weight" not in parts:
        weight, scale = part(module, parts, "weight_packed"), part(module, parts, "weight_scale")
    elif "weight_scale" in parts:
        weight, scale = parts["weight"], parts["weight_scale"]
    else:
        return None
    common: dict[str, Any] = {
        "name": called(module, "weight"),
        "bias": bias_of(module, stored.tensors),
    }
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError(
            f"{weight.path}: {weight.name} is {list(weight.shape)}, wanted a matrix with elements"
        )
    n, width = weight.shape
    block = NVFP4.group if scale.dtype == E4M3 else BLOCK
    if weight.dtype == np.uint8 and 2 * width % block:
        raise InputError(
            f"{weight.path}: {weight.name} is uint8 {[n, width]}, wanted [N, K/2] with K a "
            f"multiple of {block}"
        )
    if weight.dtype == np.uint8 and scale.dtype == E4M3:
        return _nvfp4(module, parts, n, 2 * width, common)
    if weight.dtype == np.uint8:
        wanted(scale, [np.uint8], (n, 2 * width // BLOCK))
        blocks = dataclasses.replace(weight, shape=(n, width * 2 // BLOCK, BLOCK // 2))
        tensors = {"blocks": blocks, "scales": scale}
        return Mxfp4Entry(n=n, k=2 * width, format=MXFP4, stored=tensors, **common)
    if weight.dtype == E4M3 and scale.dtype == np.uint8:
        wanted(scale, [np.uint8], (n, -(-width // BLOCK)))
        tensors = {"weight": weight, "weight_scale": scale}
        return Mxfp8Entry(n=n, k=width, format=MXFP8, stored=tensors, **common)
    if weight.dtype in (np.int8, np.int32):
        return _integers(module, parts, weight, said, common)
    return None


def _nvfp4(
    module: str, parts: Mapping[str, StoredTensor], n: int, k: int, common: Mapping[str, Any]
) -> Entry:
    whole = part(module, parts, "weight_global_scale")
    wanted(parts["weight_scale"], [E4M3], (n, k // NVFP4.group))
    wanted(whole, [np.float32], whole.shape if whole.shape in ((), (1,)) else (1,))
    tensors = {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": whole,
    }
    return GlobalNvfp4Entry(n=n, k=k, format=NVFP4, notes=RECIPROCAL, stored=tensors, **common)


def _integers(
    module: str,
    parts: Mapping[str, StoredTensor],
    weight: StoredTensor,
    said: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Entry:
    """Integer codes: sizes, groups and zero points from the tensors."""
    n, k, bits = _sizes(module, parts, weight, said)
    scale, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    nb = scale.shape[1] if len(scale.shape) == 2 else 1
    wanted(scale, SCALE_TYPES, scale.shape if scale.shape in ((), (1,), (n,)) else (n, nb))
    if zeros is not None and zeros.dtype == np.int32:
        wanted(zeros, [np.int32], (words_of(n, bits), nb))
    elif zeros is not None:
        wanted(zeros, [np.int8], zeros.shape if zeros.shape == scale.shape else (n, nb))
    g_idx = parts.get("weight_g_idx")
    if g_idx is not None:
        wanted(g_idx, [np.int32, np.int64], (k,))
    group_of, order, span = integers.groups(scale, g_idx, k, nb, said.get("group_size"))
    grid = integers.grid(module, bits, span, k, _is_symmetric(zeros, bits, n))
    if weight.dtype == np.int8 and grid.format.symmetric and not grid.format.group:
        grid = dataclasses.replace(grid, format=parse("int8-row"))  # as it is written
    return IntegerEntry(
        n=n,
        k=k,
        format=grid.format,
        scale_dtype=scale_dtype(scale),
        order=order,
        notes=grid.note,
        stored=parts,
        grid=grid,
        group_of=group_of,
        **common,
    )


def _is_symmetric(zeros: StoredTensor | None, bits: int, n: int) -> bool:
    """Whether every zero point is the middle of the codes."""
    if zeros is None:
        return True
    if zeros.dtype == np.int32:
        return bool((unpack_words(zeros.array().T, bits, n) == 1 << (bits - 1)).all())
    return not zeros.array().any()


def _sizes(
    module: str,
    parts: Mapping[str, StoredTensor],
    weight: StoredTensor,
    said: Mapping[str, Any],
) -> tuple[int, int, int]:
    """N, K and the bits of a code."""
    n, width = weight.shape
    if weight.dtype == np.int8:
        return n, width, 8
    shape = part(module, parts, "weight_shape")
    wanted(shape, [np.int64, np.int32], (2,))
    rows, k = (int(size) for size in shape.array())
    fitting = [bits for bits in range(1, 9) if words_of(k, bits) == width]
    if rows != n or not fitting:
        raise InputError(
            f"{weight.path}: {weight.name} is {list(weight.shape)}, and {shape.name} says "
            f"{[rows, k]}: no code of 1 to 8 bits takes so many words of {WORD_BITS} bits"
        )
    bits = said.get("num_bits")
    return n, k, bits if bits in fitting else fitting[0]
