"""GGUF files as the gguf package writes them, with blocks of any bytes that are valid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qgraph.checkpoints.gguf_blocks import BLOCK_TYPES, BlockType
from qgraph.formats.base import Array

TYPES = {each.name: each for each in BLOCK_TYPES.values()}
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "MXFP4": (),
}  # fmt: skip
"""Where the float16 numbers of a block lie."""


def blocks(kind: BlockType, count: int, seed: int = 0, spread: float = 0.0) -> Array:
    """Random blocks u8 `[count, nbytes]`; `spread`: decades over which the scales lie."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
    for at in HALVES[kind.name]:
        values = rng.standard_normal((count, 1)) * 10 ** rng.uniform(-spread, 0, (count, 1))
        found[:, at : at + 2] = values.astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        found[:, 0] = rng.integers(100, 140, count)
    return found


def rows(kind: BlockType, n: int, k: int, seed: int = 0, spread: float = 0.0) -> Array:
    """A random tensor `[n, k]` as its bytes, u8 `[n, k / size · nbytes]`."""
    return blocks(kind, n * k // kind.size, seed, spread).reshape(n, -1)


def like_weights(kind: BlockType, n: int, k: int, seed: int = 0) -> Array:
    """`rows` whose scales are of one size, and whose minimums lie about as far below 0 as the
    maximums above, as those of weights do."""
    found = blocks(kind, n * k // kind.size, seed)
    sizes = np.random.default_rng(seed).uniform(0.5, 1, (len(found), 2))
    sizes *= [0.01, 0.01 * (1 << kind.bits) / 2]
    sizes[:, 1] *= 1 if kind.size > 32 else -1  # which K types subtract
    for at, values in zip(HALVES[kind.name], sizes.T, strict=False):
        found[:, at : at + 2] = values[:, None].astype(np.float16).view(np.uint8)
    return found.reshape(n, -1)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Array | tuple[str, Array]],
    fields: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file of float tensors, and of (type, bytes); whole numbers and strings as metadata."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (fields or {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        kind, data = tensor if isinstance(tensor, tuple) else (None, tensor)
        number = gguf.GGMLQuantizationType[kind] if kind else None
        writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
