"""GPTQ, versions 1 and 2, as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits, act order or not.

A linear `[N, K]` has `qweight` int32 `[K·bits/32, N]`, codes packed along K; `qzeros` int32
`[nb, N·bits/32]`, packed along N; `scales` `[nb, N]`; and, mostly, `g_idx` int32 `[K]`, the group
of each column. W = (code − zero)·scale. Version 1 stores zero − 1, modulo 2^bits; symmetric
weights have the zero point 2^(bits−1) throughout, by which a file that names the wrong version
is known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints import integers
from qgraph.checkpoints.base import Checkpoint, CheckpointLayout, Entry, TensorSpec
from qgraph.checkpoints.integers import GroupedEntry
from qgraph.checkpoints.scales import SCALE_TYPES, checked, scale_dtype, written_type
from qgraph.checkpoints.tensors import Stored, StoredTensor, bias_of, called, part, wanted
from qgraph.checkpoints.words import WORD_BITS, pack_words, unpack_words, words_of
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.formats.grouping import count_groups

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GptqEntry(GroupedEntry):
    """One linear; its groups are those of `g_idx`.

    shift: what is added to a stored zero point: 1 in version 1.
    """

    shift: int

    def _codes(self, start: int, stop: int) -> Array:
        """uint8 `[n, K]`, columns as the parameter has them."""
        words = self.stored["qweight"].columns(start, stop)
        return unpack_words(words.T, self.grid.bits, self.k)

    def _scales(self, start: int, stop: int) -> Array:
        scales = self.stored["scales"]
        return checked(scales, scales.columns(start, stop)).T

    def _zeros(self, start: int, stop: int) -> Array:
        """uint8 `[n, nb]`."""
        return stored_zeros(self.stored["qzeros"], self.grid.bits, self.n, self.shift)[start:stop]


def stored_zeros(tensor: StoredTensor, bits: int, n: int, shift: int) -> Array:
    """The zero points of `qzeros`, `shift` added, uint8 `[N, nb]`."""
    codes = unpack_words(tensor.array(), bits, n)
    return ((codes + np.uint8(shift)) & np.uint8((1 << bits) - 1)).T


@dataclasses.dataclass(frozen=True)
class Gptq(CheckpointLayout):
    """One version of the layout."""

    name: str
    shift: int
    default_format: str = "uint4:group=128"
    half_scales: ClassVar[bool] = True

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`: by the version that the configuration names."""
        said = stored.quantization
        if said.get("quant_method", _method_of(stored)) == "auto-round":
            return self.name == "gptq" and "gptq" in str(said.get("packing_format"))
        if said.get("quant_method", _method_of(stored)) not in ("gptq", "gptq_v2"):
            return False
        version = _version(said) or said.get("quant_method")
        return bool(version == "gptq_v2") == (self.name == "gptq_v2")

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        said = stored.quantization
        kind = _version(said) or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            raise InputError(
                f"{stored.path} is packed as checkpoint_format {kind!r}: wanted gptq or gptq_v2"
            )
        modules = integers.packed_modules(stored, _PARTS)
        linears = [_linear(name, parts, said.get("bits")) for name, parts in modules.items()]
        warnings: list[str] = []
        shift = self._shift(said, linears, warnings)
        size = said.get("group_size")
        found = [_entry(stored, linear, shift, size) for linear in linears]
        if not said.get("dynamic"):  # bits and groups of single modules
            warnings += integers.contradictions(said.get("bits"), size, found)
        used = {tensor.name for parts in modules.values() for tensor in parts.values()}
        return Checkpoint(
            stored.path,
            "gptq" if shift else "gptq_v2",
            {entry.name: entry for entry in found},
            {name: tensor for name, tensor in stored.tensors.items() if name not in used},
            stored.config,
            tuple(warnings),
        )

    def _shift(
        self, said: Mapping[str, Any], linears: Sequence[_Linear], warnings: list[str]
    ) -> int:
        """What zero points lack, by their values where the weights are symmetric."""
        if said.get("sym") is False:
            return self.shift
        seen = {z - (1 << (linear.bits - 1)) for linear in linears for z in linear.zeros}
        if seen in ({-1}, {0}):
            shift = -seen.pop()
            if shift != self.shift:
                version, other = ("gptq", "gptq_v2") if shift else ("gptq_v2", "gptq")
                warnings.append(
                    f"the configuration says {other}, and every zero point is stored as "
                    f"2^(bits-1){' - 1' if shift else ''}, as {version} has it: read as {version}"
                )
            return shift
        if seen and said.get("sym"):
            warnings.append(
                "the configuration says sym, and zero points differ from each other: read as "
                f"{self.name}, not symmetric"
            )
        return self.shift

    def scale_dtype(self, source: np.dtype[Any]) -> ir.DataType:
        """See `CheckpointLayout.scale_dtype`: loaders hold them in float16."""
        return ir.DataType.FLOAT16

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        reason = integers.integer_reason(entry, (2, 4, 8), zeros=True)
        if reason is not None:
            return reason
        per_word = WORD_BITS // entry.format.bits
        if entry.n % per_word or entry.k % per_word:
            return f"it is [{entry.n}, {entry.k}], wanted both sizes a multiple of {per_word}"
        return None

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        module = entry.name.removesuffix(".weight")
        nb, bits = count_groups(entry.k, entry.format.group), entry.format.bits
        words = np.dtype(np.int32)
        return {
            f"{module}.qweight": TensorSpec(words, (entry.k * bits // WORD_BITS, entry.n)),
            f"{module}.qzeros": TensorSpec(words, (nb, entry.n * bits // WORD_BITS)),
            f"{module}.scales": TensorSpec(written_type(entry), (nb, entry.n)),
            f"{module}.g_idx": TensorSpec(words, (entry.k,)),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        specs = list(self.specs(entry).items())
        found = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs}
        qweight, qzeros, scales, g_idx = found.values()
        bits, order = entry.format.bits, entry.order
        zeros = np.empty((entry.n, len(scales)), np.uint8)
        for start, stop in entry.blocks():
            weight = entry.rows(start, stop)
            codes = integers.unsigned(entry, weight.codes)
            if order is not None:
                codes = _as_it_was(codes, order)
            qweight[:, start:stop] = pack_words(codes, bits).T
            scales[:, start:stop] = weight.scales.T
            zeros[start:stop] = integers.zeros_of(entry, weight.zeros, weight.scales.shape)
        stored = (zeros - np.uint8(self.shift)) & np.uint8((1 << bits) - 1)
        qzeros[...] = pack_words(np.ascontiguousarray(stored.T), bits)
        groups = np.arange(entry.k, dtype=np.int32) // (entry.format.group or entry.k)
        g_idx[... if order is None else order] = groups
        return found

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        bits, group = integers.one_format(self.name, entries)
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group or -1,
            "sym": all(entry.format.symmetric for entry in entries),
            "desc_act": any(entry.order is not None for entry in entries),
            "checkpoint_format": self.name,
            "lm_head": any("lm_head" in entry.name for entry in entries),
            **_left_in_float(entries, floats),
        }


def _left_in_float(entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
    """How GPTQModel and vLLM are told of linears that are not quantized, as others like them are.

    Others are known by the last word of their names: `up_proj`.
    """
    kinds = {_last(entry.name) for entry in entries}
    left = [name.removesuffix(".weight") for name in floats if name.endswith(".weight")]
    left = [name for name in left if _last(name) in kinds]
    return {"dynamic": {f"-:^{re.escape(name)}$": {} for name in left}} if left else {}


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _as_it_was(codes: Array, order: Array) -> Array:
    """Columns in act order back at their places."""
    found = np.empty_like(codes, order="C")
    found[:, order] = codes
    return found


def _version(said: Mapping[str, Any]) -> Any:
    """The version that a configuration names, if any."""
    return said.get("checkpoint_format") or said.get("format")


def _method_of(stored: Stored) -> str:
    """The method of a quantize_config.json, which names none."""
    says = {"bits", "group_size", "desc_act"} <= set(stored.quantization)
    return "gptq" if says else ""


@dataclasses.dataclass(frozen=True, eq=False)
class _Linear:
    """What the tensors of a linear say of it; `zeros` are the zero points that occur, as stored."""

    module: str
    parts: Mapping[str, StoredTensor]
    n: int
    k: int
    bits: int
    nb: int
    zeros: frozenset[int]


def _linear(module: str, parts: Mapping[str, StoredTensor], said_bits: Any) -> _Linear:
    """The sizes of a linear, from its tensors, and every tensor's shape checked.

    Raises:
        InputError: a tensor is missing, or its shape does not fit the others'.
    """
    qweight, scales = part(module, parts, "qweight"), part(module, parts, "scales")
    qzeros, g_idx = part(module, parts, "qzeros"), parts.get("g_idx")
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or 0 in scales.shape + qweight.shape:
        raise InputError(
            f"{qweight.path}: {qweight.name} {list(qweight.shape)} and {scales.name} "
            f"{list(scales.shape)}: wanted two matrices with elements"
        )
    nb, n = scales.shape
    k = g_idx.shape[0] if g_idx is not None and len(g_idx.shape) == 1 else None
    bits = _bits(qweight, qzeros, n, k, said_bits)
    k = k or qweight.shape[0] * WORD_BITS // bits
    wanted(qweight, [np.int32], (words_of(k, bits), n))
    wanted(qzeros, [np.int32], (nb, words_of(n, bits)))
    wanted(scales, SCALE_TYPES, (nb, n))
    if g_idx is not None:
        wanted(g_idx, [np.int32, np.int64], (k,))
    zeros = frozenset(np.unique(stored_zeros(qzeros, bits, n, 0)).tolist())
    return _Linear(module, parts, n, k, bits, nb, zeros)


def _bits(qweight: StoredTensor, qzeros: StoredTensor, n: int, k: int | None, said: Any) -> int:
    """Bits of a code, by the words that `n` zero points and `k` codes take."""
    width = qzeros.shape[-1] if qzeros.shape else 0
    found = [bits for bits in _BITS if words_of(n, bits) == width]
    found = [bits for bits in found if k is None or words_of(k, bits) == qweight.shape[0]]
    if not found:
        raise InputError(
            f"{qzeros.path}: {qzeros.name} is {list(qzeros.shape)} and {qweight.name} "
            f"{list(qweight.shape)}, for {n} outputs and {k or 'unknown'} inputs: no code of "
            f"{', '.join(map(str, _BITS))} bits takes so many words"
        )
    return said if said in found else found[0]


def _entry(stored: Stored, linear: _Linear, shift: int, said_size: Any) -> GptqEntry:
    """One linear, its groups found."""
    scales, g_idx = linear.parts["scales"], linear.parts.get("g_idx")
    group_of, order, span = integers.groups(scales, g_idx, linear.k, linear.nb, said_size)
    middle = (1 << (linear.bits - 1)) - shift
    grid = integers.grid(linear.module, linear.bits, span, linear.k, linear.zeros == {middle})
    return GptqEntry(
        name=called(linear.module, "weight"),
        n=linear.n,
        k=linear.k,
        format=grid.format,
        scale_dtype=scale_dtype(scales),
        order=order,
        bias=bias_of(linear.module, stored.tensors),
        notes=grid.note,
        stored=linear.parts,
        grid=grid,
        shift=shift,
        group_of=group_of,
    )


V1 = Gptq("gptq", 1)
V2 = Gptq("gptq_v2", 0)
