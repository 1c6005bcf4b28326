"""The sentence encoder: padding that does not count, and meanings that lie close."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qgraph.errors import InputError
from qgraph.models import minilm


def test_the_sentences_differ() -> None:
    found = minilm.sentences()
    assert (len(found), len(set(found))) == (20, 20)
    assert len({len(sentence) for sentence in found}) > 10


def test_encode_pads_on_the_right(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, "a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=9)  # the package's file pads to a fixed length: ours does not
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    feeds = minilm.encode(path, ["b a b", "b"])
    assert {name: array.dtype for name, array in feeds.items()} == dict.fromkeys(
        ("input_ids", "attention_mask"), np.int64
    )
    assert feeds["input_ids"].tolist() == [[2, 1, 2], [2, 0, 0]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown variant 'past', wanted one of default, plain"):
        minilm.build(tmp_path, "past")


@pytest.mark.download
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_close_meanings_lie_close() -> None:
    for package in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(package)
    ort = pytest.importorskip("onnxruntime")
    texts = [
        "The museum is closed on Mondays.",
        "On Mondays the museum does not open.",
        "Copper conducts heat better than steel.",
    ]
    feeds = minilm.encode(minilm.tokenizer(), texts)
    session = ort.InferenceSession(minilm.build())
    (hidden,) = session.run(["last_hidden_state"], feeds)
    assert hidden.shape == (*feeds["input_ids"].shape, 384)
    mask = feeds["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    close, far, _ = (mean @ mean.T)[np.triu_indices(3, 1)]
    assert close > 0.5 > 0.2 > far
    # Padding does not count: the shortest text alone gives what it gave beside longer ones.
    row = int(np.argmin(mask.sum((1, 2))))
    length = int(mask[row].sum())
    alone = session.run(
        None, {name: array[row : row + 1, :length] for name, array in feeds.items()}
    )
    np.testing.assert_allclose(alone[0][0], hidden[row, :length], atol=1e-5)
