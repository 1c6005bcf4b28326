"""Checkpoint folders of a few tensors, and checks that hold for every entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qgraph.checkpoints.base import CheckpointLayout, Entry
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.tensors import DTYPES
from qgraph.formats.base import Array, QuantizedWeight

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_folder(
    folder: Path, tensors: Mapping[str, Array], quantization: Mapping[str, Any]
) -> Path:
    """A folder with config.json and one safetensors file."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, tensor in tensors.items():
        shape, end = list(tensor.shape), at + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder


def in_pieces(entry: Entry, step: int) -> QuantizedWeight:
    """All rows of an entry, asked for `step` at a time."""
    starts = range(0, entry.total_rows, step)
    return QuantizedWeight.joined(
        [entry.rows(at, min(at + step, entry.total_rows)) for at in starts]
    )


def check_entry(entry: Entry) -> Array:
    """The float32 rows of an entry: by formula and format the same, whole and in pieces."""
    whole = entry.dequantized(0, entry.total_rows)
    assert whole.dtype == np.float32
    assert entry.difference(0, entry.total_rows) == 0
    step = max(8, entry.format.row_step(entry.k))
    columns = slice(None) if entry.order is None else entry.order
    in_order = entry.format.dequantize(in_pieces(entry, step))
    np.testing.assert_array_equal(in_order, whole[:, columns])
    for at in range(0, entry.total_rows, step):
        stop = min(at + step, entry.total_rows)
        np.testing.assert_array_equal(entry.dequantized(at, stop), whole[at:stop])
    return whole


def check_writing(layout: CheckpointLayout, entry: Entry, folder: Path) -> Entry:
    """Write an entry, read it back: equal codes, scales and values. Returns what was read."""
    assert layout.can_write(entry) is None
    written = layout.write(entry)
    specs = layout.specs(entry)
    assert {n: (a.dtype, a.shape) for n, a in written.items()} == {
        n: (s.dtype, s.shape) for n, s in specs.items()
    }
    write_folder(folder, written, layout.config([entry], ["model.norm.weight", "lm_head.weight"]))
    found = open_checkpoint(folder)
    assert found.layout == layout.name
    assert list(found.entries) == [entry.name]
    back = found.entries[entry.name]
    own, theirs = entry.rows(0, entry.total_rows), back.rows(0, back.total_rows)
    np.testing.assert_array_equal(own.codes, theirs.codes)
    np.testing.assert_array_equal(own.scales.astype(np.float32), theirs.scales.astype(np.float32))
    return back
