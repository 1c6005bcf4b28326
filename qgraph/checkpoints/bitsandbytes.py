"""bitsandbytes: NF4 and FP4, with double quantization or not, and LLM.int8.

4 bits: `weight` holds the codes of the flattened `[N, K]`, first element in the high half of a
byte (in whatever type the bytes are stored); `weight.absmax` a scale per block of the flattened
weight; `weight.quant_map` the 16 levels; `weight.quant_state.bitsandbytes__nf4` (or fp4) JSON in
bytes: shape, block size, and for scales that are quantized themselves the mean that was taken off
them. Those have their codes in `weight.absmax`, levels in `weight.nested_quant_map` and a scale
per 256 in `weight.nested_absmax`. W = level·scale.

8 bits: `weight` int8 `[N, K]`, `SCB` float32 `[N]`: W = code·SCB/127. The scale here is SCB/127
rounded to float32, so that the last bit of W may differ from code·SCB rounded first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qgraph.checkpoints.base import (
    ONE_PER_EXPERT,
    Checkpoint,
    CheckpointLayout,
    Entry,
    TensorSpec,
    unquantized,
)
from qgraph.checkpoints.bitsandbytes_weights import (
    BLOCKS,
    INT8_TOP,
    KINDS,
    STATE,
    four_bits,
    int8,
)
from qgraph.checkpoints.tensors import Stored
from qgraph.errors import InputError
from qgraph.formats.base import GROUPS, Array
from qgraph.formats.bitsandbytes import NESTED, Bnb4, scale_levels

_STATE_BYTES = 256  # when written; the JSON ends in spaces
_FOUR = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_PARTS = ("weight", *_FOUR, *(STATE + kind for kind in KINDS), "SCB", "weight_format")
_BYTE = np.dtype(np.uint8)


class Bitsandbytes(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "bitsandbytes"
    default_format = "nf4"

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        return stored.quantization.get("quant_method") == "bitsandbytes"

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        entries: dict[str, Entry] = {}
        used: set[str] = set()
        for module, parts in stored.modules(_PARTS).items():
            if not (set(parts) - {"weight"}):
                continue
            read = int8 if "SCB" in parts else four_bits
            entry = read(stored, module, parts)
            entries[entry.name] = entry
            used |= {tensor.name for tensor in parts.values()}
        floats = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
        return Checkpoint(stored.path, self.name, entries, floats, stored.config)

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        fmt = entry.format
        if entry.experts is not None:
            return ONE_PER_EXPERT
        if fmt.name in ("int8-row", "int8-pairs"):
            return None
        if not isinstance(fmt, Bnb4) or fmt.group not in BLOCKS:
            sizes = ", ".join(str(size) for size in BLOCKS if size in GROUPS)
            return f"it is {fmt.spell()}, wanted int8-row, or nf4 or fp4 in groups of {sizes}"
        if entry.k % fmt.group:
            return f"groups of {fmt.group} do not divide its rows of {entry.k}"
        return None

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        byte, single = _BYTE, np.dtype(np.float32)
        module = entry.name.removesuffix(".weight")
        if not isinstance(entry.format, Bnb4):
            return {
                f"{module}.weight": TensorSpec(np.dtype(np.int8), (entry.n, entry.k)),
                f"{module}.SCB": TensorSpec(single, (entry.n,)),
                f"{module}.weight_format": TensorSpec(byte, ()),
            }
        count = entry.n * entry.k // entry.format.group
        double = entry.format.double
        found = {
            "": TensorSpec(byte, (entry.n * entry.k // 2, 1)),
            ".absmax": TensorSpec(byte if double else single, (count,)),
            ".quant_map": TensorSpec(single, (16,)),
        }
        if double:
            found[".nested_absmax"] = TensorSpec(single, (-(-count // NESTED),))
            found[".nested_quant_map"] = TensorSpec(single, (256,))
        found[f".quant_state.bitsandbytes__{entry.format.name}"] = TensorSpec(byte, (_STATE_BYTES,))
        return {f"{entry.name}{suffix}": spec for suffix, spec in found.items()}

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        found = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.specs(entry).items()}
        if isinstance(entry.format, Bnb4):
            return _write_four_bits(entry, entry.format, found)
        weight, scb, form = found.values()
        form[()] = 0  # row by row
        for start, stop in entry.blocks():
            rows = entry.rows(start, stop)
            weight[start:stop] = rows.codes
            scb[start:stop] = rows.scales[:, 0].astype(np.float32) * INT8_TOP
        return found

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`."""
        kinds = {entry.format.spell() for entry in entries}
        if len(kinds) != 1:
            raise InputError(
                f"bitsandbytes has one kind of numbers for all weights, found "
                f"{', '.join(sorted(kinds)) or 'none'}: choose one format"
            )
        fmt = entries[0].format
        four = isinstance(fmt, Bnb4)
        found: dict[str, Any] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "llm_int8_skip_modules": unquantized(floats),
        }
        if isinstance(fmt, Bnb4):
            found |= {
                "bnb_4bit_quant_type": fmt.name,
                "bnb_4bit_use_double_quant": fmt.double,
                "bnb_4bit_compute_dtype": "float32",
                "bnb_4bit_quant_storage": "uint8",
            }
        return found


def _write_four_bits(entry: Entry, fmt: Bnb4, found: dict[str, Array]) -> dict[str, Array]:
    """Fill the tensors of a weight, and put its state behind them."""
    name, double = entry.name, fmt.double
    weight, absmax = found[name].reshape(entry.n, -1), found[f"{name}.absmax"]
    nb, mean = entry.k // fmt.group, 0.0
    for start, stop in entry.blocks():
        parts = fmt.pack(entry.rows(start, stop), fmt.default_layout)
        weight[start:stop] = parts["codes"].reshape(stop - start, -1)
        absmax[start * nb : stop * nb] = parts["scales"].reshape(-1)
        if double:
            few, first = parts["nested"], start * nb // NESTED
            found[f"{name}.nested_absmax"][first : first + len(few)] = few[:, 0]
            mean = float(few[0, 1])
    found[f"{name}.quant_map"][...] = fmt.levels
    if double:
        found[f"{name}.nested_quant_map"][...] = scale_levels()
    state = {
        "quant_type": fmt.name,
        "blocksize": fmt.group,
        "dtype": "float32",
        "shape": [entry.n, entry.k],
    }
    if double:
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": mean}
    text = json.dumps(state).encode().ljust(_STATE_BYTES)
    found[f"{name}.quant_state.bitsandbytes__{fmt.name}"][...] = np.frombuffer(text, np.uint8)
    return found


BITSANDBYTES = Bitsandbytes()
