"""Names, row order and tokenizer of a Llama-family GGUF file, by hand examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qgraph.errors import InputError
from qgraph.models import gguf_llama


class Reader:
    """What GGUFReader answers for a field, without a file."""

    def __init__(self, **fields: Any) -> None:
        self._fields = {name.replace("__", "."): value for name, value in fields.items()}

    def get_field(self, name: str) -> SimpleNamespace | None:
        if name not in self._fields:
            return None
        return SimpleNamespace(contents=lambda: self._fields[name])


def reader(pre: str = "smollm") -> Reader:
    return Reader(
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre=pre,
        tokenizer__ggml__tokens=["<|end|>", "1", "2", "a", "t", "Ġ", "Ġa", "at", "12", "Ġat"],
        tokenizer__ggml__token_type=[3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        tokenizer__ggml__merges=["1 2", "a t", "Ġ at"],
    )


def test_rotary_pairs_are_halves_again() -> None:
    # One head of size 6: the file holds rows 0 3 | 1 4 | 2 5; a second head follows it.
    file_order = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], np.float32)
    rows = gguf_llama.unpermute(np.stack([file_order, -file_order], 1), heads=2)
    assert rows[:, 0].tolist() == list(range(12))
    assert rows[:, 1].tolist() == [-i for i in range(12)]


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.11.attn_q.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
    ],
)
def test_names(name: str, wanted: str) -> None:
    assert gguf_llama.transformers_name(name) == wanted


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ssm_in.weight"])
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        gguf_llama.transformers_name(name)


def test_digits_stay_apart_and_words_merge() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_str(gguf_llama.tokenizer_json(reader()))
    # "12" has a merge, but each digit is a piece of its own; " at" is one piece and one token.
    assert made.encode("12 at<|end|>a").ids == [1, 2, 9, 0, 3]
    assert made.decode([3, 9, 1]) == "a at1"
    assert made.decode([0, 3]) == "a"  # special tokens are left out


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"\('gpt2', 'llama-bpe'\), wanted"):
        gguf_llama.tokenizer_json(reader("llama-bpe"))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InputError, match=r"no field llama\.block_count"):
        gguf_llama.field(reader(), "llama.block_count")
