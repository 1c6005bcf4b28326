"""What onnxruntime-genai is told of a decoder, beside what its own builder writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from text_models import VOCABULARY, attention_decoder, byte_tokenizer

from qgraph.cli import run
from qgraph.errors import InputError
from qgraph.genai_config import find_config, genai_config, write_genai_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": [256, 257],
}


def test_the_config_names_sizes_and_values(tmp_path: Path) -> None:
    found = genai_config(attention_decoder(tmp_path / "m.onnx"), CONFIG)
    assert found["model"] == {
        "eos_token_id": [256, 257],
        "pad_token_id": 256,
        "context_length": 96,
        "decoder": {
            "session_options": {"provider_options": []},
            "filename": "m.onnx",
            "head_size": 16,
            "hidden_size": 32,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "past_%d_key",
                "past_value_names": "past_%d_value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present_%d_key",
                "present_value_names": "present_%d_value",
            },
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
        },
        "type": "llama",
        "vocab_size": VOCABULARY,
    }
    assert found["search"]["past_present_share_buffer"] is True
    measured = genai_config(attention_decoder(tmp_path / "n.onnx", measures_past=True), CONFIG)
    assert measured["search"]["past_present_share_buffer"] is False


def test_names_without_a_pattern_are_refused(tmp_path: Path) -> None:
    model = onnx.load(attention_decoder(tmp_path / "m.onnx"))
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = name.replace("past_0_key", "past_key_a")
    model.graph.input[2].name = "past_key_a"
    onnx.save(model, tmp_path / "n.onnx")
    with pytest.raises(InputError, match="numbers the layers of a cache 0, 1, …, and this one"):
        genai_config(tmp_path / "n.onnx", CONFIG)


def test_the_tokenizer_comes_along_and_nothing_is_overwritten(tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    byte_tokenizer(source)
    output.mkdir()
    (output / "tokenizer_config.json").write_text("mine")
    model = attention_decoder(output / "m.onnx")
    written = write_genai_config(model, source, CONFIG)
    assert [path.name for path in written] == ["genai_config.json", "tokenizer.json"]
    assert (output / "tokenizer_config.json").read_text() == "mine"
    with pytest.raises(InputError, match=r"is there already: --force"):
        write_genai_config(model, source, CONFIG)
    assert write_genai_config(model, source, CONFIG, force=True) == [output / "genai_config.json"]
    assert not list(output.glob(".*.tmp"))


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "there is none in"),
        ({**CONFIG, "model_type": None, "text_config": {"hidden_size": 3}}, ""),
        ({"model_type": "llama"}, "has no hidden_size"),
    ],
)
def test_a_config_is_looked_for_in_folders(tmp_path: Path, config: Any, message: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if not message:
        assert find_config([tmp_path, folder])[1]["hidden_size"] == 3
        return
    with pytest.raises(InputError, match=message):
        find_config([tmp_path, folder])


def test_optimize_looks_for_the_config_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = attention_decoder(tmp_path / "m.onnx")
    status = run(["optimize", str(model), "--write-genai-config"])
    err = capsys.readouterr().err
    assert (status, "put it beside the model" in err) == (2, True), err
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    output = tmp_path / "out" / "m.onnx"
    output.parent.mkdir()
    (tmp_path / "hf").mkdir()
    asked = ["optimize", str(model), "-o", str(output), "--write-genai-config", "--format", "int8"]
    (tmp_path / "config.json").rename(tmp_path / "hf" / "config.json")
    named = ["--tokenizer", str(tmp_path / "hf")]  # the folder that the message tells to name
    assert run([*asked, *named, "--group", "32", "--quiet"]) == 0, capsys.readouterr().err
    found = json.loads((output.parent / "genai_config.json").read_text())
    assert found["model"]["decoder"]["filename"] == "m.onnx"
