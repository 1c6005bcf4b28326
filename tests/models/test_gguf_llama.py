"""Weights and tokenizer of a Llama-family GGUF file, by hand examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qgraph.checkpoints.gguf_file import GgufFile, read_header
from qgraph.errors import InputError
from qgraph.models import gguf_llama


def header(pre: str = "smollm") -> GgufFile:
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "a", "t", "Ġ", "Ġa", "at", "12", "Ġat"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["1 2", "a t", "Ġ at"],
    }
    return GgufFile(Path("m.gguf"), fields, {}, {})


def written(path: Path, name: str) -> GgufFile:
    from gguf_files import write_gguf

    pytest.importorskip("gguf")
    heads = {"llama.attention.head_count": 1}
    rows = np.arange(8, dtype=np.float16).reshape(4, 2)
    return read_header(write_gguf(path / "m.gguf", {name: rows}, heads))


def test_weights_have_the_names_and_rows_of_transformers(tmp_path: Path) -> None:
    (found,) = gguf_llama.weights(written(tmp_path, "blk.2.attn_q.weight"))
    name, values = found
    assert name == "model.layers.2.self_attn.q_proj.weight"
    assert values.dtype == np.float32
    assert values.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ssm_in.weight"])
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=name):
        list(gguf_llama.weights(written(tmp_path, name)))


def test_digits_stay_apart_and_words_merge() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_str(gguf_llama.tokenizer_json(header()))
    # "12" has a merge, but each digit is a piece of its own; " at" is one piece and one token.
    assert made.encode("12 at<|end|>a").ids == [1, 2, 9, 0, 3]
    assert made.decode([3, 9, 1]) == "a at1"
    assert made.decode([0, 3]) == "a"  # special tokens are left out


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"\('gpt2', 'llama-bpe'\), wanted"):
        gguf_llama.tokenizer_json(header("llama-bpe"))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InputError, match=r"no field llama\.block_count"):
        header().field("llama.block_count")
