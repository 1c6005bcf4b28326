"""A cache that is kept in few bits between the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decoders import decoder
from text_models import attention_decoder, byte_tokenizer

from qgraph import registry
from qgraph.cli import run
from qgraph.decoders import open_decoder
from qgraph.errors import InputError
from qgraph.runtimes.stored_decoding import StoredDecoder

RUNTIME = registry.load("target", "ort-cpu")
PROMPT = np.random.default_rng(0).integers(0, 256, (1, 40))
STEPS = np.random.default_rng(1).integers(0, 256, 30)


def logits(path: Path, layout: str = "") -> tuple[np.ndarray, object]:
    """Of the last token of a prompt, and of each token after it."""
    opened = open_decoder(RUNTIME, path, layout=layout).decoder
    found = [opened.start(PROMPT, room=len(STEPS)).copy()]
    found += [opened.step(np.array([token])).copy() for token in STEPS]
    return np.concatenate(found), opened


@pytest.mark.parametrize(
    "layout, error, bits", [("fp8", 0.1, 8.2), ("kivi8", 0.01, 14), ("kivi4", 0.2, 11)]
)
def test_logits_are_those_of_floats_up_to_the_bits(
    tmp_path: Path, layout: str, error: float, bits: float
) -> None:
    path = attention_decoder(tmp_path / "m.onnx")
    wanted, _ = logits(path)
    found, opened = logits(path, layout)
    assert isinstance(opened, StoredDecoder)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)  # reads no codes yet
    distance = np.linalg.norm(found[1:] - wanted[1:]) / np.linalg.norm(wanted[1:])
    assert error / 100 < distance < error
    assert {each.tokens for each in opened.stored.values()} == {70}
    assert 8 * opened.nbytes / (2 * 70 * 16) <= bits  # scales, and keys that fill no group, too


def test_a_new_prompt_forgets_the_last_one(tmp_path: Path) -> None:
    opened = open_decoder(RUNTIME, attention_decoder(tmp_path / "m.onnx"), layout="fp8").decoder
    first = opened.start(PROMPT, room=1).copy()
    opened.step(np.array([3]))
    np.testing.assert_array_equal(opened.start(PROMPT, room=1), first)


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    path = attention_decoder(tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"no cache layout 'kiwi4'; did you mean 'kivi4'"):
        open_decoder(RUNTIME, path, layout="kiwi4")
    with pytest.raises(InputError, match="the model has no cache: add one with --add-cache"):
        open_decoder(RUNTIME, decoder(tmp_path / "n.onnx"), layout="fp8")


def test_generate_takes_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer(tmp_path)
    path = attention_decoder(tmp_path / "m.onnx")
    given = ["generate", str(path), "--prompt", "The end", "--max-tokens", "3"]
    assert run([*given, "--cache-layout", "kivi4"]) == 0
    assert "3 tokens made" in capsys.readouterr().err
    assert run([*given, "--cache-layout", "kiwi"]) == 2
