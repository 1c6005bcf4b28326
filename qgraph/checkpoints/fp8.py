"""FP8 as DeepSeek and Qwen3 ship it, scales per 128 × 128, and with a scale per tensor or row.

A linear has `weight` E4M3FN (or E5M2) `[N, K]` and either `weight_scale_inv`
`[ceil(N/128), ceil(K/128)]`, which multiplies in spite of its name, or `weight_scale`: one number,
or one per row. W = fp8·scale. Static activation scales (`input_scale`) are not weights: they are
mentioned, and left where they are.
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
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.formats.fp8 import FP8_BLOCK, Fp8
from qgraph.formats.grouping import count_groups

_FORMATS = {
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8-e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "fp8-e5m2",
}
_SCALES = ("weight_scale_inv", "weight_scale")
_STATIC = ("input_scale", "activation_scale")
ACTIVATIONS = "static scales of activations are left out: the weights alone are read"
"""What is said of them."""
_PARTS = ("weight", *_SCALES, *_STATIC)
_SCALE_TYPES = (*SCALE_TYPES, ml_dtypes.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Fp8Entry(Entry):
    """One linear; `stored` has "weight" and "scale".

    tall, wide: rows and columns that share a scale.
    """

    tall: int
    wide: int

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        weight = self.stored["weight"]
        codes = finite(weight, weight.rows(start, stop), start).view(np.uint8)
        nb, group = count_groups(self.k, self.format.group), self.format.group or self.k
        scales = np.repeat(self._scales(start, stop), self.wide // group, axis=1)[:, :nb]
        zero = np.repeat(scales == 0, group, axis=1)[:, : self.k]
        # The format stores a scale of 0 as 1, by which kernels can divide.
        return QuantizedWeight(np.where(zero, np.uint8(0), codes) if zero.any() else codes, scales)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`: fp8·scale."""
        weights = self.stored["weight"].rows(start, stop).astype(np.float32)
        scales = np.repeat(self._scales(start, stop).astype(np.float32), self.wide, axis=1)
        return weights * scales[:, : self.k]

    def _scales(self, start: int, stop: int) -> Array:
        """Those of rows `start:stop`, `[n, ceil(K/wide)]`."""
        tensor = self.stored["scale"]
        first, last = start // self.tall, -(-stop // self.tall)
        few = tensor.rows(first, last).reshape(last - first, -1)
        few = np.repeat(checked(tensor, few, first), self.tall, axis=0)
        return few[start - first * self.tall :][: stop - start]


