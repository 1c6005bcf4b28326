"""How weights are written for compressed-tensors: one scheme per format of its.

Weights of formats that are meant for kernels on 8-bit activations (`int8-row`, FP8) are described
with activations that are rounded as the model runs, per token, as their kernels want it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from qgraph.checkpoints import integers
from qgraph.checkpoints.base import ONE_PER_EXPERT, Entry, TensorSpec
from qgraph.checkpoints.compressed_tensors_weights import E4M3
from qgraph.checkpoints.fp8 import fp8_reason, write_fp8
from qgraph.checkpoints.scales import written_type
from qgraph.checkpoints.words import pack_words, words_of
from qgraph.formats.base import Array
from qgraph.formats.fp8 import FP8_BLOCK, Fp8
from qgraph.formats.grouping import count_groups
from qgraph.formats.mx import BLOCK, MXFP4, MXFP8
from qgraph.formats.nvfp4 import NVFP4

_FLOAT = np.dtype(np.float32)
_BYTE = np.dtype(np.uint8)
_PACKED_BITS = (2, 4, 8)


class Scheme(ABC):
    """One format: its name in the configuration, its arguments and its tensors."""

    name: str

    @abstractmethod
    def reason(self, entry: Entry) -> str | None:
        """Why it cannot hold a weight, or None."""

    @abstractmethod
    def arguments(self, entry: Entry) -> dict[str, Any]:
        """What the configuration says of the weights."""

    def activations(self, entry: Entry) -> dict[str, Any] | None:
        """What the configuration says of the activations; None: they stay in float."""
        return None

    @abstractmethod
    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""

    @abstractmethod
    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""


def _arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": False,
        **more,
    }


def _by_token(bits: int, kind: str) -> dict[str, Any]:
    """Activations that are rounded as they come, a scale for each token."""
    return _arguments(bits, kind, "token", dynamic=True)


def _empty(specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    return {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}


def _module(entry: Entry) -> str:
    return entry.name.removesuffix(".weight")


class PackQuantized(Scheme):
    """Integers in words, in groups or a scale for each row, with zero points or without."""

    name = "pack-quantized"

    def reason(self, entry: Entry) -> str | None:
        """See `Scheme.reason`."""
        reason = integers.integer_reason(entry, _PACKED_BITS, zeros=True)
        if reason is None and entry.order is not None:
            return "it is in act order, which the layout no longer has: the layout gptq has it"
        if reason is None and entry.format.group and entry.k % entry.format.group:
            return f"groups of {entry.format.group} do not divide K = {entry.k}"
        return reason

    def arguments(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.arguments`."""
        fmt = entry.format
        strategy = "group" if fmt.group else "channel"
        return _arguments(
            fmt.bits, "int", strategy, symmetric=fmt.symmetric, group_size=fmt.group or None
        )

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `Scheme.specs`."""
        module, fmt = _module(entry), entry.format
        nb, word = count_groups(entry.k, fmt.group), np.dtype(np.int32)
        packed = TensorSpec(word, (entry.n, words_of(entry.k, fmt.bits)))
        found = {
            f"{module}.weight_packed": packed,
            f"{module}.weight_scale": TensorSpec(written_type(entry), (entry.n, nb)),
            f"{module}.weight_shape": TensorSpec(np.dtype(np.int64), (2,)),
        }
        if not fmt.symmetric:
            zeros = TensorSpec(word, (words_of(entry.n, fmt.bits), nb))
            found[f"{module}.weight_zero_point"] = zeros
        return found

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `Scheme.write`."""
        found = _empty(self.specs(entry))
        packed, scales, shape, *zero_points = found.values()
        shape[:] = entry.n, entry.k
        zeros = np.empty(scales.shape, np.uint8)
        for start, stop in entry.blocks():
            weight = entry.rows(start, stop)
            packed[start:stop] = pack_words(integers.unsigned(entry, weight.codes), _bits(entry))
            scales[start:stop] = weight.scales
            zeros[start:stop] = integers.zeros_of(entry, weight.zeros, weight.scales.shape)
        for tensor in zero_points:
            tensor[...] = pack_words(np.ascontiguousarray(zeros.T), _bits(entry)).T
        return found


def _bits(entry: Entry) -> int:
    return entry.format.bits


