"""Samples from text, .npz and .jsonl: what is read, and what is refused with which words."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qgraph import InputError, MissingExtra
from qgraph.text import longest_sample, read_samples, token_blocks


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words w0 to w9, a special token that it would add, and a cut and padding it would make."""
    words = {f"w{i}": i for i in range(10)} | {"[BOS]": 10}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 10)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=64, pad_token="w0")
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i % 10}" for i in range(23)), encoding="utf-8")
    return path


def test_text_is_cut_into_consecutive_blocks(text: Path, tokenizer: Path) -> None:
    found = token_blocks(text, tokenizer, sequence=10, samples=20)
    assert found.ids.dtype == np.int64
    np.testing.assert_array_equal(found.ids, [range(10), range(10)])
    assert found.vocabulary == 11
    assert token_blocks(text, tokenizer, sequence=5, samples=3).ids.shape == (3, 5)


def test_a_text_shorter_than_a_block(text: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError, match="23 tokens, less than one block of 24"):
        token_blocks(text, tokenizer, sequence=24)


def test_wrong_files(tmp_path: Path, text: Path, tokenizer: Path) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"not UTF-8 \(byte 2\)"):
        token_blocks(binary, tokenizer)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        token_blocks(tmp_path / "missing.txt", tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no tokenizer\.json in the folder .*empty: give"):
        token_blocks(text, tmp_path / "empty")
    with pytest.raises(InputError, match=r"no tokenizer\.json at .*missing\.json"):
        token_blocks(text, tmp_path / "missing.json")


def test_a_folder_stands_for_the_tokenizer_in_it(text: Path, tokenizer: Path) -> None:
    found = token_blocks(text, tokenizer.parent, sequence=5)
    np.testing.assert_array_equal(found.ids, token_blocks(text, tokenizer, sequence=5).ids)


@pytest.mark.parametrize(
    "content,reason",
    [
        (b'{"a": 1}', "expected `,` or `}` at line 1 column 5"),
        (b'{"version": "1.0"}', "Model missing"),
        (b"[1]", "invalid type: sequence"),
        (b"", "EOF while parsing"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    ],
)
def test_what_is_no_tokenizer_says_so(
    text: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "other.json").write_bytes(content)
    words = f"other.json is no tokenizer of the tokenizers library.*{re.escape(reason)}"
    with pytest.raises(InputError, match=words):
        token_blocks(text, tmp_path / "other.json")


def test_without_tokenizers(text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install tokenizers, or '\.\[text\]'.*--data"):
        token_blocks(text, tokenizer)


def test_npz_has_a_leading_sample_axis(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    pixels = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    np.savez(path, pixels=pixels, kind=np.array([5, 6, 7]))
    found = list(read_samples(path, 2))
    assert len(found) == 2
    np.testing.assert_array_equal(found[1]["pixels"], pixels[1:2])
    np.testing.assert_array_equal(found[1]["kind"], [6])


def write_npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


@pytest.mark.parametrize(
    "arrays,words",
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros((3, 3))}, r"differ.*x \(2, 3\), y \(3, 3\)"),
        ({"x": np.zeros(())}, "sample axis"),
        ({"x": np.array([{}])}, r"no \.npz file of plain arrays"),
        ({"x": np.zeros((0, 3))}, "holds no samples"),
        ({}, "holds no samples"),
    ],
)
def test_wrong_npz(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        list(read_samples(write_npz(tmp_path, **arrays)))


def test_npz_never_unpickles(tmp_path: Path) -> None:
    trap = tmp_path / "ran"

    class Pickled:
        def __reduce__(self) -> Any:
            return Path.touch, (trap,)

    with pytest.raises(InputError, match="plain arrays"):
        list(read_samples(write_npz(tmp_path, x=np.array([Pickled()], object))))
    assert not trap.exists()


def test_an_archive_of_other_things(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(InputError, match=r"its member notes\.txt is no array"):
        list(read_samples(tmp_path / "data.npz"))


def test_nobody_is_told_to_unpickle(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(pickle.dumps([1]))
    with pytest.raises(InputError, match="it holds Python objects") as caught:
        list(read_samples(tmp_path / "data.npz"))
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.parametrize("name", ["data.npz", "data.jsonl"])
def test_a_pipe_is_no_data(tmp_path: Path, name: str) -> None:
    """Nobody writes into it: reading would wait for ever."""
    os.mkfifo(tmp_path / name)
    for read in (lambda path: list(read_samples(path)), lambda path: longest_sample(path, 1)):
        with pytest.raises(InputError, match="no regular file"):
            read(tmp_path / name)


def test_damaged_files(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", b"no zip at all"):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(InputError, match=r"data\.npz"):
            list(read_samples(tmp_path / "data.npz"))
    with pytest.raises(InputError, match="No such file"):
        list(read_samples(tmp_path / "missing.jsonl"))
    with pytest.raises(InputError, match=r"neither a \.npz nor a \.jsonl"):
        list(read_samples(tmp_path / "data.csv"))


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "attention_mask": [1, 0]}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    first, second = read_samples(path)
    assert {name: array.tolist() for name, array in first.items()} == {"input_ids": [[1, 2, 3]]}
    assert second["attention_mask"].tolist() == [[1, 0]]
    assert second["input_ids"].dtype == np.int64
    assert len(list(read_samples(path, 1))) == 1


@pytest.mark.parametrize(
    "line,words",
    [
        ("{", "line 1 is no JSON"),
        ("[1, 2]", "wanted an object"),
        ('{"ids": [1]}', "wanted an object"),
        ('{"input_ids": []}', "wanted an object"),
        ('{"input_ids": [1.5]}', "input_ids is no list of integers"),
        ('{"input_ids": [true]}', "input_ids is no list of integers"),
        ('{"input_ids": [[1]]}', "input_ids is no list of integers"),
        ('{"input_ids": [1], "text": "a"}', "text is no list of integers"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}', "1 entries, input_ids has 2"),
        ('{"input_ids": [99999999999999999999]}', "beyond 64 bits"),
        ("", "holds no samples"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_wrong_jsonl(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=words):
        list(read_samples(path))
