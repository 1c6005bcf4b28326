"""Text piece by piece: whole characters, stop texts held back, spaces as in the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_models import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qgraph.text import load_tokenizer
from qgraph.text_stream import TextStream


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def streamed(encoder: Any, text: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(encoder, (), stops)
    pieces = []
    for token in encoder.encode(text).ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_a_character_of_several_bytes_comes_whole(encoder: Any) -> None:
    assert streamed(encoder, "aé€😀b") == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


@given(st.text(max_size=20))
def test_pieces_make_the_text(encoder: Any, text: str) -> None:
    ids = encoder.encode(text).ids
    assert "".join(streamed(encoder, text)) == encoder.decode(ids)


def test_bytes_that_are_no_character_do_not_hold_the_text_back(encoder: Any) -> None:
    broken = encoder.encode("é").ids[0]
    stream = TextStream(encoder, ())
    assert any(stream.add(broken) for _ in range(10))
    assert stream.add(encoder.encode("x").ids[0]).endswith("x")


def test_half_a_character_at_the_end_is_shown_as_such(encoder: Any) -> None:
    stream = TextStream(encoder, ())
    assert stream.add(encoder.encode("é").ids[0]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    "text, stops, wanted",
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STO two", ("STOP",), "one STO two"),
        ("one STO", ("STOP",), "one STO"),
        ("ababac", ("abac",), "ab"),
        ("a END b STOP", ("STOP", "END"), "a "),
        ("\n\nUser:", ("\nUser",), "\n"),
    ],
)
def test_a_stop_text_is_no_part_of_it(
    encoder: Any, text: str, stops: tuple[str, ...], wanted: str
) -> None:
    pieces = streamed(encoder, text, stops)
    assert "".join(pieces) == wanted
    assert all(stop not in "".join(pieces) for stop in stops)


def test_a_space_after_the_prompt_is_kept() -> None:
    # A decoder that strips the space before the first word of a text.
    words = {"▁hello": 0, "▁world": 1, "<unk>": 2}
    encoder = Tokenizer(models.WordLevel(words, "<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    assert encoder.decode([1]) == "world"
    assert TextStream(encoder, [0]).add(1) == " world"


def test_special_tokens_have_no_text(encoder: Any) -> None:
    stream = TextStream(encoder, encoder.encode("a<user>").ids)
    assert stream.add(encoder.token_to_id("<end>")) == ""
    assert stream.add(encoder.encode("b").ids[0]) == "b"


def test_a_space_behind_a_token_that_is_not_shown_stays() -> None:
    words = {"\u2581a": 0, "</s>": 1, "\u2581the": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="b"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    stream = TextStream(tokenizer, [0])
    pieces = [stream.add(token) for token in (3, 1, 2, 1, 1, 2)]
    assert pieces == ["b", "", " the", "", "", " the"]
    assert "a" + "".join(pieces) == tokenizer.decode([0, 3, 1, 2, 1, 1, 2])
