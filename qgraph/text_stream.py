"""Tokens as text while they come: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6
"""Tokens before the first that decide how it is spelled: whether a space stands before it."""
_PENDING = 8
"""A character is at most 4 bytes, and a token at least one: after these the bytes are none."""
_HALF = "\ufffd"
"""What a decoder puts where bytes are no character (yet)."""


class TextStream:
    """The text of one row.

    Args:
        encoder: a `tokenizers.Tokenizer`.
        prompt: the tokens before the first one.
        stops: texts that end the row; they are no part of its text.
    """

    def __init__(self, encoder: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._encoder, self._stops = encoder, [stop for stop in stops if stop]
        self._ids = list(prompt[-_CONTEXT:])
        self._shown, self._read = 0, len(self._ids)  # tokens before the window, and of it shown
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain since the last call: "" while a character is not whole."""
        self._ids.append(token)
        before = self._decode(self._ids[self._shown : self._read])
        text = self._decode(self._ids[self._shown :])
        if text.endswith(_HALF) and len(self._ids) - self._read < _PENDING:
            return ""
        if text != before:  # what is not shown decides of no space behind it
            self._shown = self._read
        self._read = len(self._ids)
        return self._certain(text[len(before) :])

    def finish(self) -> str:
        """What was held back when nothing more comes."""
        if not self.stopped:
            before = self._decode(self._ids[self._shown : self._read])
            rest = self._decode(self._ids[self._shown :])[len(before) :]
            text, self._held = self._certain(rest) + self._held, ""
            return text
        return ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._encoder.decode(ids, skip_special_tokens=True)) if ids else ""

    def _certain(self, new: str) -> str:
        """`new` after what was held, without what may be the beginning of a stop text."""
        text = self._held + new
        places = [at for at in map(text.find, self._stops) if at >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
