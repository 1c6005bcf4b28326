"""What a GGUF file says beside its tensors, made from the folder of a Hugging Face model.

Keys are those of llama.cpp for decoders of the Llama and Qwen families with a byte-level BPE.
Numbers are u32, fractions f32. What has no key here is refused: a file that says less than its
model would load and answer wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgraph.checkpoints.folder_files import read_json
from qgraph.checkpoints.gguf_names import Names
from qgraph.errors import InputError

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' `model_type` → the architecture."""
_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_LARGEST_VOCABULARY = 10_000_000
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
"""The regex that cuts words → llama.cpp's name for it."""


def names_of_config(config: Mapping[str, Any]) -> Names:
    """The tensor names and row order of a model.

    Raises:
        InputError: a model that GGUF files are not written for.
    """
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise InputError(
            f"gguf is written for the model types {', '.join(_ARCHITECTURES)}, found {kind!r}"
            + ("" if kind else ": name a GGUF file of the float model, or its folder, with --like")
        )
    heads = _number(config, "num_attention_heads")
    if _ARCHITECTURES[kind] != "llama":
        return Names(_ARCHITECTURES[kind])
    keys = _number(config, "num_key_value_heads", heads)
    return Names("llama", {"attn_q": heads, "attn_k": keys})


def fields_of(config: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The metadata of a model, and of its tokenizer where the folder has one.

    Raises:
        InputError: the configuration lacks a number, or model or tokenizer have no words here.
    """
    architecture = names_of_config(config).architecture
    heads = _number(config, "num_attention_heads")
    size = _number(config, "head_dim", _number(config, "hidden_size") // heads)
    found: dict[str, Any] = {"general.architecture": architecture, "general.type": "model"}
    found["general.quantization_version"] = 2
    own: dict[str, Any] = {key: _number(config, name) for key, name in _NUMBERS.items()}
    own["attention.head_count_kv"] = _number(config, "num_key_value_heads", heads)
    own["attention.layer_norm_rms_epsilon"] = _fraction("rms_norm_eps", config, 1e-6)
    own["attention.key_length"] = own["attention.value_length"] = size
    own["rope.dimension_count"] = size
    own["rope.freq_base"] = _rope_base(config)
    own["vocab_size"] = _number(config, "vocab_size")
    found |= {f"{architecture}.{key}": value for key, value in own.items()}
    tokenizer = read_json(folder, "tokenizer.json") if folder is not None else {}
    if folder is not None and tokenizer:
        found |= _tokenizer(tokenizer, config, folder)
    return found


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 32:
        raise InputError(f"config.json has {name} {value!r}, wanted a whole number above 0")
    return value


def _rope_base(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies, which must not be scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        raise InputError(
            f"config.json scales its rotary positions ({kind!r}), which is not written to GGUF: "
            "wanted the type 'default'"
        )
    holder = rope if isinstance(rope, dict) and "rope_theta" in rope else config
    return _fraction("rope_theta", holder, 10000.0)


def _fraction(name: str, config: Mapping[str, Any], default: float) -> float:
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InputError(f"config.json has {name} {value!r}, wanted a number above 0")
    return float(value)


def _tokenizer(table: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a byte-level BPE in the `tokenizers` library's JSON."""
    try:
        model, added = table["model"], table.get("added_tokens") or []
        vocabulary = {**model["vocab"], **{each["content"]: each["id"] for each in added}}
        byte_level = model["type"] == "BPE" and not model.get("byte_fallback")
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        special = {each["id"]: bool(each.get("special")) for each in added}
        pre = _pre_tokenizer(table.get("pre_tokenizer"))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: tokenizer.json has no BPE ({error!r})") from None
    if not byte_level or pre is None:
        raise InputError(
            f"{folder}: tokenizer.json is no byte-level BPE that llama.cpp cuts words for as it "
            f"does ({', '.join(('smollm', 'gpt-2', *_SPLITS.values()))}): its tokens would differ. "
            "A folder without tokenizer.json gives a file with the weights alone"
        )
    size = _number(config, "vocab_size")
    if size > _LARGEST_VOCABULARY:
        raise InputError(f"config.json has a vocab_size of {size}: no tokenizer has so many")
    known = range(size)
    bad = [token for token, at in vocabulary.items() if type(at) is not int or at not in known]
    if bad:
        raise InputError(
            f"{folder}: tokenizer.json gives {bad[0]!r} the number {vocabulary[bad[0]]!r}, and "
            f"config.json has a vocab_size of {size}"
        )
    tokens, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for token, number in vocabulary.items():
        tokens[number], types[number] = token, _NORMAL
        if number in special:
            types[number] = _CONTROL if special[number] else _USER_DEFINED
    found: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types}
    settings = read_json(folder, "tokenizer_config.json")
    found |= {"merges": merges, "add_bos_token": _begins(table, settings)}
    for key in ("bos", "eos", "pad"):
        number = config.get(f"{key}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < size:
            found["padding_token_id" if key == "pad" else f"{key}_token_id"] = number
    fields = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    template = settings.get("chat_template")
    return {**fields, "tokenizer.chat_template": template} if isinstance(template, str) else fields


def _begins(table: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a text gets a first token of its own, as the tokenizer's settings or template say."""
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    post = table.get("post_processor")
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    pieces = [step.get("single") for step in steps if isinstance(step, dict)]
    firsts = [each[0] for each in pieces if isinstance(each, list) and each]
    return any(isinstance(first, dict) and "SpecialToken" in first for first in firsts)


def _pre_tokenizer(table: Any) -> str | None:
    """Llama.cpp's name for how words are cut, or None."""
    steps = table.get("pretokenizers", [table]) if isinstance(table, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        whole = steps[0].get("individual_digits") and steps[1].get("use_regex", True)
        return "smollm" if whole else None
    if kinds == ["Split", "ByteLevel"] and isinstance(steps[0].get("pattern"), dict):
        return _SPLITS.get(str(steps[0]["pattern"].get("Regex")))
    return None
