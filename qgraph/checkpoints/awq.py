"""AWQ, version gemm, as AutoAWQ writes it: 4 bits with zero points.

A linear `[N, K]` has `qweight` int32 `[K, N/8]` and `qzeros` int32 `[nb, N/8]`, packed along N:
word j holds outputs 8j, 8j + 2, 8j + 4, 8j + 6, 8j + 1, 8j + 3, 8j + 5, 8j + 7, low bits first;
`scales` `[nb, N]`. W = (code − zero)·scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints import integers
from qgraph.checkpoints.base import Checkpoint, CheckpointLayout, Entry, TensorSpec, unquantized
from qgraph.checkpoints.integers import Grid
from qgraph.checkpoints.scales import SCALE_TYPES, checked, scale_dtype, written_type
from qgraph.checkpoints.tensors import Stored, StoredTensor, bias_of, called, part, wanted
from qgraph.checkpoints.words import WORD_BITS, pack_words, unpack_words
from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight
from qgraph.formats.grouping import count_groups

_PARTS = ("qweight", "qzeros", "scales")
_BITS = 4
_IN_WORD = WORD_BITS // _BITS
_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""The outputs in a word, low bits first."""


def unpack_outputs(words: Array) -> Array:
    """int32 `[m, N/8]` → codes of N outputs, uint8 `[m, N]`."""
    codes = unpack_words(words, _BITS, words.shape[1] * _IN_WORD)
    found = np.empty_like(codes).reshape(len(words), -1, _IN_WORD)
    found[..., _ORDER] = codes.reshape(found.shape)
    return found.reshape(codes.shape)


