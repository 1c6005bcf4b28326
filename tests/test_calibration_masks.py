"""Calibration data beside its sources: masks, empty rows, lengths, the model's own tokenizer."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

import qgraph
from qgraph import InputError, registry
from qgraph.calibration import Calibration, CalibrationData

Arrays = dict[str, np.ndarray[Any, Any]]
IDS = np.arange(16).reshape(2, 8)


def write_model(folder: Path, mask: list[str] | None, kind: int = TensorProto.INT64) -> Path:
    """`input_ids` to rows of a table; where `mask` is given, with a mask of that shape, unread."""
    table = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    ins = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "T"])]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["y"], "embed")]
    if mask:
        ins.append(helper.make_tensor_value_info("attention_mask", kind, mask))
    graph = helper.make_graph(
        nodes, "g", ins,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "T", 4])],
        [numpy_helper.from_array(table, "table")],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, folder / "m.onnx")
    return folder / "m.onnx"


def load(source: Any, model: Path, **options: Any) -> Calibration:
    return CalibrationData(source, **options).load(registry.load("target", "ort-cpu"), model)


def feeds(*masks: Any) -> list[Arrays]:
    rows = zip(IDS, masks, strict=True)
    return [{"input_ids": row[None], "attention_mask": np.asarray([mask])} for row, mask in rows]


SHORT, WHOLE = [1] * 3 + [0] * 5, [1] * 8


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_padding_does_not_count_whether_the_model_takes_a_mask_or_not(
    tmp_path: Path, takes: bool, dtype: Any
) -> None:
    if takes and dtype is np.float32:
        pytest.skip("no integers")
    model = write_model(tmp_path, ["B", "T"] if takes else None)
    data = load(feeds(np.array(SHORT, dtype), np.array(WHOLE, dtype)), model)
    (mask,) = data.masks
    assert mask is not None
    assert mask.tolist() == [[bool(item) for item in SHORT], [True] * 8]
    assert data.tokens == 11
    assert set(data.batches[0]) == {"input_ids"} | ({"attention_mask"} if takes else set())


def test_a_mask_of_ones_says_nothing(tmp_path: Path) -> None:
    data = load(feeds(WHOLE, WHOLE), write_model(tmp_path, None))
    assert (data.masks, data.tokens) == ((None,), 16)


def test_a_mask_to_add_to_scores_says_nothing_of_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path, ["B", "T"], TensorProto.FLOAT)
    masks = np.where(np.array([SHORT, WHOLE]) == 1, 0.0, -1e9).astype(np.float32)
    data = load(feeds(*masks), model)
    assert (data.masks, data.tokens) == ((None,), 16)
    assert data.batches[0]["attention_mask"].min() < 0


@pytest.mark.parametrize(
    "masks,words",
    [
        ([WHOLE, [1, 1, 1]], r"attention_mask has shape \(1, 3\), the tokens have \(1, 8\)"),
        ([WHOLE, [float("nan")] * 8], "holds other values than 0 and 1"),
        ([WHOLE, [2] * 8], "holds other values than 0 and 1"),
        ([WHOLE, ["a"] * 8], "holds other values than 0 and 1"),
        ([WHOLE, [0, *WHOLE[1:]]], "padding before tokens"),
        ([[0] * 8, [0] * 8], "holds no tokens"),
    ],
)
def test_masks_that_are_none(tmp_path: Path, masks: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load(feeds(*masks), write_model(tmp_path, None))


def test_rows_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no tokens: all rows are empty"):
        load(IDS[:, :0], write_model(tmp_path, None))


def test_numbers_that_the_input_cannot_hold(tmp_path: Path) -> None:
    ids = np.full((1, 4), 2**64 - 1, np.uint64)
    with pytest.raises(InputError, match="holds 18446744073709551615, which int64 cannot hold"):
        load(ids, write_model(tmp_path, None))


def test_a_shape_larger_than_memory_is_no_fault_of_ours(tmp_path: Path) -> None:
    fields = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 99999), }"
    header = fields.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("input_ids.npy", b"\x93NUMPY\x01\x00\x76\x00" + header + bytes(64))
    with pytest.raises(InputError, match=r"x\.npz does not fit in memory"):
        load(tmp_path / "x.npz", write_model(tmp_path, None))


# --- how long samples are, before they are read ---


def test_the_longest_sample(tmp_path: Path) -> None:
    lines = [json.dumps({"input_ids": [1] * length}) for length in (3, 70, 900)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    np.savez(tmp_path / "b.npz", input_ids=np.ones((2, 600), np.int64), more=np.ones(2))
    (tmp_path / "c.npz").write_bytes(b"PK")

    def longest(source: Any, samples: int = 2) -> int:
        return CalibrationData(source, samples=samples, sequence=32).longest

    assert longest(tmp_path / "a.jsonl") == 70
    assert longest(tmp_path / "a.jsonl", samples=3) == 900
    assert longest(tmp_path / "b.npz") == 600
    assert longest(tmp_path / "c.npz") == 0
    assert longest([tmp_path / "a.jsonl", tmp_path / "b.npz"]) == 600
    assert longest("self") == 32
    assert longest(np.ones((4, 50), np.int64)) == 50
    assert longest([{"x": np.ones((2, 9, 64), np.float32)}]) == 18
    assert longest([{"x": np.ones((7, 64), np.float32)}]) == 7
    assert longest(item for item in [np.ones((1, 50), np.int64)]) == 32


# --- the tokenizer of a folder ---


def write_tokenizer(path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def test_texts_are_read_by_the_folders_own_tokenizer(tmp_path: Path) -> None:
    model, folder = write_model(tmp_path, None), tmp_path / "llama"
    folder.mkdir()
    text = tmp_path / "t.txt"
    text.write_text("a b " * 4)
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        load(text, model, sequence=4, folder=folder)
    write_tokenizer(folder / "tokenizer.json")
    data = load(text, model, sequence=4, folder=folder)
    assert data.batches[0]["input_ids"].tolist() == [[0, 1, 0, 1]] * 2
    assert any(f"own tokenizer: {folder / 'tokenizer.json'}" in note for note in data.notes)
    write_tokenizer(tmp_path / "given.json")
    data = load(text, model, sequence=4, folder=folder, tokenizer=tmp_path / "given.json")
    assert not any("own tokenizer" in note for note in data.notes)
    assert load(IDS, model, folder=folder).tokens == 16


def test_a_model_that_is_a_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("a b " * 4)
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        qgraph.optimize(folder, calibrate=text)
    write_tokenizer(folder / "tokenizer.json")
    with pytest.raises(InputError, match="llama") as caught:  # there is no model in it
        qgraph.optimize(folder, calibrate=text)
    assert "tokenizer" not in str(caught.value)
