"""Mixtures of experts from a folder alone: transformers joins and renames their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qgraph
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import CoverageError
from qgraph.quantizing import quantize_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    module.save_pretrained(folder)
    return module


@pytest.mark.filterwarnings("ignore")
def test_experts_that_stayed_in_float_keep_their_values(tmp_path: Path) -> None:
    """Mixtral's files hold each expert's matrices alone; the module holds them as stacks."""
    module = saved("Mixtral", tmp_path / "in")
    quantize_checkpoint(
        tmp_path / "in", tmp_path / "q", format="int8", group=32, exclude=["*.experts.*"]
    )
    done = qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx", accuracy_level=0)
    assert done.report.totals["linears_quantized"] == 8
    found, ids = open_checkpoint(tmp_path / "q"), np.arange(12).reshape(2, 6)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in found.entries:
                rows = found.entries[name].dequantized(0, parameter.shape[0])
                parameter.copy_(torch.from_numpy(rows))
        want = module(torch.from_numpy(ids)).logits.numpy()
    logits = qgraph.open(tmp_path / "o.onnx").run({"input_ids": ids})["logits"]
    assert np.abs(logits - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.filterwarnings("ignore")
def test_stacks_alone_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    saved("GptOss", tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "q", layout="mxfp4")
    words = r"4 quantized parameters .* stacks of experts, such as .*WEIGHT_RANK.*float model's fol"
    with pytest.raises(CoverageError, match=words):
        qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()
