"""FP8 and NVFP4 as NVIDIA's Model Optimizer exports them.

FP8: `weight` E4M3FN `[N, K]` with `weight_scale`: one number, one per row, or per 128 × 128. NVFP4:
`weight` u8 `[N, K/2]`, low half first; `weight_scale` E4M3FN `[N, K/16]`; `weight_scale_2`, one
number: W = e2m1·(scale·scale_2). `input_scale` belongs to the activations and is left where it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qgraph.checkpoints.base import (
    ONE_PER_EXPERT,
    Checkpoint,
    CheckpointLayout,
    Entry,
    TensorSpec,
    unquantized,
)
from qgraph.checkpoints.fp8 import ACTIVATIONS, fp8_reason, read_fp8, write_fp8
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
from qgraph.formats.base import Array, Part, QuantizedWeight
from qgraph.formats.fp8 import Fp8
from qgraph.formats.nvfp4 import NVFP4

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_GROUP = NVFP4.group


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Nvfp4Entry(Entry):
    """One linear; `stored` has "weight", "weight_scale" and "weight_scale_2"."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        codes, scales, whole = self._read(start, stop)
        parts: dict[Part, Array] = {
            "codes": codes,
            "scales": scales.view(np.uint8),
            "tensor": whole,
        }
        return self.format.unpack(parts, stop - start, self.k, self.format.default_layout)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: e2m1·(scale·scale_2)."""
        codes, scales, whole = self._read(start, stop)
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(stop - start, -1, _GROUP)
        numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        steps = scales.astype(np.float32) * whole
        weight: Array = (numbers * steps[..., None]).reshape(stop - start, self.k)
        return weight

    def _read(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """Codes u8 `[n, K/2]`, scales E4M3 `[n, K/16]` and float32 `[1]` of all."""
        scale, whole = self.stored["weight_scale"], self.stored["weight_scale_2"]
        scales = finite(scale, scale.rows(start, stop), start)
        factor = finite(whole, whole.array().reshape(1))
        return self.stored["weight"].rows(start, stop), scales, factor


class Modelopt(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "modelopt"
    default_format = "nvfp4"

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        said = stored.quantization
        producer = said.get("producer")
        made = producer.get("name") if isinstance(producer, Mapping) else None
        method = said.get("quant_method", made)
        return method in ("modelopt", "modelopt_fp4")

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`; which of the two a linear is, its tensors say."""
        _check_smoothing(stored)
        entries: dict[str, Entry] = {}
        used: set[str] = set()
        static = False
        for module, parts in stored.modules(_PARTS).items():
            weight = parts.get("weight")
            if weight is None or weight.dtype != np.uint8:
                continue
            entry = _entry(stored, module, parts)
            entries[entry.name] = entry
            used |= {tensor.name for tensor in parts.values()}
            static |= "input_scale" in parts
        left = {name: _flat(tensor) for name, tensor in stored.tensors.items() if name not in used}
        rest = read_fp8(dataclasses.replace(stored, tensors=left), self.name, None)
        warnings = (ACTIVATIONS,) if static else rest.warnings
        if any(name.endswith(".k_scale") for name in stored.tensors):
            warnings = (*warnings, "scales of the key and value cache are left out")
        ordered = {**entries, **rest.entries}
        return dataclasses.replace(rest, entries=ordered, warnings=warnings)

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        if entry.format.name != "nvfp4":
            reason = fp8_reason(entry, ("tensor", "row"))
            return f"{reason}, or nvfp4" if reason else None
        if entry.experts is not None:
            return ONE_PER_EXPERT
        if entry.k % _GROUP:
            return f"its rows are {entry.k} long, wanted a multiple of {_GROUP}"
        return None

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        module, single = entry.name.removesuffix(".weight"), np.dtype(np.float32)
        if entry.format.name == "nvfp4":
            return {
                f"{module}.weight": TensorSpec(np.dtype(np.uint8), (entry.n, entry.k // 2)),
                f"{module}.weight_scale": TensorSpec(_E4M3, (entry.n, entry.k // _GROUP)),
                f"{module}.weight_scale_2": TensorSpec(single, ()),
            }
        assert isinstance(entry.format, Fp8)
        scale = () if entry.format.scale == "tensor" else (entry.n,)
        return {
            f"{module}.weight": TensorSpec(_E4M3, (entry.n, entry.k)),
            f"{module}.weight_scale": TensorSpec(single, scale),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        specs = self.specs(entry)
        if entry.format.name != "nvfp4":
            return write_fp8(entry, specs, 1)
        found = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
        weight, scale, whole = found.values()
        for start, stop in entry.blocks():
            parts = NVFP4.pack(entry.rows(start, stop), NVFP4.default_layout)
            weight[start:stop] = parts["codes"].reshape(stop - start, -1)
            scale[start:stop] = parts["scales"].view(_E4M3)
            whole[()] = parts["tensor"][0]
        return found

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        kinds = {entry.format.spell() for entry in entries}
        if len(kinds) != 1:
            raise InputError(
                f"modelopt has one algorithm for all weights, found {', '.join(sorted(kinds))}: "
                "choose one format"
            )
        algorithms = {
            "nvfp4": "NVFP4",
            "fp8-e4m3:scale=tensor": "FP8",
            "fp8-e4m3": "FP8_PER_CHANNEL_PER_TOKEN",
        }
        found = {
            "quant_method": "modelopt",
            "quant_algo": algorithms[kinds.pop()],
            "ignore": unquantized(floats),
        }
        return {**found, "group_size": _GROUP} if found["quant_algo"] == "NVFP4" else found


def _check_smoothing(stored: Stored) -> None:
    """Refuse factors that activations are multiplied by in front of a linear."""
    for name in stored.tensors:
        if name.endswith("pre_quant_scale"):
            raise InputError(
                f"{stored.path} has {name}, by which activations are to be multiplied as the model "
                "runs, for which the graph has no place: wanted a checkpoint without (exported "
                "with these factors folded into the layers in front)"
            )


def _flat(tensor: StoredTensor) -> StoredTensor:
    """Scales of blocks `[N/128, 1, K/128, 1]` as `[N/128, K/128]`; other tensors as they are."""
    if tensor.name.endswith(".weight_scale") and tensor.shape[1::2] == (1, 1):
        return dataclasses.replace(tensor, shape=tensor.shape[::2])
    return tensor


def _entry(stored: Stored, module: str, parts: Mapping[str, StoredTensor]) -> Nvfp4Entry:
    weight = parts["weight"]
    if len(weight.shape) != 2 or 0 in weight.shape or weight.shape[1] * 2 % _GROUP:
        raise InputError(
            f"{weight.path}: {weight.name} is uint8 {list(weight.shape)}, wanted [N, K/2] with K a "
            f"multiple of {_GROUP}"
        )
    n, k = weight.shape[0], weight.shape[1] * 2
    scale, whole = part(module, parts, "weight_scale"), part(module, parts, "weight_scale_2")
    wanted(scale, [_E4M3], (n, k // _GROUP))
    wanted(whole, [np.float32], (1,) if whole.shape == (1,) else ())
    return Nvfp4Entry(
        name=called(module, "weight"),
        n=n,
        k=k,
        format=NVFP4,
        bias=bias_of(module, stored.tensors),
        stored={"weight": weight, "weight_scale": scale, "weight_scale_2": whole},
    )


MODELOPT = Modelopt()
