"""Text from a decoder, against transformers' own greedy generation and plain runs of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from text_models import END, POSITIONS, VOCABULARY, attention_decoder, byte_tokenizer, tiny_llama

import qgraph
from qgraph.errors import InputError
from qgraph.generating import TextModel
from qgraph.runtimes.ort_decoding import OrtDecoder
from qgraph.sampling import Sampling

PROMPT = "Once upon a time"


class Tiny(NamedTuple):
    """A Llama as ONNX beside its tokenizer, and as transformers has it."""

    path: Path
    llama: Any


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    byte_tokenizer(folder)
    return Tiny(folder / "model.onnx", tiny_llama(folder / "model.onnx"))


def wanted(llama: Any, prompt: str, count: int) -> list[int]:
    """Transformers' greedy tokens after a prompt of bytes, which are tokens in another order."""
    import torch

    ids = torch.tensor([encoded(prompt)])
    out = llama.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=ids.ne(-1))
    return [int(token) for token in out[0, ids.shape[1] :]]


def encoded(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [alphabet.index(c) for c in known.pre_tokenize_str(text)[0][0]]


@pytest.mark.parametrize("target", ["ort-cpu", "torch-cpu"])
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, target: str) -> None:
    found = qgraph.generate(tiny.path, PROMPT, max_tokens=24, target=target).finish()
    assert found.rows[0].prompt == tuple(encoded(PROMPT))
    assert found.rows[0].tokens == wanted(tiny.llama, PROMPT, 24)
    assert found.rows[0].stop in ("length", "end")


def test_pieces_come_one_by_one_and_make_the_text(tiny: Tiny) -> None:
    found = qgraph.generate(tiny.path, PROMPT, max_tokens=12)
    first = next(iter(found))
    assert (first.row, first.token) == (0, wanted(tiny.llama, PROMPT, 1)[0])
    assert len(found.rows[0].tokens) == 1
    pieces = [first, *found]
    assert "".join(piece.text for piece in pieces) == found.text
    assert [piece.token for piece in pieces] == found.rows[0].tokens
    assert found.timings.prompt_tokens == len(PROMPT)
    assert found.timings.steps == len(pieces) - 1
    assert found.timings.speed > 0
    assert found.to_json()["rows"][0]["text"] == found.text


def test_a_batch_with_padding_gives_what_each_prompt_gives_alone(tiny: Tiny) -> None:
    prompts = [PROMPT, "The end", "A much longer prompt than these"]
    model = TextModel(tiny.path)
    together = model.generate(prompts, max_tokens=10).finish()
    assert [row.tokens for row in together.rows] == [
        wanted(tiny.llama, prompt, 10) for prompt in prompts
    ]
    assert together.notes == []


def test_a_model_is_used_again_and_again(tiny: Tiny) -> None:
    model = TextModel(tiny.path)
    first = model.generate(PROMPT, max_tokens=8).finish().rows[0].tokens
    model.generate("Something else", max_tokens=4).finish()
    assert model.generate(PROMPT, max_tokens=8).finish().rows[0].tokens == first


