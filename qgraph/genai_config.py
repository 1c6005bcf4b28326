"""The files beside a decoder that onnxruntime-genai loads it with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qgraph.decoder_graph import cache_bits, cache_readers, head_sizes, shares_cache
from qgraph.errors import InputError
from qgraph.out_file import copy_file, write_file
from qgraph.runtimes.decoding import DecoderIO, decoder_io
from qgraph.runtimes.ort_session import model_inputs, value_spec
from qgraph.site_outputs import read_graph
from qgraph.tokenizer_files import read_object

NAME = "genai_config.json"
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PADS_BEHIND = (
    "onnxruntime-genai pads the shorter prompts of a batch behind their tokens, where the last "
    "token is padding: prompts by themselves, or of one length, are right; others want a model "
    "without --last-logits"
)
_NEEDED = ("model_type", "hidden_size", "num_attention_heads", "max_position_embeddings")


def find_config(folders: Sequence[Path]) -> tuple[Path, Mapping[str, Any]]:
    """The folder with the config.json that a model was made by, and what it says.

    Raises:
        InputError: there is none, or it does not say what is needed.
    """
    for folder in folders:
        if (folder / "config.json").is_file():
            found = read_object(folder / "config.json")
            config = {**found, **_text_config(found)}
            missing = [name for name in _NEEDED if name not in config]
            if missing:
                raise InputError(f"{folder / 'config.json'} has no {missing[0]}, for {NAME}")
            return folder, config
    raise InputError(
        f"{NAME} takes sizes and the kind of model from a Hugging Face config.json, and there is "
        f"none in {' or '.join(map(str, folders))}: put it beside the model, or name the folder "
        "that holds it with --tokenizer"
    )


def _text_config(found: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = found.get("text_config")
    return inner if isinstance(inner, dict) else {}


def genai_config(model: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What genai_config.json says of `model`, a decoder with a cache.

    Raises:
        InputError: it has no cache, or names for it that follow no pattern.
    """
    graph = read_graph(model)
    outputs = [value_spec(value) for value in graph.graph.outputs]
    io = decoder_io(model_inputs(graph), outputs, head_sizes(graph))
    if not io.cache:
        raise InputError(
            f"onnxruntime-genai runs decoders with a cache, and {model.name} has none: export it "
            "with past_key_values, or add one with --add-cache"
        )
    if any(cache_bits(node) == 4 for _, node in cache_readers(graph)):
        raise InputError(
            f"onnxruntime-genai takes a cache's last axis for the size of a head, and {model.name} "
            "has two channels in a byte: take --kv-cache int8"
        )
    pasts, presents = [pair.past.name for pair in io.cache], [pair.present for pair in io.cache]
    first = io.cache[0].past.shape
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    end = ids["eos_token_id"]
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = end[0] if isinstance(end, list) and end else end
    decoder = {
        "session_options": {"provider_options": []},
        "filename": model.name,
        "head_size": first[-1],
        "hidden_size": config["hidden_size"],
        "inputs": _inputs(io, pasts),
        "outputs": {
            "logits": io.logits,
            **_patterns(presents, "present_key_names", "present_value_names"),
        },
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": len(io.cache) // 2,
        "num_key_value_heads": first[-3],
    }
    return {
        "model": {
            **{name: value for name, value in ids.items() if value is not None},
            "context_length": config["max_position_embeddings"],
            "decoder": decoder,
            "type": config["model_type"],
            "vocab_size": io.vocabulary or config.get("vocab_size"),
        },
        "search": {
            "do_sample": False,
            "max_length": config["max_position_embeddings"],
            "num_beams": 1,
            "past_present_share_buffer": shares_cache(graph, pasts, presents),
        },
    }


def _inputs(io: DecoderIO, pasts: Sequence[str]) -> dict[str, str]:
    given = {"input_ids": io.tokens, "attention_mask": io.mask, "position_ids": io.positions}
    named = {name: spec.name for name, spec in given.items() if spec is not None}
    return named | _patterns(pasts, "past_key_names", "past_value_names")


def _patterns(names: Sequence[str], key: str, value: str) -> dict[str, str]:
    """`past_key_values.0.key`, … → `past_key_values.%d.key`, and so for values."""
    found = list(dict.fromkeys(re.sub(r"\d+", "%d", name) for name in names))
    layers = range(len(names) // 2)
    made = {pattern % layer for pattern in found for layer in layers if pattern.count("%d") == 1}
    if len(found) != 2 or made != set(names):
        raise InputError(
            f"onnxruntime-genai numbers the layers of a cache 0, 1, …, and this one is named "
            f"{', '.join(names[:3])}, …"
        )
    return dict(zip((key, value), found, strict=True))


def write_genai_config(
    model: Path, folder: Path, config: Mapping[str, Any], force: bool = False
) -> list[Path]:
    """Write genai_config.json beside `model`, and copy the tokenizer's files from `folder`.

    Files that are there stay as they are, but for genai_config.json with `force`.

    Raises:
        InputError: the model does not suit, genai_config.json is there, or the folder cannot be
            written.
    """
    target = model.absolute().parent / NAME
    if target.exists() and not force:
        raise InputError(f"{target} is there already: --force writes it anew")
    text = json.dumps(genai_config(model, config), indent=2) + "\n"
    written = [target]
    write_file(target, text.encode())
    for beside in map(target.with_name, _BESIDE):
        if (folder / beside.name).is_file() and not beside.exists():
            copy_file(folder / beside.name, beside)
            written.append(beside)
    return written
