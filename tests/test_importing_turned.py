"""Checkpoints of modules that hold their linears as `[inputs, outputs]`: GPT-2's Conv1D."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from rounded_entries import ArraySource

import qgraph
from qgraph import registry
from qgraph.checkpoints.base import SourceEntry
from qgraph.checkpoints.opening import open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

IDS = np.arange(12).reshape(2, 6)


def gpt2(folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=80, n_positions=32, n_embd=64, n_layer=1, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    module.save_pretrained(folder)
    return module


def as_gptq(folder: Path) -> None:
    """Quantize the linears of a GPT-2 folder as GPTQ's tools do: outputs in the last axis."""
    from safetensors.numpy import load_file, save_file

    layout = registry.load("checkpoint", "gptq")
    tensors, entries = load_file(folder / "model.safetensors"), []
    for name in [each for each in tensors if each.endswith((".c_attn.weight", "_proj.weight"))]:
        turned = np.ascontiguousarray(tensors.pop(name).T)
        source = ArraySource(turned, "uint4:group=32", ir.DataType.FLOAT16)
        entries.append(SourceEntry.of(source, name))
        tensors |= layout.write(entries[-1])
    assert len(entries) == 3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = layout.config(entries, list(tensors))
    path.write_text(json.dumps(config))


@pytest.mark.filterwarnings("ignore")
def test_gpt2_from_its_folder_alone(tmp_path: Path) -> None:
    """Square ones too: attn.c_proj is [64, 64] either way around."""
    module = gpt2(tmp_path / "q")
    as_gptq(tmp_path / "q")
    done = qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx", accuracy_level=0)
    packed = {item.weight: item.kernel for item in done.plan.decisions if item.quantized}
    found = open_checkpoint(tmp_path / "q")
    assert packed == dict.fromkeys(found.entries, "MatMulNBits bits=4 block=32 level=0")
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, entry in found.entries.items():
            own[name].copy_(torch.from_numpy(entry.dequantized(0, entry.n).T))
        want = module(torch.from_numpy(IDS)).logits.numpy()
    logits = qgraph.open(tmp_path / "o.onnx").run({"input_ids": IDS})["logits"]
    assert np.abs(logits - want).max() <= 2e-6 * np.abs(want).max()