def test_without_a_cache_the_text_is_read_anew(tiny: Tiny, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    llama = tiny_llama(tmp_path / "model.onnx", past=False)
    found = qgraph.generate(tmp_path / "model.onnx", PROMPT, max_tokens=8).finish()
    assert found.rows[0].tokens == wanted(llama, PROMPT, 8)
    assert "no cache" in found.notes[0]
    assert "reads the whole text again" in found.notes[0]


def test_a_seed_is_repeatable_and_rows_draw_alone(tiny: Tiny) -> None:
    model = TextModel(tiny.path)
    how = Sampling(temperature=1.5, seed=3)
    both = model.generate([PROMPT, PROMPT], how, max_tokens=12).finish()
    alone = model.generate(PROMPT, how, max_tokens=12).finish()
    assert both.rows[0].tokens == alone.rows[0].tokens
    assert both.rows[1].tokens != both.rows[0].tokens
    other = model.generate(PROMPT, Sampling(temperature=1.5, seed=4), max_tokens=12).finish()
    assert other.rows[0].tokens != alone.rows[0].tokens


def test_generation_ends_at_a_token_a_text_or_the_last_position(tiny: Tiny) -> None:
    model = TextModel(tiny.path)
    tokens = wanted(tiny.llama, PROMPT, 12)
    third = tokens[2]
    ended = model.generate(PROMPT, max_tokens=12, stop_tokens=[third]).finish().rows[0]
    assert (ended.tokens, ended.stop) == (tokens[: tokens.index(third) + 1], "end")
    (tiny.path.parent / "config.json").write_text('{"max_position_embeddings": 20}')
    try:
        cut = TextModel(tiny.path).generate(PROMPT, max_tokens=12).finish().rows[0]
    finally:
        (tiny.path.parent / "config.json").unlink()
    assert (cut.tokens, cut.stop) == (tokens[: 20 - len(PROMPT)], "positions")


def test_a_chat_is_written_by_the_template(tiny: Tiny) -> None:
    model = TextModel(tiny.path)
    ids = model.encode("Hi", chat=True)
    assert model.encoder.decode(ids, skip_special_tokens=False) == "<user>user: Hi<end>\n<user>"
    assert model.encode([{"role": "user", "content": "Hi"}]) == ids


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": []}, "no prompt was given"),
        ({"prompt": "x", "max_tokens": 0}, "max tokens 0: wanted 1 or more"),
        ({"prompt": "x", "stop": "y"}, "wanted a list of texts"),
        ({"prompt": "x", "stop_tokens": ["<none>"]}, "has no token '<none>'"),
        ({"prompt": [{"content": "x"}]}, "message 1 has no role"),
        ({"prompt": "x", "temperature": -1.0}, "temperature -1.0: wanted 0"),
    ],
)
def test_wrong_usage_names_the_way_out(tiny: Tiny, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        qgraph.generate(tiny.path, **options)


def test_a_prompt_beyond_the_positions_is_refused(tiny: Tiny) -> None:
    (tiny.path.parent / "config.json").write_text('{"max_position_embeddings": 10}')
    try:
        with pytest.raises(InputError, match="has 16 tokens, and the model has 10 positions"):
            qgraph.generate(tiny.path, PROMPT)
    finally:
        (tiny.path.parent / "config.json").unlink()


def test_a_tokenizer_of_another_model_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer.json in the folder"):
        TextModel(tiny.path, tmp_path)
    small = ir.load(tiny.path)
    table = next(
        value for name, value in small.graph.initializers.items() if "embed_tokens" in name
    )
    assert table.const_value is not None
    table.const_value = ir.tensor(table.const_value.numpy()[:40], name=table.name)
    table.shape = ir.Shape([40, 64])
    model = TextModel(small, tiny.path.parent)
    with pytest.raises(InputError, match="the model has tokens below 40: it belongs to another"):
        model.encode(PROMPT)


def test_a_tokenizer_far_smaller_than_the_vocabulary_is_noted(tmp_path: Path) -> None:
    """The tokenizer has 259 tokens."""
    byte_tokenizer(tmp_path)
    path = attention_decoder(tmp_path / "m.onnx")
    assert TextModel(path).notes == ()
    wide = onnx.load(path)
    parts = {each.name: each for each in wide.graph.initializer}
    table = np.tile(numpy_helper.to_array(parts["table"]), (2, 1))
    parts["table"].CopyFrom(numpy_helper.from_array(table, "table"))
    out = np.tile(numpy_helper.to_array(parts["out"]), (1, 2))
    parts["out"].CopyFrom(numpy_helper.from_array(out, "out"))
    wide.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 2 * VOCABULARY
    onnx.save(wide, path)
    note = "the tokenizer has 259 tokens, the model's vocabulary 544: is it the model's own?"
    assert TextModel(path).notes == (note,)
    assert note in TextModel(path).generate(PROMPT, max_tokens=1).finish().notes


def test_no_decoder_is_refused_with_what_it_has(tmp_path: Path) -> None:
    from text_models import byte_tokenizer

    byte_tokenizer(tmp_path)
    value = ir.Value(name="x", shape=ir.Shape(["rows", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "Relu", [value])
    node.outputs[0].name = "y"
    node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 21})
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"takes no token ids .* x float32 \[rows, 4\]; a decoder"):
        TextModel(tmp_path / "model.onnx")


@pytest.mark.parametrize("padded", [False, True])
def test_a_shared_buffer_gives_what_whole_texts_give(tmp_path: Path, padded: bool) -> None:
    byte_tokenizer(tmp_path)
    path = attention_decoder(tmp_path / "model.onnx", padded=padded)
    model = TextModel(path)
    assert isinstance(model.decoder, OrtDecoder) and model.decoder.shared
    assert (model.positions, model.vocabulary) == (POSITIONS, VOCABULARY)
    tokens = list(model.encode(PROMPT))
    found = model.generate(PROMPT, max_tokens=20).finish().rows[0].tokens
    assert found == _whole(path, tokens, 20)


def test_a_graph_that_measures_its_past_gets_presents_as_pasts(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    model = TextModel(attention_decoder(tmp_path / "model.onnx", measures_past=True))
    assert isinstance(model.decoder, OrtDecoder) and not model.decoder.shared
    found = model.generate(PROMPT, max_tokens=20).finish().rows[0].tokens
    assert found == _whole(tmp_path / "model.onnx", list(model.encode(PROMPT)), 20)


def test_prompts_that_cannot_be_padded_are_read_one_after_another(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    model = TextModel(attention_decoder(tmp_path / "model.onnx"))
    prompts = ["abc", "something longer"]
    both = model.generate(prompts, max_tokens=6).finish()
    alone = [model.generate(each, max_tokens=6).finish().rows[0].tokens for each in prompts]
    assert [row.tokens for row in both.rows] == alone
    assert any("one after another" in note for note in both.notes)


def _whole(path: Path, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens where each step reads the whole text with an empty past."""
    import onnxruntime as ort

    session = ort.InferenceSession(path)
    made: list[int] = []
    empty = np.zeros((1, 1, 0, 16), np.float32)
    while len(made) < count and made[-1:] != [END]:
        ids = np.array([tokens + made])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds |= {"past_0_key": empty, "past_0_value": empty}
        made.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    return made


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        (PROMPT, {"max_tokens": 2.5}, "max tokens 2.5: wanted a whole number"),
        (PROMPT, {"stop": [1]}, "stop has 1: wanted texts"),
        (PROMPT, {"stop_tokens": [-5]}, "stop token -5: the model has tokens 0 to"),
        (PROMPT, {"stop_tokens": [10**9]}, "stop token 1000000000: the model has"),
        (5, {}, "the prompt is 5: wanted a text"),
        ("a\ud800b", {}, r"'\\ud800' at character 2, which is half a character"),
    ],
)
def test_what_is_no_request_is_refused(
    tiny: Tiny, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        qgraph.generate(tiny.path, prompt, **options)
