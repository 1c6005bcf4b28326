"""GGUF, the one-file format of llama.cpp: its quantized types read in formats of ours, exactly.

Q4_0 and Q3_K are `int4`, Q8_0, Q5_0, Q6_K and IQ4_NL `int8` groups. Types with a float minimum
are float-zero groups: `uint4` for Q4_1, Q4_K and Q2_K, `uint8` for Q5_1 and Q5_K. Names and the
order of rows are those of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import Checkpoint, Entry, FloatTensor
from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.gguf_file import MAGIC, GgufTensor, read_header
from qgraph.checkpoints.gguf_names import Names, names_of
from qgraph.checkpoints.tensors import Stored, StoredTensor
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.formats.minimums import MINIMUMS, zero_points

_NARROWER = {"Q5_0": 5, "Q5_1": 5, "Q2_K": 2, "Q3_K": 3, "Q5_K": 5, "Q6_K": 6, "IQ4_NL": 4}
"""Bits of codes that are held in more."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GgufEntry(Entry):
    """A quantized tensor of a GGUF file.

    type: ggml's.
    places: the row of the file that each row is, int64 `[N]`; None where they lie in order.
    """

    type: BlockType
    places: Array | None = None

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        found = self.type.decode(self._blocks(start, stop))
        codes, scales = found.codes.reshape(-1, self.k), self._grid(found.scales, start)
        if found.minimums is None:
            return QuantizedWeight(codes, scales.astype(self.scale_dtype.numpy(), copy=False))
        return moved(codes, scales, self._grid(found.minimums, start), self.format)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`."""
        return self.type.dequantized(self._blocks(start, stop)).reshape(-1, self.k)

    def _blocks(self, start: int, stop: int) -> Array:
        """The blocks of some rows, u8 `[m, nbytes]`."""
        data = rows_of(self.stored["blocks"], self.places, start, stop)
        return data.reshape(-1, self.type.nbytes)

    def _grid(self, values: Array, row: int) -> Array:
        """Scales or minimums as float32 `[n, nb]`, of rows from `row` on."""
        values = values.reshape(-1, self.k // self.type.group)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            at, tensor = bad[0], self.stored["blocks"]
            raise InputError(
                f"{tensor.path}: {tensor.name} holds the scale {values[tuple(at)]} in group "
                f"{at[1]} of row {row + at[0]}, wanted finite numbers: the file is damaged, or was "
                "made from weights that were"
            )
        return values


def moved(codes: Array, scales: Array, least: Array, fmt: Format) -> QuantizedWeight:
    """What scale·code + minimum is as a float-zero weight: see `formats.minimums`.

    codes uint8 `[n, K]`; scales, least: float32 `[n, nb]`. The minimum moved to the middle of the
    codes is exact in float64; it is kept so where float32 would round it. A group without a scale
    is its minimum times a code of 1, which float zero points can say too.
    """
    middle = 1 << (fmt.bits - 1)
    constant = (scales == 0) & (least != 0)
    if constant.any():
        codes = np.where(np.repeat(constant, fmt.group, axis=1), np.uint8(1), codes)
        scales, least = np.where(constant, least, scales), np.where(constant, 0, least)
    exact = least + scales.astype(np.float64) * middle
    minimums = exact.astype(np.float32)
    more = {MINIMUMS: minimums if np.array_equal(minimums, exact) else exact}
    return QuantizedWeight(codes, scales, zero_points(scales, exact, middle), more)


@dataclasses.dataclass(frozen=True)
class GgufFloats:
    """An unquantized tensor under its parameter's name, rows in the parameter's order.

    added: what the file's numbers are more than the parameter's.
    """

    name: str
    stored: StoredTensor
    places: Array | None = None
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """See `FloatTensor.shape`."""
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `FloatTensor.dtype`."""
        return self.stored.dtype

    def rows(self, start: int, stop: int) -> Array:
        """See `FloatTensor.rows`."""
        found = rows_of(self.stored, self.places, start, stop)
        return found - found.dtype.type(self.added) if self.added else found


def rows_of(stored: StoredTensor, places: Array | None, start: int, stop: int) -> Array:
    """Rows `start:stop`, each of which lies at its place; of experts, counted through.

    stored: `[N, …]`, or `[E, N, …]` without places.
    """
    if len(stored.shape) > 2:
        stored = stored.matrix()
    if places is None:
        return stored.rows(start, stop)
    wanted = places[start:stop]
    first = int(wanted.min())
    rows: Array = stored.rows(first, int(wanted.max()) + 1)[wanted - first]
    return rows


class Gguf:
    """See `CheckpointLayout`."""

    name = "gguf"
    default_format = "int4:group=32,scale=signed"

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        return stored.head.startswith(MAGIC)

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        file = read_header(stored.path)
        names = names_of(file)
        warnings: tuple[str, ...] = ()
        if not names.known:
            warnings = (
                f"the architecture {names.architecture!r} is not known: tensors keep the names "
                "that the file has, and their rows its order",
            )
        entries: dict[str, Entry] = {}
        floats: dict[str, FloatTensor] = {}
        for own, tensor in file.tensors.items():
            name = names.transformers(own)
            if tensor.type is None or len(tensor.shape) < 2:
                floats[name] = _floats(name, own, names, tensor)
            else:
                entries[name] = _entry(name, own, names, tensor, file.tensors)
        return Checkpoint(stored.path, self.name, entries, floats, file.fields, warnings)


def _floats(name: str, own: str, names: Names, tensor: GgufTensor) -> GgufFloats:
    order = names.order(own, tensor.shape[0])
    return GgufFloats(name, tensor.stored, order, names.added(own))


def _entry(
    name: str, own: str, names: Names, tensor: GgufTensor, others: Mapping[str, GgufTensor]
) -> GgufEntry:
    *experts, n, k = tensor.shape
    assert tensor.type is not None
    bias = f"{own.removesuffix('.weight')}.bias"
    bits = _NARROWER.get(tensor.type.name)
    note = f"{tensor.type.name}: codes of {bits} bits, held in {{}}"
    fmt = parse(tensor.type.format)
    if "group" in fmt.options:
        fmt = dataclasses.replace(fmt, group=tensor.type.group)
    return GgufEntry(
        name=name,
        n=n,
        k=k,
        format=fmt,
        scale_dtype=ir.DataType.FLOAT16 if tensor.type.half_scales else ir.DataType.FLOAT,
        experts=int(np.prod(experts)) if experts else None,
        bias=names.transformers(bias) if bias in others else None,
        notes=(note.format(fmt.bits),) if bits else (),
        stored={"blocks": tensor.stored},
        type=tensor.type,
        places=names.order(own, n),
    )


GGUF = Gguf()
