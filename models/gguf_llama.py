"""A Llama-family GGUF file as float32 weights under transformers' names, and its tokenizer."""

import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from qgraph.checkpoints.gguf_file import GgufFile
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError

_CONTROL = 3  # GGUF's token type of special tokens
_PLACES = ("model.", "lm_head.")


def weights(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each tensor dequantized to float32, `[N, K]` or `[N]`, q and k rows in transformers' order.

    Raises:
        InputError: a tensor whose name is not one of a Llama decoder.
    """
    found = open_checkpoint(file.path)
    for name in (*found.entries, *found.floats):
        if not name.startswith(_PLACES):
            raise InputError(f"the GGUF tensor {name} is not part of a Llama decoder")
    for entry in found.entries.values():
        yield entry.name, entry.dequantized(0, entry.total_rows)
    for name, tensor in found.floats.items():
        yield name, tensor.rows(0, tensor.shape[0]).astype(np.float32, copy=False)


def tokenizer_json(file: GgufFile) -> str:
    """A byte-level BPE tokenizer in the `tokenizers` library's JSON.

    Only SmolLM's pre-tokenizer: each digit is a piece of its own, then GPT-2's regex.

    Raises:
        InputError: the file's tokenizer is of another kind.
    """
    found = (file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre"))
    if found != ("gpt2", "smollm"):
        raise InputError(f"the GGUF tokenizer is {found}, wanted ('gpt2', 'smollm')")
    tokens = file.field("tokenizer.ggml.tokens")
    kinds = file.field("tokenizer.ggml.token_type")
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
                "merges": [merge.split(" ") for merge in file.field("tokenizer.ggml.merges")],
            },
        },
        ensure_ascii=False,
    )
