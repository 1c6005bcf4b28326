"""A checkpoint of any size that takes little disk: zeros that were never written."""

from __future__ import annotations

import json
from pathlib import Path


def sparse_checkpoint(folder: Path, *, layers: int, n: int, k: int, shards: int = 1) -> Path:
    """`layers` float16 linears `[n, k]`, all zeros, in `shards` files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    size, places = 2 * n * k, {}
    for shard in range(shards):
        name = "model.safetensors"
        if shards > 1:
            name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = [f"layers.{at}.up_proj.weight" for at in range(shard, layers, shards)]
        header = {
            tensor: {"dtype": "F16", "shape": [n, k], "data_offsets": [at * size, (at + 1) * size]}
            for at, tensor in enumerate(own)
        }
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size * len(own))
        places |= dict.fromkeys(own, name)
    if shards > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
