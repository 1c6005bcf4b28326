"""What models are compared on: texts, data, masks, caches; and what is no data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import (
    VOCABULARY,
    decoder,
    encoder,
    save,
    tokens,
    weights,
)
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

import qgraph
from qgraph import InputError


def test_text(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = tokens(1, 50)[0]
    text, tokenizer = words(tmp_path, VOCABULARY, ids)
    found = qgraph.compare(*pair, text=text, tokenizer=tokenizer, sequence=12, sites=False)
    wanted = qgraph.compare(*pair, ids[:48].reshape(4, 12), sites=False)
    assert found.divergence == wanted.divergence
    assert found.notes == ("the text has 4 blocks of 12 tokens, not 20",)


@pytest.mark.parametrize("size,noted", [(76, True), (77, False)])
def test_a_tokenizer_far_smaller_than_the_vocabulary_is_noted(
    pair: tuple[Path, Path], tmp_path: Path, size: int, noted: bool
) -> None:
    """4/5 of 96 tokens are 76.8. The folder stands for the tokenizer in it."""
    path, tokenizer = words(tmp_path, size, range(50))
    found = qgraph.compare(
        *pair, text=path, tokenizer=tokenizer.parent, samples=4, sequence=12, sites=False
    )
    note = "the tokenizer has 76 tokens, the models' vocabulary 96: is it the models' own?"
    assert found.notes == ((note,) if noted else ())


def test_tokens_that_encoders_do_not_have_are_refused(tmp_path: Path) -> None:
    """No logits say how many there are; the table does."""
    table = np.ones((VOCABULARY, 32), np.float32)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])], "tokens",
        [info("input_ids", TensorProto.INT64, ["B", "T"])],
        [info("last_hidden_state", TensorProto.FLOAT, ["B", "T", 32])],
        [numpy_helper.from_array(table, "table")],
    )  # fmt: skip
    path = tmp_path / "e.onnx"
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    with pytest.raises(InputError, match="token 96 is outside the models' vocabulary of 96"):
        qgraph.compare(path, path, np.array([[1, VOCABULARY]]))
    with pytest.raises(InputError, match="tokenizer has 97 tokens, the models' vocabulary 96"):
        qgraph.compare(path, path, **text(tmp_path, 97), sequence=2)


def words(folder: Path, size: int, ids: Any) -> tuple[Path, Path]:
    """A text of the tokens `ids`, and the tokenizer of `size` words."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in ids), encoding="utf-8")
    return folder / "text.txt", folder / "tokenizer.json"


def test_data_of_all_kinds(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = tokens()
    wanted = qgraph.compare(*pair, ids, sites=False).divergence
    np.savez(tmp_path / "d.npz", input_ids=ids)
    lines = [json.dumps({"input_ids": row.tolist()}) for row in ids]
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for data in (
        tmp_path / "d.npz",
        str(tmp_path / "d.jsonl"),
        [{"input_ids": ids[:2].astype(np.int32)}, {"input_ids": ids[2:]}],
        ({"input_ids": row[None]} for row in ids),
    ):
        assert qgraph.compare(*pair, data, sites=False).divergence == wanted


def test_the_only_integer_input_takes_the_tokens(tmp_path: Path) -> None:
    path = decoder(tmp_path / "m.onnx", ids="ids", logits="output_0")
    found = qgraph.compare(path, path, tokens())
    assert found.divergence is not None, "an output as wide as the embedding is long is logits"
    assert found.divergence.mean == 0


def cached_decoder(path: Path, noise: float = 0.0) -> Path:
    """Logits depend on mask and position; also takes a cache, whose keys it hands back."""
    w = weights(noise)
    nodes = [
        helper.make_node("Gather", ["embed.weight", "input_ids"], ["e"], "embed"),
        helper.make_node("Gather", ["embed.weight", "position_ids"], ["p"], "positions"),
        helper.make_node("Add", ["e", "p"], ["s"]),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m", "last"], ["m3"]),
        helper.make_node("Mul", ["s", "m3"], ["h"]),
        helper.make_node("CumSum", ["h", "one"], ["c"]),
        helper.make_node("MatMul", ["c", "head.weight"], ["logits"], "head"),
        helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"]),
    ]
    info = helper.make_tensor_value_info
    integer = TensorProto.INT64
    graph = helper.make_graph(
        nodes,
        "cached",
        [
            info("input_ids", integer, ["batch", "sequence"]),
            info("attention_mask", integer, ["batch", "total"]),
            info("position_ids", integer, ["batch", "sequence"]),
            info("past_key_values.0.key", TensorProto.FLOAT, ["batch", 2, "past", 4]),
        ],
        [
            info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]),
            info("present.0.key", TensorProto.FLOAT, ["batch", 2, "past", 4]),
        ],
        [
            *(numpy_helper.from_array(w[n], n) for n in ("embed.weight", "head.weight")),
            numpy_helper.from_array(np.array([-1]), "last"),
            numpy_helper.from_array(np.array(1), "one"),
        ],
    )
    return save(graph, path)


