"""The safetensors of a local Hugging Face folder: which files, all within it, and their tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qgraph.errors import InputError

_LARGEST_INDEX = 200_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def files(folder: Path) -> list[Path]:
    """The safetensors that hold the model: one, or those that the index lists.

    Raises:
        InputError: there are none, or one lies outside the folder.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter: merge it into its model and save that")
    if os.path.lexists(folder / _ONE):  # also a link to nowhere
        return [within(folder, _ONE)]
    if os.path.lexists(folder / _INDEX):
        return [within(folder, name) for name in _shards(within(folder, _INDEX))]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise InputError(
            f"{folder} has {others[0]}, but neither {_ONE} nor {_INDEX}: download the index too, "
            f"or rename the file to {_ONE} if it is all of the model"
        )
    if pickles:
        raise InputError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run any code: "
            f"wanted {_ONE}. Many models have it beside the pickle; else load the "
            "model where you trust it, and save_pretrained writes it"
        )
    raise InputError(f"{folder} has no {_ONE}: download the weights too")


def within(folder: Path, name: str) -> Path:
    """The file `name` of a folder, if its real path lies in the folder.

    In the cache of huggingface_hub, a folder of links, the links may lead to the `blobs`
    beside it.

    Raises:
        InputError: it lies elsewhere, or is no file.
    """
    home = folder.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{folder} lacks {name!r} ({error}): download it too") from None
    if not any(real.is_relative_to(each) for each in homes):
        raise InputError(
            f"{folder} is refused: its {name!r} is {real}, outside the folder. If you want that "
            "file, copy it into the folder"
        )
    if not real.is_file():
        raise InputError(f"{path} is no file")
    return path


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


def _shards(index: Path) -> list[str]:
    """The files that an index lists."""
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise InputError(f"{index} has {index.stat().st_size} bytes; no index is so long")
        found = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{index} is no JSON ({error}): download it again") from None
    places = found.get("weight_map") if isinstance(found, dict) else None
    listed = list(places.values()) if isinstance(places, dict) else []
    names = {name for name in listed if isinstance(name, str)}
    if not names or len(names) < len({str(each) for each in listed}):
        raise InputError(f"{index} has no weight_map of files: download it again")
    for name in names:
        if not name.endswith(".safetensors"):
            raise InputError(f"{index} lists {name!r}: wanted safetensors")
    return sorted(names)
