"""Opening a checkpoint: which layout it has, by what its files say."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from qgraph import registry
from qgraph.checkpoints.base import Checkpoint, CheckpointLayout
from qgraph.checkpoints.tensors import Stored, called, open_stored
from qgraph.errors import InputError
from qgraph.wording import counted, plural

FLOAT = "float"
"""The layout's name of checkpoints in which nothing is quantized."""
_PACKED = frozenset(("qweight", "qzeros", "weight_packed", "weight_scale_inv", "absmax", "SCB"))
"""Last words of the names of tensors that quantized weights alone have."""


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
            return _checked(layout.read(stored))
    if stored.quantization:
        _refuse(stored)
    _check_floats(stored)
    if not stored.tensors:
        raise InputError(
            f"{path} is no checkpoint: wanted a folder with safetensors and config.json, a "
            f".safetensors file or a .gguf file (it begins with {stored.head[:8]!r})"
        )
    return Checkpoint(stored.path, FLOAT, {}, stored.tensors, stored.config)


def _checked(found: Checkpoint) -> Checkpoint:
    """The checkpoint, with a warning of tensors beside its quantized weights that nothing reads."""
    warnings = list(found.warnings)
    twice = [name for name in found.floats if name in found.entries]
    if twice:
        warnings.append(
            f"{counted(len(twice), 'weight lies', 'weights lie')} there in float too, such as "
            f"{twice[0]}: the quantized {plural(len(twice), 'one counts', 'ones count')}"
        )
    beside: dict[str, list[str]] = {}
    for name in found.floats:
        module, _, word = name.rpartition(".")
        if word not in ("weight", "bias") and called(module, "weight") in found.entries:
            beside.setdefault(word, []).append(name)
    warnings += [
        f"{counted(len(names), 'tensor')} called {word} {plural(len(names), 'lies', 'lie')} beside "
        f"quantized weights and {plural(len(names), 'is', 'are')} not read, such as {names[0]}: "
        "the model's numbers are others if it computes with them"
        for word, names in beside.items()
    ]
    return dataclasses.replace(found, warnings=tuple(warnings))


def _check_floats(stored: Stored) -> None:
    """Refuse quantized weights of which no configuration says how they are stored."""
    for name in stored.tensors:
        if name.rpartition(".")[2] in _PACKED:
            raise InputError(
                f"{stored.path} has {name}, a part of a quantized weight, and no configuration "
                "that says how it is stored: wanted quantization_config in a config.json beside "
                "it; download that too"
            )


def _refuse(stored: Stored) -> None:
    """Say that the method is not known, and which are."""
    method = str(stored.quantization.get("quant_method", "none named"))
    known = registry.names("checkpoint")
    raise InputError(
        f"{stored.path} is quantized by the method {method!r}"
        f"{registry.did_you_mean(method, known)} (known: {', '.join(known)})"
    )
