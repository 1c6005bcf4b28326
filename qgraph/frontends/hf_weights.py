"""The safetensors of a local Hugging Face folder: which files, all within it, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qgraph.checkpoints.folder_files import shards
from qgraph.checkpoints.folder_files import within as within
from qgraph.errors import InputError


def files(folder: Path) -> list[Path]:
    """The safetensors that hold the model: one, or those that the index lists.

    Raises:
        InputError: there are none, or one lies outside the folder.
    """
    return [path for path, _ in shards(folder)]


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """Every tensor by name, mapped, in the type it is stored in.

    Raises:
        InputError: a file is damaged.
    """
    import safetensors

    found: dict[str, Any] = {}
    for path in paths:
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"{path} cannot be read: {type(error).__name__}: {error}. Download it again"
            ) from None
    return found


def check_types(folder: Path, tensors: Mapping[str, Any], floats: Iterable[str]) -> None:
    """Refuse integers and 8-bit floats where the model has float parameters.

    Args:
        folder: for messages.
        tensors: what was read.
        floats: the names of the model's float parameters, and those names without its prefix.

    Raises:
        InputError: names the first such tensor.
    """
    known = set(floats)
    for name, tensor in tensors.items():
        narrow = tensor.is_floating_point() and tensor.element_size() < 2
        if narrow or (not tensor.is_floating_point() and name in known):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"{folder} holds {name} as {kind}, and its config.json names no quantization, so "
                "the scales are not known: capture wants the float model that it was made from"
            )


def notes(tensors: Mapping[str, Any], half: bool) -> list[str]:
    """What changes when the tensors are read as float32, or as they are with `half`."""
    kinds = {str(tensor.dtype) for tensor in tensors.values()}
    found = []
    if "torch.bfloat16" in kinds:
        found.append(
            "weights stored as bfloat16 are float32 in the graph, which holds them exactly and "
            "takes twice the bytes"
        )
    if "torch.float16" in kinds and not half:
        found.append(
            "weights stored as float16 are float32 in the graph, as others of this model are"
        )
    if "torch.float64" in kinds:
        found.append("weights stored as float64 are rounded to float32")
    return found
