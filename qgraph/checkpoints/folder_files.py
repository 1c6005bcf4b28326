"""The files of a Hugging Face folder: which hold the model, all of them within the folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qgraph.errors import InputError

_LARGEST_JSON = 200_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A table in a JSON file of a folder; empty where there is no such file.

    Raises:
        InputError: the file lies outside the folder, is too long, or is no table.
    """
    if not os.path.lexists(folder / name):
        return {}
    found = _json(within(folder, name))
    if not isinstance(found, dict):
        raise InputError(f"{folder / name} is no table: download it again")
    return found


def _json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise InputError(f"{path} has {path.stat().st_size} bytes; wanted a short JSON file")
        return json.loads(path.read_bytes(), object_pairs_hook=once_each)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error}): download it again") from None


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON, as `object_pairs_hook` of `json.loads` has it.

    Raises:
        ValueError: a key stands there twice, and readers differ on which of the two counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:200]!r} stands there twice")
    return found


def shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The safetensors that hold the model, with the tensors that the index lists for each.

    None in place of names where there is one file and no index.

    Raises:
        InputError: there are none, or one lies outside the folder.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter: merge it into its model and save that")
    if os.path.lexists(folder / ONE_FILE):  # also a link to nowhere
        yield within(folder, ONE_FILE), None
        return
    if os.path.lexists(folder / INDEX):
        for name, tensors in _index(folder).items():
            yield within(folder, name), tensors
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise InputError(
            f"{folder} has {others[0]}, but neither {ONE_FILE} nor {INDEX}: download the index "
            f"too, or rename the file to {ONE_FILE} if it is all of the model"
        )
    if pickles:
        raise InputError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run any code: "
            f"wanted {ONE_FILE}. Many models have it beside the pickle; else load the "
            "model where you trust it, and save_pretrained writes it"
        )
    single = sorted(path.name for path in folder.glob("*.gguf"))
    if single:
        raise InputError(f"{folder} has no {ONE_FILE}, but {single[0]}: name that file itself")
    raise InputError(f"{folder} has no {ONE_FILE}: download the weights too")


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


def _index(folder: Path) -> dict[str, list[str]]:
    """The files that the index lists, sorted, each with its tensors."""
    index = folder / INDEX
    listed = _json(within(folder, INDEX))
    places = listed.get("weight_map") if isinstance(listed, dict) else None
    if not (isinstance(places, dict) and places):
        raise InputError(f"{index} has no weight_map of files: download it again")
    found: dict[str, list[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str):
            raise InputError(f"{index} has no weight_map of files: download it again")
        if not name.endswith(".safetensors"):
            raise InputError(f"{index} lists {name!r}: wanted safetensors")
        found.setdefault(name, []).append(tensor)
    return dict(sorted(found.items()))
