"""What lies beside a tokenizer: the tokens that end a text, the chat template, the positions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qgraph.errors import InputError

TOKENIZER = "tokenizer.json"
_ENDS = ("generation_config.json", "config.json", "genai_config.json")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "context_length")
_MOST_BYTES = 64_000_000
"""More than any of these files has; a larger one is not read."""


def tokenizer_path(path: Path) -> Path:
    """The tokenizer.json that is meant: `path`, or the one in the folder that it is.

    Raises:
        InputError: there is none.
    """
    found = path / TOKENIZER if path.is_dir() else path
    if not found.is_file():
        where = f"in the folder {path}" if path.is_dir() else f"at {path}"
        raise InputError(
            f"no {TOKENIZER} {where}: give --tokenizer FILE, a {TOKENIZER} of the tokenizers "
            "library, or the folder of the model it belongs to"
        )
    return found


class TokenizerFiles:
    """A tokenizer.json and the files of a Hugging Face folder that lie beside it.

    Args:
        path: the tokenizer.json, or the folder that holds it.
        model: where else the other files may lie: the folder of the model.

    Raises:
        InputError: there is no tokenizer.json.
    """

    def __init__(self, path: Path, model: Path | None = None) -> None:
        self.path = tokenizer_path(path)
        folders = [self.path.parent, *([model] if model is not None else [])]
        self._folders = tuple(dict.fromkeys(folders))
        self._read: dict[str, Mapping[str, Any]] = {}

    def ends(self, encoder: Any) -> dict[int, str]:
        """The tokens that end a text, and the file that says so; empty where none does.

        Raises:
            InputError: a file is damaged.
        """
        for name in _ENDS:
            found = self._json(name)
            inner = found.get("model")
            given = (inner if isinstance(inner, dict) else found).get("eos_token_id")
            ids = [given] if isinstance(given, int) else given
            if isinstance(ids, list) and all(type(each) is int for each in ids) and ids:
                return dict.fromkeys(ids, name)
        text = self.special("eos_token")
        token = encoder.token_to_id(text) if text else None
        return {} if token is None else {int(token): "tokenizer_config.json"}

    def special(self, name: str) -> str:
        """The text of a special token, as `bos_token`; "" where the tokenizer has none."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            found = self._json(file).get(name)
            text = found.get("content") if isinstance(found, dict) else found
            if isinstance(text, str):
                return text
        return ""

    def positions(self) -> int | None:
        """How many positions the model was made for; None where no file says it."""
        for name in ("config.json", "genai_config.json"):
            found = self._json(name)
            parts = (found, found.get("text_config"), *found.values())  # of images, sounds too
            for part in parts:
                if isinstance(part, dict):
                    sizes = [part[key] for key in _POSITIONS if type(part.get(key)) is int]
                    if any(size > 0 for size in sizes):
                        return int(min(size for size in sizes if size > 0))
        return None

    def template(self) -> str:
        """The chat template, a Jinja text.

        Raises:
            InputError: there is none, or there are several and none is called `default`.
        """
        for path in self._paths("chat_template.jinja"):
            return _text(path)
        for name in ("chat_template.json", "tokenizer_config.json"):
            found = self._json(name).get("chat_template")
            if isinstance(found, str):
                return found
            if isinstance(found, list):
                return _named(found)
        raise InputError(
            f"no chat template beside {self.path}: chat_template.jinja, or chat_template in "
            "tokenizer_config.json; write the prompt out with --prompt instead"
        )

    def _paths(self, name: str) -> Iterator[Path]:
        return (folder / name for folder in self._folders if (folder / name).is_file())

    def _json(self, name: str) -> Mapping[str, Any]:
        if name not in self._read:
            self._read[name] = next((read_object(path) for path in self._paths(name)), {})
        return self._read[name]


def _named(templates: Sequence[Any]) -> str:
    found = {
        each["name"]: each["template"]
        for each in templates
        if isinstance(each, dict) and {"name", "template"} <= set(each)
    }
    if not isinstance(found.get("default"), str):
        raise InputError(
            f"tokenizer_config.json has the chat templates {_listed(found)} and none that is "
            "called 'default': write the one that is meant to chat_template.jinja beside it"
        )
    return str(found["default"])


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names)) or "(none)"


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes: that is no such file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_object(path: Path) -> Mapping[str, Any]:
    """The object that a JSON file holds.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a {type(found).__name__}, wanted an object")
    return found
