"""MXFP4 as gpt-oss ships it: the experts of a layer in one tensor, everything else in float.

A parameter `X` `[E, N, K]` is `X_blocks` u8 `[E, N, K/32, 16]`, elements 2j and 2j + 1 in byte j
of a block, low half first, and `X_scales` u8 `[E, N, K/32]`: W = e2m1·2^(byte − 127). The float
parameter of transformers is `[E, K, N]`, each expert transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qgraph.checkpoints.base import Checkpoint, CheckpointLayout, Entry, TensorSpec, unquantized
from qgraph.checkpoints.tensors import Stored, StoredTensor, finite, wanted
from qgraph.errors import InputError
from qgraph.formats.base import Array, Part, QuantizedWeight, parse
from qgraph.formats.mx import BLOCK, MXFP4

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_BYTES = BLOCK // 2


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mxfp4Entry(Entry):
    """One parameter; `stored` has "blocks" and "scales"."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        parts: dict[Part, Array] = {
            "codes": self._blocks(start, stop),
            "scales": self._bytes(start, stop),
        }
        weight = self.format.unpack(parts, stop - start, self.k, self.format.default_layout)
        finite(self.stored["scales"], weight.scales, start)
        return weight

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: e2m1·2^(byte − 127)."""
        blocks = self._blocks(start, stop)
        halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(stop - start, -1, BLOCK)
        numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        exponents = self._bytes(start, stop)[..., None].astype(np.int32) - 127
        with np.errstate(over="ignore"):  # 6·2^127 lies beyond float32
            weight: Array = np.ldexp(numbers, exponents).reshape(stop - start, self.k)
        return weight

    def _blocks(self, start: int, stop: int) -> Array:
        """u8 `[n, K/32, 16]`."""
        data = self.stored["blocks"].matrix(2).rows(start, stop)
        return data.reshape(stop - start, -1, _BYTES)

    def _bytes(self, start: int, stop: int) -> Array:
        """u8 `[n, K/32]`."""
        return self.stored["scales"].matrix().rows(start, stop)


class Mxfp4Checkpoints(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "mxfp4"
    default_format = "mxfp4"
    only_experts = True

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        return stored.quantization.get("quant_method") == "mxfp4"

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        entries: dict[str, Entry] = {}
        used: set[str] = set()
        for tensor_name, blocks in stored.tensors.items():
            name = tensor_name.removesuffix(_BLOCKS)
            if name == tensor_name:
                continue
            entries[name] = _entry(stored, name, blocks)
            used |= {tensor_name, f"{name}{_SCALES}"}
        lost = [name for name in stored.tensors if _lost(name, entries)]
        if lost:
            raise InputError(
                f"{stored.path} has {lost[0]} and no {lost[0].removesuffix(_SCALES)}{_BLOCKS}: a "
                "shard is missing, or the checkpoint was cut; download it again"
            )
        floats = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
        return Checkpoint(stored.path, self.name, entries, floats, stored.config)

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        if entry.format.name != self.name:
            return f"it is {entry.format.spell()}, wanted mxfp4"
        if entry.experts is None:
            return "it has no expert axis: for one linear alone take the layout compressed-tensors"
        if entry.k % BLOCK:
            return f"its rows are {entry.k} long, wanted a multiple of {BLOCK}"
        return None

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        byte, shape = np.dtype(np.uint8), (*entry.shape[:-1], entry.k // BLOCK)
        return {
            f"{entry.name}{_BLOCKS}": TensorSpec(byte, (*shape, _BYTES)),
            f"{entry.name}{_SCALES}": TensorSpec(byte, shape),
        }

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        found = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.specs(entry).items()}
        blocks, scales = (each.reshape(entry.total_rows, -1) for each in found.values())
        for start, stop in entry.blocks():
            parts = MXFP4.pack(entry.rows(start, stop), MXFP4.default_layout)
            blocks[start:stop] = parts["codes"].reshape(stop - start, -1)
            scales[start:stop] = parts["scales"]
        return found

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": unquantized(floats)}


def _lost(name: str, entries: dict[str, Entry]) -> bool:
    """Whether these are scales of experts that have no blocks."""
    whose = name.removesuffix(_SCALES)
    return whose != name and ".experts." in name and whose not in entries


def _entry(stored: Stored, name: str, blocks: StoredTensor) -> Mxfp4Entry:
    scales = stored.tensors.get(f"{name}{_SCALES}")
    if scales is None:
        raise InputError(
            f"{blocks.path} has {blocks.name}, and {name}{_SCALES} is missing: download the "
            "shard that holds it"
        )
    shape = blocks.shape
    if len(shape) not in (3, 4) or 0 in shape:
        raise InputError(
            f"{blocks.path}: {blocks.name} is {list(shape)}, wanted [E, N, K/32, {_BYTES}]"
        )
    wanted(blocks, [np.uint8], (*shape[:-1], _BYTES))
    wanted(scales, [np.uint8, ml_dtypes.float8_e8m0fnu], shape[:-1])
    bias = f"{name}{_BIAS}"
    return Mxfp4Entry(
        name=name,
        n=shape[-3],
        k=shape[-2] * BLOCK,
        format=parse("mxfp4"),
        experts=shape[0] if len(shape) == 4 else None,
        bias=bias if bias in stored.tensors else None,
        stored={"blocks": blocks, "scales": dataclasses.replace(scales, dtype=np.dtype(np.uint8))},
    )


MXFP4_EXPERTS = Mxfp4Checkpoints()
