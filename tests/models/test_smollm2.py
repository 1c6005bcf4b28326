"""SmolLM2 from its package: it knows a capital, and scaling it changes nothing that counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qgraph.errors import InputError
from qgraph.models import smollm2

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
# Greedy: " Paris.\n\nThe answer"
CONTINUATION = [7042, 30, 198, 198, 504, 2988]


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown variant 'fast', wanted one of default, plain"):
        smollm2.build(tmp_path, "fast")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.download
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_capital_of_france() -> None:
    for package in ("torch", "transformers", "gguf"):
        pytest.importorskip(package)
    ort = pytest.importorskip("onnxruntime")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(smollm2.tokenizer()))
    ids = made.encode("The capital of France is").ids
    assert ids == PROMPT
    session = ort.InferenceSession(smollm2.build())
    for _ in CONTINUATION:
        (logits,) = session.run(["logits"], {"input_ids": np.array([ids])})
        ids.append(int(logits[0, -1].argmax()))
    assert ids[len(PROMPT) :] == CONTINUATION
    assert made.decode(ids) == "The capital of France is Paris.\n\nThe answer"


@pytest.mark.download
@pytest.mark.slow
def test_scaled_channels_are_the_same_function() -> None:
    torch = pytest.importorskip("torch")
    for package in ("transformers", "gguf"):
        pytest.importorskip(package)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (2, 24)))
    with torch.no_grad():
        plain, scaled = (smollm2.load(offgrid)(ids)[0] for offgrid in (False, True))
    assert float(plain.abs().max()) > 20.0
    assert float((plain - scaled).abs().max()) < 1e-3
