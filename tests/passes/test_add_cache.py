"""A decoder that was exported without a cache gets one, and says the same with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from text_models import VOCABULARY, attention_decoder, byte_tokenizer, tiny_llama
from tiny_transformers import export, tiny

import qgraph
from qgraph.errors import InputError
from qgraph.generating import TextModel
from qgraph.row_branches import FEW_BODY, MANY_BODY, body_of, branches

PROMPTS = ["Once upon a time", "The end"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    byte_tokenizer(folder)
    tiny_llama(folder / "model.onnx", past=False, plain=False)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def cached(plain: Path) -> Path:
    output = plain.with_name("cached.onnx")
    qgraph.optimize(plain, output, format="int8", group=32, add_cache=True)
    return output


@pytest.fixture(scope="module")
def without(plain: Path) -> Path:
    """The same weights without a cache."""
    output = plain.with_name("int8.onnx")
    qgraph.optimize(plain, output, format="int8", group=32)
    return output


def test_every_attention_has_a_past_and_a_present(cached: Path) -> None:
    model = ir.load(cached)
    assert Counter(node.op_type for node in model.graph)["GroupQueryAttention"] == 2
    names = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert [value.name for value in model.graph.inputs] == [
        "input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names),
    ]  # fmt: skip
    assert [value.name for value in model.graph.outputs] == [
        "logits", *(f"present.{name}" for name in names),
    ]  # fmt: skip
    past = model.graph.inputs[3]
    assert [str(dim) for dim in past.shape or ()] == ["batch", "2", "past_sequence", "16"]


def test_text_is_that_of_the_graph_without_a_cache(without: Path, cached: Path) -> None:
    slow, model = TextModel(without), TextModel(cached)
    assert model.decoder.shared and model.notes == ()
    wanted = [slow.generate(prompt, max_tokens=16).finish().rows[0].tokens for prompt in PROMPTS]
    found = model.generate(PROMPTS, max_tokens=16).finish()  # one of them is padded
    assert [row.tokens for row in found.rows] == wanted


def test_a_cache_of_its_own_length_serves_as_well(without: Path, cached: Path) -> None:
    """Not a buffer: each present is the next past, read in three parts of unequal length."""
    ids = np.random.default_rng(0).integers(0, 256, (2, 9))
    (whole,) = ort.InferenceSession(without).run(None, {"input_ids": ids})
    session = ort.InferenceSession(cached)
    names = [each.name for each in session.get_inputs()[3:]]
    pasts = dict.fromkeys(names, np.zeros((2, 2, 0, 16), np.float32))
    parts = []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        feeds = {"input_ids": ids[:, start:end], "attention_mask": np.ones((2, end), np.int64)}
        feeds["position_ids"] = np.tile(np.arange(start, end), (2, 1))
        logits, *presents = session.run(None, feeds | pasts)
        pasts = dict(zip(names, presents, strict=True))
        parts.append(logits)
    found = np.concatenate(parts, 1)
    assert found.shape == (2, 9, VOCABULARY)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-3 * np.abs(whole).max())


def test_each_way_by_rows_is_proven_by_itself(plain: Path) -> None:
    """Steps go the way of few rows, the whole text that of many: they round differently."""
    output = plain.with_name("both.onnx")
    qgraph.optimize(plain, output, purpose="both", add_cache=True, min_elements=64)
    model = ir.load(output)
    (branch,) = branches(model.graph)
    few, many = (body_of(branch, name) for name in (FEW_BODY, MANY_BODY))
    assert few is not None and many is not None
    assert any(node.op_type == "MatMulNBits" for node in few)
    assert any(node.op_type == "MatMulIntegerToFloat" for node in many)
    decoder = TextModel(output)
    assert decoder.decoder.shared  # attention stands in the bodies
    (row,) = decoder.generate(PROMPTS[:1], max_tokens=4).finish().rows
    assert len(row.tokens) == 4
    with pytest.raises(qgraph.InputError, match="an If by the number of rows, holds them: start"):
        qgraph.optimize(output, None, kv_cache="int8", calibrate="self", samples=2)


def test_attention_that_stands_in_an_if_is_told(plain: Path) -> None:
    output = plain.with_name("both.onnx")
    qgraph.optimize(plain, output, purpose="both", min_elements=64)
    with pytest.raises(qgraph.InputError, match=r"--add-cache: .* an If by the number of rows"):
        qgraph.optimize(output, None, add_cache=True)
    with pytest.raises(qgraph.InputError, match=r"--last-logits: .* an If by the number of rows"):
        qgraph.optimize(output, None, last_logits=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind,positions", [("llama", False), ("llama", True), ("gpt2", True)])
def test_a_mask_and_positions_that_are_inputs_serve(
    kind: str, positions: bool, tmp_path: Path
) -> None:
    """One row is padded in front: as a whole, and read in three parts."""
    path = export(tiny(kind, positions=positions), tmp_path / "m.onnx", opset=17, dynamo=False)
    options = {"format": "int8", "group": 32, "min_elements": 64, "accuracy_level": "0"}
    qgraph.optimize(path, tmp_path / "plain.onnx", **options)
    qgraph.optimize(path, tmp_path / "cached.onnx", add_cache=True, **options)
    mask = np.array([[1] * 9, [0, 0] + [1] * 7])
    places = np.maximum(mask.cumsum(1) - 1, 0) if positions else np.tile(np.arange(9), (2, 1))
    given = {"input_ids": np.random.default_rng(0).integers(0, 96, (2, 9)), "position_ids": places}
    whole = ort.InferenceSession(tmp_path / "plain.onnx")
    taken = {each.name for each in whole.get_inputs()}
    assert taken == {"input_ids", "attention_mask", *(["position_ids"] if positions else [])}
    fed = {"attention_mask": mask, **given}
    (wanted,) = whole.run(None, {name: fed[name] for name in taken})
    session = ort.InferenceSession(tmp_path / "cached.onnx")
    heads = ir.load(tmp_path / "cached.onnx").graph.inputs[3].shape
    assert heads is not None
    shape = (2, heads[1], 0, heads[3])
    pasts = {
        each.name: np.zeros(shape, np.float32)
        for each in session.get_inputs() if each.name.startswith("past_key_values")
    }  # fmt: skip
    assert len(pasts) == 4
    parts = []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        feeds = {name: array[:, start:end] for name, array in given.items()}
        logits, *presents = session.run(None, {**feeds, "attention_mask": mask[:, :end], **pasts})
        pasts = dict(zip(pasts, presents, strict=True))
        parts.append(logits)
    found, seen = np.concatenate(parts, 1), mask.astype(np.bool_)
    np.testing.assert_allclose(found[seen], wanted[seen], rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.filterwarnings("ignore")
def test_positions_that_the_graph_counts_are_refused(tmp_path: Path) -> None:
    path = export(tiny("gpt2"), tmp_path / "m.onnx", opset=17, dynamo=False)
    with pytest.raises(InputError, match=r"has no rotary embedding to tell positions to"):
        qgraph.optimize(path, tmp_path / "out.onnx", min_elements=64, group=32, add_cache=True)


def test_the_cache_is_rounded_in_the_same_run(plain: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (4, 24))
    options = {"format": "int8", "group": 32, "add_cache": True, "check": False}
    found = qgraph.optimize(plain, tmp_path / "out.onnx", kv_cache="int8", calibrate=ids, **options)
    model = ir.load(tmp_path / "out.onnx")
    kinds = [value.dtype for value in model.graph.inputs]
    assert kinds == [ir.DataType.INT64] * 3 + [ir.DataType.INT8] * 4
    told = found.report.totals["kv_cache"]
    assert (told["bytes_before"], told["bytes_after"]) == (512, 128)
    assert told["divergence"] < 0.05  # of random weights


def test_why_an_attention_has_no_cache_is_said(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "op.onnx", past=False)
    model = ir.load(tmp_path / "op.onnx")
    for node in model.graph:
        if node.op_type == "Attention":
            node.resize_inputs(6)  # keys and values as the past, which is told from none
            for place in (1, 2):
                node.replace_input_with(place + 3, node.inputs[place])
    ir.save(model, tmp_path / "own.onnx")
    with pytest.raises(
        InputError, match=r"is Attention \(.*: .* has a cache, or lengths, of its own"
    ):
        qgraph.optimize(tmp_path / "own.onnx", group=32, min_elements=64, add_cache=True)


def test_graphs_that_cannot_have_one_are_refused(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    has = attention_decoder(tmp_path / "has.onnx")
    with pytest.raises(InputError, match=r"has\.onnx has a cache already: leave --add-cache out"):
        qgraph.optimize(has, output, add_cache=True)
    tiny_llama(tmp_path / "op.onnx", past=False)
    model = ir.load(tmp_path / "op.onnx")
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
            node.replace_input_with(3, None)  # it looks ahead, as an encoder does
    ir.save(model, tmp_path / "encoder.onnx")
    with pytest.raises(InputError, match=r"--add-cache: .* exported with past_key_values"):
        qgraph.optimize(tmp_path / "encoder.onnx", output, add_cache=True)
    with pytest.raises(InputError, match="--add-cache needs fused attention: leave out --no-fuse"):
        qgraph.optimize(plain, output, add_cache=True, fuse=False)
    with pytest.raises(InputError, match="--add-cache is for the targets ort-cpu, ort-cuda"):
        qgraph.optimize(plain, output, add_cache=True, target="qdq")
    assert not output.exists()
