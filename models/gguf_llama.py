"""A Llama-family GGUF file as float32 weights under transformers' names, and its tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

from .torch_onnx import need

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # GGUF's token type of special tokens


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` over the mapped file (Any: the package is untyped)."""
    need({"gguf": "checkpoints"}, "reading a GGUF file")
    import gguf

    return gguf.GGUFReader(path)


def field(reader: Any, name: str) -> Any:
    """The value of a metadata field.

    Raises:
        InputError: the file has no such field.
    """
    found = reader.get_field(name)
    if found is None:
        raise InputError(f"the GGUF file has no field {name}")
    return found.contents()


def weights(reader: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each tensor dequantized to float32, `[N, K]` or `[N]`, q and k rows in transformers' order.

    Raises:
        InputError: a tensor whose name is not one of a Llama decoder.
    """
    import gguf

    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            values = unpermute(values, int(field(reader, f"llama.attention.{heads[kind]}")))
        yield transformers_name(tensor.name), values


def transformers_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight.

    Raises:
        InputError: the name is not one of a Llama decoder.
    """
    match name.split("."):
        case [kind, "weight"] if kind in _GLOBAL:
            return f"{_GLOBAL[kind]}.weight"
        case ["blk", layer, kind, "weight"] if kind in _LAYER:
            return f"model.layers.{int(layer)}.{_LAYER[kind]}.weight"
    raise InputError(f"the GGUF tensor {name} is not part of a Llama decoder")


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k: `[N, K]`, N = heads * head size.

    The file pairs rotary rows as neighbours (2i, 2i + 1); transformers pairs
    i with i + head size / 2.
    """
    n, k = rows.shape
    pairs = rows.reshape(heads, n // heads // 2, 2, k)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(n, k))


def tokenizer_json(reader: Any) -> str:
    """A byte-level BPE tokenizer in the `tokenizers` library's JSON.

    Only SmolLM's pre-tokenizer: each digit is a piece of its own, then GPT-2's regex.

    Raises:
        InputError: the file's tokenizer is of another kind.
    """
    found = (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre"))
    if found != ("gpt2", "smollm"):
        raise InputError(f"the GGUF tokenizer is {found}, wanted ('gpt2', 'smollm')")
    tokens = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    flags = {"special": True, "normalized": False}
    flags |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": token} | flags
                for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind == _CONTROL
            ],
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    byte_level | {"use_regex": True},
                ],
            },
            "decoder": byte_level | {"use_regex": True},
            "model": {
                "type": "BPE",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in field(reader, "tokenizer.ggml.merges")],
            },
        },
        ensure_ascii=False,
    )