class IntQuantized(Scheme):
    """8-bit integers with a scale for each row, for kernels on 8-bit activations."""

    name = "int-quantized"

    def reason(self, entry: Entry) -> str | None:
        """See `Scheme.reason`."""
        if entry.format.name not in ("int8-row", "int8-pairs"):
            return f"it is {entry.format.spell()}, wanted int8-row"
        return integers.integer_reason(entry, (8,), zeros=False)

    def arguments(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.arguments`."""
        return _arguments(8, "int", "channel")

    def activations(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.activations`."""
        return _by_token(8, "int")

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `Scheme.specs`."""
        module = _module(entry)
        return {
            f"{module}.weight": TensorSpec(np.dtype(np.int8), (entry.n, entry.k)),
            f"{module}.weight_scale": TensorSpec(written_type(entry), (entry.n, 1)),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `Scheme.write`."""
        found = _empty(self.specs(entry))
        weight, scales = found.values()
        for start, stop in entry.blocks():
            rows = entry.rows(start, stop)
            weight[start:stop], scales[start:stop] = rows.codes, rows.scales
        return found


class FloatQuantized(Scheme):
    """FP8, a scale for the tensor, each row, or 128 × 128."""

    name = "float-quantized"

    def reason(self, entry: Entry) -> str | None:
        """See `Scheme.reason`."""
        return fp8_reason(entry, ("tensor", "row", "block"))

    def arguments(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.arguments`."""
        assert isinstance(entry.format, Fp8)
        if entry.format.scale == "block":
            return _arguments(8, "float", "block", block_structure=[FP8_BLOCK, FP8_BLOCK])
        return _arguments(8, "float", "tensor" if entry.format.scale == "tensor" else "channel")

    def activations(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.activations`."""
        if entry.format.group:
            return _arguments(8, "float", "group", group_size=FP8_BLOCK, dynamic=True)
        return _by_token(8, "float")

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `Scheme.specs`."""
        assert isinstance(entry.format, Fp8)
        shape = {
            "tensor": (1,),
            "row": (entry.n, 1),
            "block": (-(-entry.n // FP8_BLOCK), -(-entry.k // FP8_BLOCK)),
        }[entry.format.scale]
        module = _module(entry)
        return {
            f"{module}.weight": TensorSpec(E4M3, (entry.n, entry.k)),
            f"{module}.weight_scale": TensorSpec(_FLOAT, shape),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `Scheme.write`."""
        assert isinstance(entry.format, Fp8)
        rows = {"tensor": entry.n, "row": 1, "block": FP8_BLOCK}[entry.format.scale]
        return write_fp8(entry, self.specs(entry), rows)


class Nvfp4Packed(Scheme):
    """E2M1 with E4M3 scales for 16 columns and one scale of the tensor, stored as 1/scale."""

    name = "nvfp4-pack-quantized"

    def reason(self, entry: Entry) -> str | None:
        """See `Scheme.reason`."""
        return _level_reason(entry, NVFP4.name, NVFP4.group)

    def arguments(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.arguments`."""
        more = {"group_size": NVFP4.group, "scale_dtype": "torch.float8_e4m3fn"}
        return _arguments(4, "float", "tensor_group", **more)

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `Scheme.specs`."""
        module = _module(entry)
        return {
            f"{module}.weight_packed": TensorSpec(_BYTE, (entry.n, entry.k // 2)),
            f"{module}.weight_scale": TensorSpec(E4M3, (entry.n, entry.k // NVFP4.group)),
            f"{module}.weight_global_scale": TensorSpec(_FLOAT, (1,)),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `Scheme.write`; of a tensor of zeros the scale is 0, and 1 is written."""
        found = _empty(self.specs(entry))
        packed, scales, whole = found.values()
        for start, stop in entry.blocks():
            parts = NVFP4.pack(entry.rows(start, stop), NVFP4.default_layout)
            packed[start:stop] = parts["codes"].reshape(stop - start, -1)
            scales[start:stop] = parts["scales"].view(E4M3)
            whole[:] = np.float32(1) / (parts["tensor"] if parts["tensor"].any() else 1)
        return found


class MxPacked(Scheme):
    """E2M1 or E4M3 with a power of two for 32 columns."""

    def __init__(self, name: str, bits: int) -> None:
        self.name, self._bits = name, bits
        self._format = MXFP4 if bits == 4 else MXFP8

    def reason(self, entry: Entry) -> str | None:
        """See `Scheme.reason`."""
        reason = _level_reason(entry, self._format.name, BLOCK)
        levels = self._format.levels
        if reason is None and not np.array_equal(entry.format.levels, levels, equal_nan=True):
            return f"it is {entry.format.spell()}, wanted {self._format.name}"
        return reason

    def arguments(self, entry: Entry) -> dict[str, Any]:
        """See `Scheme.arguments`."""
        more = {"group_size": BLOCK, "scale_dtype": "torch.uint8"}
        return _arguments(self._bits, "float", "group", **more)

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `Scheme.specs`."""
        module, four = _module(entry), self._bits == 4
        shape = entry.n, entry.k // 2 if four else entry.k
        return {
            f"{module}.weight{'_packed' * four}": TensorSpec(_BYTE if four else E4M3, shape),
            f"{module}.weight_scale": TensorSpec(_BYTE, (entry.n, entry.k // BLOCK)),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `Scheme.write`."""
        found = _empty(self.specs(entry))
        weight, scales = found.values()
        for start, stop in entry.blocks():
            parts = self._format.pack(entry.rows(start, stop), self._format.default_layout)
            weight[start:stop] = parts["codes"].reshape(stop - start, -1).view(weight.dtype)
            scales[start:stop] = parts["scales"]
        return found


def _level_reason(entry: Entry, name: str, group: int) -> str | None:
    """Why a weight is not whole blocks of one of the formats of small floats, or None."""
    if entry.format.name != name:
        return f"it is {entry.format.spell()}, wanted {name}"
    if entry.experts is not None:
        return ONE_PER_EXPERT
    if entry.k % group:
        return f"its rows are {entry.k} long, wanted a multiple of {group}"
    return None


_SCHEMES: tuple[Scheme, ...] = (
    IntQuantized(),
    PackQuantized(),
    FloatQuantized(),
    Nvfp4Packed(),
    MxPacked("mxfp4-pack-quantized", 4),
    MxPacked("mxfp8-quantized", 8),
)
_NEAREST = {"nvfp4": 3, "mxfp4": 4, "mxfp8": 5, "fp8-e4m3": 2, "int8-row": 0}
"""Whose reason is told, by the format's name; of other formats that of PackQuantized."""


def scheme_of(entry: Entry) -> Scheme:
    """The scheme that holds a weight for which `schemes_reason` has no reason."""
    return next(scheme for scheme in _SCHEMES if scheme.reason(entry) is None)


def schemes_reason(entry: Entry) -> str | None:
    """Why no scheme holds a weight, or None."""
    reasons = [scheme.reason(entry) for scheme in _SCHEMES]
    return None if None in reasons else reasons[_NEAREST.get(entry.format.name, 1)]
