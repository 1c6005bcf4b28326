"""The config.json of a Hugging Face folder, without what would choose code or other files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qgraph.errors import InputError
from qgraph.frontends import hf_weights

_LARGEST = 20_000_000
_PACKED = ("quantization_config", "compression_config")
# Implementations can be kernels of a hub, which are code; the others name classes, patches and
# files. All of them say how to compute, never what; the type is that of the stored weights.
_CHOOSING = re.compile(
    r".*_implementation(_internal)?|auto_map|custom_pipelines|use_kernels|kernel_config"
    r"|fusion_config|distributed_config|transformers_weights|_?name_or_path|_commit_hash"
    r"|quantization_config|compression_config|(torch_)?dtype"
)


def read(folder: Path, packed: bool = False) -> dict[str, Any]:
    """The configuration of a float model, as transformers' classes take it.

    packed: the folder's weights may be quantized; `cleaned` takes away what is said of that.

    Raises:
        InputError: no JSON, no model_type, or weights that are quantized already.
    """
    path = hf_weights.within(folder, "config.json")
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{path} has {path.stat().st_size} bytes; no configuration is so long")
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error}): download it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise InputError(
            f"{path} names no model_type: wanted the config.json of a transformers model"
        )
    for item in () if packed else _packed(found):
        method = item.get("quant_method", "?") if isinstance(item, dict) else "?"
        raise InputError(
            f"{folder} holds quantized weights (quant_method {method!r}): capture wants the "
            "float model that they were made from"
        )
    return found


def cleaned(item: Any) -> Any:
    """A configuration without keys that choose code or files, at any depth."""
    if isinstance(item, list):
        return [cleaned(value) for value in item]
    if not isinstance(item, dict):
        return item
    return {key: cleaned(value) for key, value in item.items() if not _CHOOSING.fullmatch(key)}


def _packed(item: Any) -> Iterator[Any]:
    """Every description of a quantization that is not empty."""
    if isinstance(item, list):
        for value in item:
            yield from _packed(value)
    elif isinstance(item, dict):
        for key, value in item.items():
            if key in _PACKED and value:
                yield value
            yield from _packed(value)
