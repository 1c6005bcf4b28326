"""Whether a tokenizer, and the tokens that data holds, belong to a model."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.language_model import table_rows
from qgraph.site_outputs import read_graph
from qgraph.wording import plural

_LEAST = 0.8
"""Of a vocabulary, which models round up to even sizes: so much of it is tokens."""


def vocabulary_of(model: Path | ir.Model, tokens: str | None) -> int | None:
    """Tokens below this are in the table of the input `tokens`; None where none is seen."""
    return table_rows(read_graph(model), tokens) if tokens is not None else None


def check_tokenizer(known: int, vocabulary: int | None, whose: str = "the model's") -> None:
    """Refuse a tokenizer of more tokens than the vocabulary (None or 0: not known) has.

    Raises:
        InputError: it has.
    """
    owner, _, _ = whose.rpartition("'")
    if vocabulary and known > vocabulary:
        raise InputError(
            f"{_sizes(known, vocabulary, whose)}: wanted the tokenizer that belongs to {owner}"
        )


def small_tokenizer(
    known: int, vocabulary: int | None, whose: str = "the model's"
) -> tuple[str, ...]:
    """A note on a tokenizer of far fewer tokens than the vocabulary has; else nothing."""
    if not known or not vocabulary or known >= _LEAST * vocabulary:
        return ()
    return (f"{_sizes(known, vocabulary, whose)}: is it {whose} own?",)


def check_token(worst: int, vocabulary: int | None, whose: str = "the model's") -> None:
    """Refuse a token that is not in the vocabulary (None or 0: not known).

    Raises:
        InputError: it is not.
    """
    if worst < 0 or (vocabulary and worst >= vocabulary):
        which = f"{whose} vocabulary of {vocabulary:,}" if vocabulary else "every vocabulary"
        raise InputError(f"token {worst} is outside {which}: the tokens belong to another model")


def _sizes(known: int, vocabulary: int, whose: str) -> str:
    return (
        f"the tokenizer has {known:,} {plural(known, 'token')}, {whose} vocabulary {vocabulary:,}"
    )
