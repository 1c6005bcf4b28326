"""A small random Llama: scaling keeps its logits, and its ONNX forms compute them too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.errors import InputError
from qgraph.models.build_cache import save
from qgraph.models.offgrid import scale_channels

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qgraph.models.llama_torch import Decoder  # noqa: E402  (needs both)

if TYPE_CHECKING:
    from transformers import LlamaConfig

# The exporter warns of its own deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore")
IDS = np.array([[1, 5, 9, 2, 60, 33], [7, 7, 7, 0, 1, 2]])


def config() -> LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
        use_cache=False,
    )


@pytest.fixture
def decoder() -> Decoder:
    shapes = transformers.LlamaForCausalLM(config()).state_dict()
    rng = np.random.default_rng(1)
    made = {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.2, tuple(value.shape))
        for name, value in shapes.items()
        if name != "lm_head.weight"
    }
    return Decoder(config(), [(name, value.astype(np.float32)) for name, value in made.items()])


def logits(decoder: Decoder) -> np.ndarray:
    with torch.no_grad():
        return decoder(torch.from_numpy(IDS))[0].numpy()


def test_scaling_keeps_the_logits_and_moves_the_weights(decoder: Decoder) -> None:
    before = {name: value.clone().numpy() for name, value in decoder.state_dict().items()}
    wanted = logits(decoder)
    scale_channels(decoder)
    after = {name: value.numpy() for name, value in decoder.state_dict().items()}
    assert np.abs(wanted).max() > 1.0
    np.testing.assert_allclose(logits(decoder), wanted, atol=2e-5)
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert kept == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    # The first 32 draws of default_rng(0) scale the first norm.
    first = "model.layers.0.input_layernorm.weight"
    drawn = np.exp(0.05 * np.random.default_rng(0).standard_normal(32))
    np.testing.assert_allclose(after[first] / before[first], drawn, rtol=1e-6)
    q = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(after[q] * drawn, before[q], rtol=1e-6)


def test_a_weight_without_a_place_is_refused() -> None:
    with pytest.raises(InputError, match=r"without a place: \['model\.extra'\]"):
        Decoder(config(), [("model.extra", np.zeros(2, np.float32))])


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["default", "plain"])
def test_exported_logits(decoder: Decoder, tmp_path: Path, plain: bool) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = decoder.export(plain)
    path, _ = save(model, tmp_path / "m.onnx")
    (found,) = ort.InferenceSession(path).run(["logits"], {"input_ids": IDS})
    np.testing.assert_allclose(found, logits(decoder), atol=1e-5)
    names = {name for name in model.graph.initializers if name.endswith("q_proj.weight")}
    assert len(names) == (2 if plain else 0)  # the optimizer folds a Transpose and renames
    assert model.opset_imports[""] == (23 if plain else 20)
    assert b"site-packages" not in path.read_bytes()


@pytest.mark.slow
def test_the_past_carries_on_where_it_stopped(decoder: Decoder, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    path, _ = save(decoder.export_past(), tmp_path / "m.onnx")
    session = ort.InferenceSession(path)
    cached = [f"{n}.{part}" for n in range(2) for part in ("key", "value")]
    names = [value.name for value in session.get_inputs()]
    assert names[:3] == ["input_ids", "attention_mask", "position_ids"]
    assert names[3:] == [f"past_key_values.{name}" for name in cached]
    past = {name: np.zeros((2, 2, 0, 8), np.float32) for name in names[3:]}
    found = []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        feeds = {
            "input_ids": IDS[:, start:stop],
            "attention_mask": np.ones((2, stop), np.int64),
            "position_ids": np.tile(np.arange(start, stop), (2, 1)),
        }
        out, *present = session.run(["logits", *(f"present.{n}" for n in cached)], feeds | past)
        found.append(out)
        past = dict(zip(past, present, strict=True))
    np.testing.assert_allclose(np.concatenate(found, 1), logits(decoder), atol=1e-5)
    assert ir.load(path).graph.outputs[1].name == "present.0.key"
