"""Opening a checkpoint: which layout it has, by what its files say."""

from __future__ import annotations

import os
from pathlib import Path

from qgraph import registry
from qgraph.checkpoints.base import Checkpoint, CheckpointLayout
from qgraph.checkpoints.tensors import Stored, open_stored
from qgraph.errors import InputError

FLOAT = "float"
"""The layout's name of checkpoints in which nothing is quantized."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a Hugging Face folder, a safetensors file, or a GGUF file.

    Headers are read, and the small tensors by which zero points are known; no weights.

    Raises:
        InputError: no checkpoint, a layout that is not known, or one that is damaged.
    """
    stored = open_stored(Path(path))
    for name in registry.names("checkpoint"):
        layout: CheckpointLayout = registry.load("checkpoint", name)
        if layout.detect(stored):
            return layout.read(stored)
    if stored.quantization:
        _refuse(stored)
    if not stored.tensors:
        raise InputError(
            f"{path} is no checkpoint: wanted a folder with safetensors and config.json, a "
            f".safetensors file or a .gguf file (it begins with {stored.head[:8]!r})"
        )
    return Checkpoint(stored.path, FLOAT, {}, stored.tensors, stored.config)


def _refuse(stored: Stored) -> None:
    """Say that the method is not known, and which are."""
    method = str(stored.quantization.get("quant_method", "none named"))
    known = registry.names("checkpoint")
    raise InputError(
        f"{stored.path} is quantized by the method {method!r}"
        f"{registry.did_you_mean(method, known)} (known: {', '.join(known)})"
    )