def test_masks_positions_and_caches_are_made(tmp_path: Path) -> None:
    pair = cached_decoder(tmp_path / "a.onnx"), cached_decoder(tmp_path / "b.onnx", 0.1)
    ids = tokens(1, 6)
    plain = qgraph.compare(*pair, ids)
    assert plain.divergence is not None
    w = weights()
    expected = np.cumsum(w["embed.weight"][ids] + w["embed.weight"][np.arange(6)], 1)
    perplexity = qgraph.perplexity(expected[:, :-1] @ w["head.weight"], ids[:, 1:])
    assert plain.divergence.reference_perplexity == pytest.approx(perplexity, rel=1e-4)
    assert plain.divergence.mean > 0.01


@pytest.mark.parametrize("where", ["before", "behind"])
def test_padding_changes_nothing(tmp_path: Path, where: str) -> None:
    """Positions count from the first token, padding is not scored, and hidden by the mask."""
    pair = cached_decoder(tmp_path / "a.onnx"), cached_decoder(tmp_path / "b.onnx", 0.1)
    ids = tokens(1, 6)[0].tolist()
    pad, mask = [7, 7, 7], [1] * 6
    padded = pad + ids if where == "before" else ids + pad
    hidden = [0] * 3 + mask if where == "before" else mask + [0] * 3
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"input_ids": padded, "attention_mask": hidden}), encoding="utf-8")
    found = qgraph.compare(*pair, path)
    wanted = qgraph.compare(*pair, np.array([ids]))
    assert found.divergence is not None and wanted.divergence is not None
    for field in dataclasses.fields(found.divergence):
        got = getattr(found.divergence, field.name)
        assert got == pytest.approx(getattr(wanted.divergence, field.name), rel=1e-5), field.name
    errors = {row.name: row.error for row in wanted.sites}
    assert {row.name for row in found.sites} == set(errors)
    for row in found.sites:
        if row.name != "positions" or where == "behind":
            assert row.error == pytest.approx(errors[row.name], rel=1e-4), row.name


def test_a_mask_that_a_model_does_not_take(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Padding behind causal tokens is harmless; before them it would be attended to."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}', "utf-8")
    found = qgraph.compare(*pair, path, sites=False)
    assert found.divergence == qgraph.compare(*pair, np.array([[5, 6, 7]]), sites=False).divergence
    path.write_text('{"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]}', "utf-8")
    with pytest.raises(InputError, match="padding before tokens"):
        qgraph.compare(*pair, path)


Case = Callable[[Path], Any]


@pytest.mark.parametrize(
    "case,words_of_error",
    [
        (lambda f: qgraph.compare(f / "a.onnx", encoder(f / "e.onnx"), tokens()), "different inp"),
        (lambda f: qgraph.compare(f / "a.onnx", small(f), tokens()), "vocabulary of 96, the cand"),
        (lambda f: qgraph.compare(f / "a.onnx", f / "no.onnx", tokens()), "no.onnx"),
        (lambda f: itself(f, np.array([[1, VOCABULARY]])), "token 96 is outside"),
        (lambda f: itself(f, np.array([[1, -1]])), "token -1 is outside"),
        (lambda f: itself(f, np.zeros((2, 3))), r"wanted integers \[samples, tokens\]"),
        (lambda f: itself(f, np.zeros((0, 3), int)), "holds no samples"),
        (lambda f: itself(f, {"input_ids": tokens()}), "iterable of feeds"),
        (lambda f: itself(f, [3]), "wanted arrays by input name"),
        (lambda f: itself(f, [{"x": tokens()}]), "no input 'input_ids'"),
        (lambda f: itself(f, [{"input_ids": tokens(), "y": tokens()}]), "'y', which is no input"),
        (lambda f: itself(f, [{"input_ids": np.zeros((1, 2))}]), "given as float64"),
        (lambda f: itself(f, [{"input_ids": np.zeros(3, int)}]), r"ids \[rows, tokens\]"),
        (lambda f: itself(f, tokens(), text="t"), "one of the two"),
        (lambda f: itself(f, None), "one of the two"),
        (lambda f: itself(f, None, text="t"), "needs its tokenizer"),
        (lambda f: itself(f, tokens(), tokenizer="t"), "goes with a text"),
        (lambda f: itself(f, tokens(), samples=0), "at least 1 sample"),
        (lambda f: itself(f, None, **text(f, 97), sequence=2), "tokenizer has 97 tokens"),
        (lambda f: itself(f, None, **text(f, 50), sequence=99), "less than one block of 99"),
        (lambda f: fixed(f), "use --sequence 8"),
    ],
)  # fmt: skip
def test_wrong_inputs(tmp_path: Path, case: Case, words_of_error: str) -> None:
    decoder(tmp_path / "a.onnx")
    with pytest.raises(InputError, match=words_of_error):
        case(tmp_path)
    assert not list(tmp_path.glob(".*"))


def itself(folder: Path, data: Any, **options: Any) -> None:
    qgraph.compare(folder / "a.onnx", folder / "a.onnx", data, **options)


def text(folder: Path, size: int) -> dict[str, Any]:
    path, tokenizer = words(folder, size, range(10))
    return {"text": path, "tokenizer": tokenizer}


def small(folder: Path) -> Path:
    w = weights()
    return decoder(folder / "s.onnx", w | {"head.weight": w["head.weight"][:, :90].copy()})


def fixed(folder: Path) -> None:
    path = decoder(folder / "f.onnx", shape=(1, 8))
    qgraph.compare(path, path, tokens())
