"""Hugging Face folders: local, safetensors, no code of theirs; same numbers as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import qgraph
from qgraph.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 100}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **options
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, num_attention_heads=4)
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16}
    config = transformers.T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config)


def saved(make: Callable[[], Any], folder: Path) -> Any:
    """The model, saved to `folder`."""
    torch.manual_seed(0)
    module = make().eval()
    module.save_pretrained(folder)
    return module


IDS = np.random.default_rng(0).integers(0, 100, (3, 11))
MASK = np.ones_like(IDS)
MASK[1, 6:] = 0
IMAGE = np.random.default_rng(0).standard_normal((3, 3, 32, 32), np.float32)
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "llama": (llama, {"input_ids": IDS}, 9),
    "bert": (bert, {"input_ids": IDS, "attention_mask": MASK}, 11),
    "t5": (t5, {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4]}, 21),
    "vit": (vit, {"pixel_values": IMAGE}, 7),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    make, feeds, sites = KINDS[kind]
    module = saved(make, tmp_path / "model")
    graph = qgraph.capture(tmp_path / "model")
    assert [value.name for value in graph.model.graph.inputs] == list(feeds)
    assert len(graph.sites()) == sites
    assert tmp_path / "model" / "model.safetensors" in graph.files
    found = qgraph.open(graph).run(feeds)
    with torch.no_grad():
        wanted = module(**{key: torch.from_numpy(each) for key, each in feeds.items()})
    assert "logits" in found
    for key, each in found.items():
        want = wanted[key].numpy()
        assert np.abs(each - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.filterwarnings("ignore")
def test_bfloat16_is_read_as_float32_and_nothing_is_lost(tmp_path: Path) -> None:
    module = saved(lambda: llama().bfloat16(), tmp_path / "model")
    graph = qgraph.capture(tmp_path / "model")
    tensor = graph.model.graph.initializers["model.layers.0.mlp.up_proj.weight"].const_value
    assert tensor is not None
    assert tensor.dtype == ir.DataType.FLOAT
    stored = module.model.layers[0].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(tensor.numpy(), stored)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def shortened(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (as_pickle, r"weights as pickles \(pytorch_model.bin\).*wanted model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "remote code": (
        lambda f: change(f, model_type="mine", auto_map={"AutoModel": "code.Mine"}),
        "a 'mine', which transformers .* does not know and brings its own code, which is not run",
    ),
    "quantized": (
        lambda f: change(f, quantization_config={"quant_method": "gptq"}),
        r"quantized weights \(quant_method 'gptq'\)",
    ),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "no type": (lambda f: change(f, model_type=None), "names no model_type"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    "a missing weight": (shortened, "lacks 1 weights of its LlamaForCausalLM, such as model.norm"),
    "a cut file": (truncated, "cannot load .*SafetensorError"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused_say_why(tmp_path: Path, case: str) -> None:
    spoil, words = REFUSED[case]
    saved(llama, tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved(llama, folder)
    marker = tmp_path / "marker"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    change(folder, auto_map={"AutoModelForCausalLM": "code.Mine", "AutoConfig": "code.Mine"})
    assert len(qgraph.capture(folder).sites()) == 9
    assert not marker.exists()


def test_a_folder_without_a_model_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder, with no \.onnx file in it"):
        qgraph.capture(tmp_path)
