"""Checkpoints of each layout, loaded by transformers on the CPU: it computes with our numbers.

The reference is the float module with the weights that our reader finds in the folder. What it
loads on no CPU, and is compared elsewhere:

- gptq, gptq_v2 and awq: transformers hands them to gptqmodel, which is a package of its own; the
  tests of the layouts pin the packing by hand, awq's also by compressed-tensors' converter.
- modelopt: transformers has no loader, and takes the codes for weights; the test of the layout has
  torchao.
- mxfp4: the test of stacks of experts loads gpt-oss.
- uint4 in compressed-tensors: transformers makes room for zero points as they are, and refuses
  them as the package packs them; the test of the layout has the package's compressor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bitsandbytes_cpu import in_float32

from qgraph.checkpoints.opening import open_checkpoint
from qgraph.quantizing import quantize_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CASES = [
    ("compressed-tensors", "int4:group=32"),
    ("bitsandbytes", "nf4"),
    ("bitsandbytes", "fp4"),
    ("bitsandbytes", "nf4:double=true"),
    ("fp8", "fp8-e4m3:scale=block"),
    ("gguf", None),
    ("gguf", "int8:group=32"),
    ("gguf", "uint4:group=32,zero=float"),
]
ROUNDED = [
    ("compressed-tensors", "int8-row"),
    ("compressed-tensors", "fp8-e4m3"),
    ("compressed-tensors", "fp8-e4m3:scale=tensor"),
    ("bitsandbytes", "int8-row"),
]
"""Of which the loaded module rounds activations too."""
SMALL_FLOATS = ["nvfp4", "mxfp4", "mxfp8"]
"""Which compressed-tensors makes bfloat16 of, whatever the model is."""
NEEDS = {
    "compressed-tensors": ("accelerate", "compressed_tensors"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate",),
    "gguf": ("accelerate", "gguf"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        vocab_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    place = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.parametrize("layout, spelled", CASES)
def test_logits_are_those_of_our_numbers(
    tmp_path: Path, folder: Path, layout: str, spelled: str | None
) -> None:
    loaded, module, before = both(tmp_path, folder, layout, spelled)
    found, wanted = logits(loaded), logits(module)
    top = np.abs(wanted).max()
    assert np.abs(wanted - before).max() > 1e-3 * top
    assert np.abs(found - wanted).max() <= 1e-5 * top


@pytest.mark.parametrize("layout, spelled", ROUNDED)
def test_weights_are_ours_where_activations_are_rounded_too(
    tmp_path: Path, folder: Path, layout: str, spelled: str
) -> None:
    loaded, module, _ = both(tmp_path, folder, layout, spelled)
    found, wanted = logits(loaded), logits(module)
    assert 0 < np.abs(found - wanted).max() < 0.06 * np.abs(wanted).max()
    for name, parameter in module.named_parameters():
        own = loaded.get_parameter(name).detach()
        if own.dtype.itemsize == 1:
            linear = loaded.get_submodule(name.removesuffix(".weight"))
            scales = linear.state.SCB if linear.state.SCB is not None else own.SCB
            own = own.float() * (scales / 127)[:, None]
        np.testing.assert_allclose(own.numpy(), parameter.detach().numpy(), rtol=2e-7)


@pytest.mark.parametrize("spelled", SMALL_FLOATS)
def test_small_floats_are_ours_in_bfloat16(tmp_path: Path, folder: Path, spelled: str) -> None:
    loaded, module, _ = both(tmp_path, folder, "compressed-tensors", spelled, "bfloat16")
    found, wanted = logits(loaded), logits(module)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
    for name, parameter in module.named_parameters():
        own = loaded.get_parameter(name).detach().float()
        np.testing.assert_allclose(own.numpy(), parameter.detach().float().numpy(), rtol=2.0**-7)


def both(
    path: Path, folder: Path, layout: str, spelled: str | None, dtype: str = "float32"
) -> tuple[Any, Any, np.ndarray]:
    """What transformers loads, the float model with our numbers, and its logits without them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for package in NEEDS[layout]:
        pytest.importorskip(package)
    more = {"gguf_file": "model.gguf"} if layout == "gguf" else {}
    out = path / more.get("gguf_file", "out")
    quantize_checkpoint(folder, out, layout=layout, format=spelled)
    given = {"dtype": getattr(torch, dtype)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = in_float32(load(path if more else out, **given, **more))
    module = load(folder, **given)
    before = logits(module)
    entries = open_checkpoint(out).entries
    assert len(entries) == 7
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, entry in entries.items():
            parameters[name].copy_(torch.from_numpy(entry.dequantized(0, entry.n)))
    return loaded, module, before


def logits(module: Any) -> np.ndarray:
    """Of two short rows of tokens, float32."""
    import torch

    with torch.no_grad():
        ids = torch.arange(12).reshape(2, 6)
        found: np.ndarray = module.eval()(input_ids=ids).logits.float().numpy()
    return found