def pack_outputs(codes: Array) -> Array:
    """The inverse of `unpack_outputs`."""
    grouped = codes.reshape(len(codes), -1, _IN_WORD)[..., _ORDER]
    return pack_words(grouped.reshape(codes.shape), _BITS)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AwqEntry(Entry):
    """One linear."""

    grid: Grid

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        codes = self.grid.codes(self._outputs("qweight", start, stop))
        scales = self.grid.spread(self._scales(start, stop), self.k)
        if self.format.symmetric:
            return QuantizedWeight(codes, scales)
        zeros = self.grid.spread(self._outputs("qzeros", start, stop), self.k)
        return QuantizedWeight(codes, scales, zeros)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: (code − zero)·scale."""
        group_of = np.arange(self.k) // self.grid.span
        codes = self._outputs("qweight", start, stop).astype(np.float32)
        zeros = self._outputs("qzeros", start, stop).astype(np.float32)
        scales = self._scales(start, stop).astype(np.float32)
        found: Array = (codes - zeros[:, group_of]) * scales[:, group_of]
        return found

    def _outputs(self, kind: str, start: int, stop: int) -> Array:
        """Codes or zero points of outputs `start:stop`, uint8 `[n, K]` or `[n, nb]`."""
        first = start // _IN_WORD
        words = self.stored[kind].columns(first, -(-stop // _IN_WORD))
        skipped = first * _IN_WORD
        return np.ascontiguousarray(unpack_outputs(words)[:, start - skipped : stop - skipped].T)

    def _scales(self, start: int, stop: int) -> Array:
        scales = self.stored["scales"]
        return checked(scales, scales.columns(start, stop)).T


@dataclasses.dataclass(frozen=True)
class Awq(CheckpointLayout):
    """The gemm version; gemv, marlin and ipex pack otherwise and are refused."""

    name: str = "awq"
    default_format: str = "uint4:group=128"
    half_scales: ClassVar[bool] = True

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        said = stored.quantization
        if said.get("quant_method") == "auto-round":
            return "awq" in str(said.get("packing_format"))
        return bool(said.get("quant_method", "awq" if "w_bit" in said else "") == "awq")

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        said = stored.quantization
        version = str(said.get("version") or "gemm").lower()
        bits = said.get("bits") or said.get("w_bit") or _BITS
        if version != "gemm" or bits != _BITS:
            raise InputError(
                f"{stored.path} is AWQ of version {version!r} with {bits!r} bits: wanted gemm with "
                f"{_BITS}; load it where it was made and save it as gemm"
            )
        modules = integers.packed_modules(stored, _PARTS)
        size = said.get("group_size", said.get("q_group_size"))
        found = [_entry(stored, name, parts, size) for name, parts in modules.items()]
        used = {tensor.name for parts in modules.values() for tensor in parts.values()}
        return Checkpoint(
            stored.path,
            self.name,
            {entry.name: entry for entry in found},
            {name: tensor for name, tensor in stored.tensors.items() if name not in used},
            stored.config,
            tuple(integers.contradictions(None, size, found)),
        )

    def scale_dtype(self, source: np.dtype[Any]) -> ir.DataType:
        """See `CheckpointLayout.scale_dtype`: loaders hold them in float16."""
        return ir.DataType.FLOAT16

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        reason = integers.integer_reason(entry, (_BITS,), zeros=True)
        if reason is None and entry.order is not None:
            return "it is in act order, which this layout has no place for"
        if reason is None and entry.n % _IN_WORD:
            return f"it has N = {entry.n}, wanted a multiple of {_IN_WORD}"
        if reason is None and entry.format.group and entry.k % entry.format.group:
            return f"groups of {entry.format.group} do not divide K = {entry.k}"
        return reason

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        module = entry.name.removesuffix(".weight")
        nb, words = count_groups(entry.k, entry.format.group), np.dtype(np.int32)
        return {
            f"{module}.qweight": TensorSpec(words, (entry.k, entry.n // _IN_WORD)),
            f"{module}.qzeros": TensorSpec(words, (nb, entry.n // _IN_WORD)),
            f"{module}.scales": TensorSpec(written_type(entry), (nb, entry.n)),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        found = {name: np.empty(s.shape, s.dtype) for name, s in self.specs(entry).items()}
        qweight, qzeros, scales = found.values()
        for start, stop in entry.blocks():  # of a multiple of 8 rows: whole words
            weight = entry.rows(start, stop)
            zeros = integers.zeros_of(entry, weight.zeros, weight.scales.shape)
            columns = slice(start // _IN_WORD, -(-stop // _IN_WORD))
            qweight[:, columns] = pack_outputs(integers.unsigned(entry, weight.codes).T)
            qzeros[:, columns] = pack_outputs(zeros.T)
            scales[:, start:stop] = weight.scales.T
        return found

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        _, group = integers.one_format(self.name, entries)
        return {
            "quant_method": "awq",
            "bits": _BITS,
            "group_size": group or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": unquantized(floats) or None,
        }


def _entry(
    stored: Stored, module: str, parts: Mapping[str, StoredTensor], said_size: Any
) -> AwqEntry:
    """One linear, its tensors' shapes checked."""
    qweight, scales = part(module, parts, "qweight"), part(module, parts, "scales")
    qzeros = part(module, parts, "qzeros")
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or 0 in scales.shape + qweight.shape:
        raise InputError(
            f"{qweight.path}: {qweight.name} {list(qweight.shape)} and {scales.name} "
            f"{list(scales.shape)}: wanted two matrices with elements"
        )
    (nb, n), k = scales.shape, qweight.shape[0]
    wanted(qweight, [np.int32], (k, -(-n // _IN_WORD)))
    wanted(qzeros, [np.int32], (nb, -(-n // _IN_WORD)))
    wanted(scales, SCALE_TYPES, (nb, n))
    _, _, span = integers.groups(scales, None, k, nb, said_size)
    symmetric = bool((unpack_outputs(qzeros.array())[:, :n] == 1 << (_BITS - 1)).all())
    grid = integers.grid(module, _BITS, span, k, symmetric)
    return AwqEntry(
        name=called(module, "weight"),
        n=n,
        k=k,
        format=grid.format,
        scale_dtype=scale_dtype(scales),
        bias=bias_of(module, stored.tensors),
        stored=parts,
        grid=grid,
    )


AWQ = Awq()