class Fp8Checkpoints(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "fp8"
    default_format = "fp8-e4m3:scale=block"

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        return stored.quantization.get("quant_method") in ("fp8", "fbgemm_fp8")

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        return read_fp8(stored, self.name, stored.quantization.get("weight_block_size"))

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        return fp8_reason(entry, ("block", "tensor"))

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        assert isinstance(entry.format, Fp8)
        module = entry.name.removesuffix(".weight")
        weight = TensorSpec(np.dtype(ml_dtypes.float8_e4m3fn), (entry.n, entry.k))
        block = entry.format.scale == "block"
        shape = (-(-entry.n // FP8_BLOCK), -(-entry.k // FP8_BLOCK)) if block else ()
        name = _SCALES[0] if block else _SCALES[1]
        scale = TensorSpec(np.dtype(np.float32), shape)
        return {f"{module}.weight": weight, f"{module}.{name}": scale}

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        return write_fp8(entry, self.specs(entry), FP8_BLOCK)

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        spelled = sorted({entry.format.spell() for entry in entries})
        if len(spelled) != 1:
            raise InputError(
                f"fp8 has one kind of scale for all weights, found {', '.join(spelled) or 'none'}: "
                "choose one format"
            )
        block = entries[0].format.group
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK] if block else None,
            "modules_to_not_convert": unquantized(floats),
        }


def fp8_reason(entry: Entry, scales: tuple[str, ...]) -> str | None:
    """Why a weight is not E4M3 with scales of one of these kinds, or None."""
    fmt = entry.format
    if not isinstance(fmt, Fp8) or fmt.numbers != "e4m3" or fmt.scale not in scales:
        kinds = " or ".join(f"fp8-e4m3:scale={scale}" for scale in scales)
        return f"it is {fmt.spell()}, wanted {kinds}"
    if entry.experts is not None:
        return ONE_PER_EXPERT
    return None


def write_fp8(entry: Entry, specs: Mapping[str, TensorSpec], tall: int) -> dict[str, Array]:
    """Weight and scale of one linear, in the order of `specs`; `tall` rows share a scale."""
    found = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
    weight, scale = list(found.values())[:2]
    for start, stop in entry.blocks():
        rows = entry.rows(start, stop)
        weight[start:stop] = np.ascontiguousarray(rows.codes).view(weight.dtype)
        if scale.ndim:
            scale[start // tall : -(-stop // tall)] = rows.scales[::tall].reshape(
                -1, *scale.shape[1:]
            )
        else:
            scale[()] = rows.scales[0, 0]
    return found


def read_fp8(stored: Stored, layout: str, said: Any) -> Checkpoint:
    """Every linear whose weight has a type of 8 bits.

    said: rows and columns that share a scale, as the configuration has them; None without.
    """
    entries: dict[str, Entry] = {}
    used: set[str] = set()
    notes: tuple[str, ...] = ()
    for module, parts in stored.modules(_PARTS).items():
        weight = parts.get("weight")
        if weight is None or weight.dtype not in _FORMATS:
            continue
        entry = _entry(stored, module, weight, parts, _block_size(stored, said))
        entries[entry.name] = entry
        used |= {tensor.name for tensor in parts.values()}
        if any(name in parts for name in _STATIC):
            notes = (ACTIVATIONS,)
    floats = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
    return Checkpoint(stored.path, layout, entries, floats, stored.config, notes)


def _block_size(stored: Stored, said: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, if blocks of 128 fill it; None where nothing is said."""
    if said is None:
        return None
    sizes = said if isinstance(said, list) and len(said) == 2 else [0, 0]
    if not all(isinstance(size, int) and size > 0 and size % FP8_BLOCK == 0 for size in sizes):
        raise InputError(
            f"{stored.path}: weight_block_size is {said!r}, wanted two multiples of {FP8_BLOCK}: "
            "other blocks have no format here"
        )
    return sizes[0], sizes[1]


def _entry(
    stored: Stored,
    module: str,
    weight: StoredTensor,
    parts: Mapping[str, StoredTensor],
    block: tuple[int, int] | None,
) -> Fp8Entry:
    name = next((name for name in _SCALES if name in parts), _SCALES[0])
    scale = part(module, parts, name)
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError(
            f"{weight.path}: {weight.name} is {list(weight.shape)}, wanted a matrix with elements"
        )
    n, k = weight.shape
    tall, wide, granularity = _granularity(scale, n, k, block)
    return Fp8Entry(
        name=called(module, "weight"),
        n=n,
        k=k,
        format=_format(weight, granularity),
        scale_dtype=scale_dtype(scale),
        bias=bias_of(module, stored.tensors),
        stored={"weight": weight, "scale": scale},
        tall=tall,
        wide=wide,
    )


def _format(weight: StoredTensor, granularity: str) -> Format:
    return parse(f"{_FORMATS[weight.dtype]}:scale={granularity}")


def _granularity(
    scale: StoredTensor, n: int, k: int, block: tuple[int, int] | None
) -> tuple[int, int, str]:
    """Rows and columns that share a scale, and what our format calls that.

    Raises:
        InputError: a shape that fits none.
    """
    tall, wide = block or (FP8_BLOCK, FP8_BLOCK)
    grid = -(-n // tall), -(-k // wide)
    if scale.shape in ((), (1,)) or (scale.shape == (1, 1) and not block):
        tall, wide, granularity = n, k, "tensor"
    elif scale.shape in ((n,), (n, 1)) and scale.shape != grid:
        tall, wide, granularity = 1, k, "row"
    else:
        granularity = "block"
    wanted(scale, _SCALE_TYPES, grid if granularity == "block" else scale.shape)
    return tall, wide, granularity


FP8 = Fp8Checkpoints()
