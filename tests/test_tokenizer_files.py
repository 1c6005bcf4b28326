"""What lies beside a tokenizer: ends of texts, positions, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_models import END, TEMPLATE, byte_tokenizer

from qgraph.errors import InputError
from qgraph.text import load_tokenizer
from qgraph.tokenizer_files import TokenizerFiles


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def test_ends_come_from_the_first_file_that_names_them(tmp_path: Path) -> None:
    encoder = load_tokenizer(byte_tokenizer(tmp_path))

    def ends() -> dict[int, str]:
        return TokenizerFiles(tmp_path).ends(encoder)

    assert ends() == {END: "tokenizer_config.json"}
    write(tmp_path, "genai_config.json", {"model": {"eos_token_id": [3, 4]}})
    assert ends() == dict.fromkeys((3, 4), "genai_config.json")
    write(tmp_path, "config.json", {"eos_token_id": 5})
    assert ends() == {5: "config.json"}
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    assert ends() == dict.fromkeys((1, 2), "generation_config.json")
    write(tmp_path, "generation_config.json", {"eos_token_id": None})
    assert ends() == {5: "config.json"}


def test_without_files_no_token_ends_a_text(tmp_path: Path) -> None:
    path = byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    files = TokenizerFiles(path)
    assert files.ends(load_tokenizer(path)) == {}
    assert files.positions() is None
    with pytest.raises(InputError, match="no chat template beside"):
        files.template()


@pytest.mark.parametrize(
    "config, wanted",
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024, "n_ctx": 512}, 512),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_positions_come_from_the_config(tmp_path: Path, config: Any, wanted: int | None) -> None:
    byte_tokenizer(tmp_path)
    write(tmp_path, "config.json", config)
    assert TokenizerFiles(tmp_path).positions() == wanted


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    assert TokenizerFiles(tmp_path).template() == TEMPLATE
    write(tmp_path, "chat_template.json", {"chat_template": "second"})
    assert TokenizerFiles(tmp_path).template() == "second"
    write(tmp_path, "chat_template.jinja", "first")
    assert TokenizerFiles(tmp_path).template() == "first"


def test_of_several_templates_the_default_is_meant(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert TokenizerFiles(tmp_path).template() == "d"
    write(tmp_path, "tokenizer_config.json", {"chat_template": several[:1]})
    with pytest.raises(InputError, match="templates 'tool' and none that is called 'default'"):
        TokenizerFiles(tmp_path).template()


def test_files_may_lie_beside_the_model_instead(tmp_path: Path) -> None:
    path = byte_tokenizer(tmp_path / "tokenizer")
    write(tmp_path, "config.json", {"max_position_embeddings": 7})
    assert TokenizerFiles(path, tmp_path).positions() == 7


@pytest.mark.parametrize("content, message", [("{", "is no JSON"), ("[1]", "wanted an object")])
def test_damaged_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    byte_tokenizer(tmp_path)
    write(tmp_path, "config.json", content)
    with pytest.raises(InputError, match=f"config.json.*{message}"):
        TokenizerFiles(tmp_path).positions()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer.json in the folder .* give --tokenizer"):
        TokenizerFiles(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer.json at"):
        TokenizerFiles(tmp_path / "tokenizer.json")


def test_positions_are_those_of_the_text(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    images = {"max_position_embeddings": 2}
    config = {"vision_config": images, "text_config": {"max_position_embeddings": 90}}
    write(tmp_path, "config.json", config)
    assert TokenizerFiles(tmp_path).positions() == 90
    write(tmp_path, "config.json", {"max_position_embeddings": -5, "n_ctx": 7})
    assert TokenizerFiles(tmp_path).positions() == 7


@pytest.mark.parametrize("model", [5, None, []])
def test_a_model_that_is_no_object_says_no_ends(model: object, tmp_path: Path) -> None:
    encoder = load_tokenizer(byte_tokenizer(tmp_path))
    write(tmp_path, "config.json", {"model": model, "eos_token_id": 3})
    assert TokenizerFiles(tmp_path).ends(encoder) == {3: "config.json"}
