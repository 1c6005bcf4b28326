"""Mixtures of experts from a folder alone: transformers joins and renames their parameters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qgraph
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.expert_sites import GATHERED
from qgraph.formats.base import Array
from qgraph.quantizing import quantize_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 128, "hidden_size": 128}
IDS = np.arange(12).reshape(2, 6)


def saved(kind: str, folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    module.save_pretrained(folder)
    return module


def dequantized(source: Path, packed: Path, folder: Path) -> Any:
    """The float model with the values that `packed` stands for; transformers joins its experts."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, entry in open_checkpoint(packed).entries.items():
        rows = torch.from_numpy(entry.dequantized(0, entry.total_rows))
        tensors[name] = rows.reshape(tensors[name].shape).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(module: Any) -> Array:
    with torch.no_grad():
        found: Array = module(torch.from_numpy(IDS)).logits.numpy()
    return found


def check(folder: Path, want: Array) -> None:
    found = qgraph.open(folder / "o.onnx").run({"input_ids": IDS})["logits"]
    assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()


def experts(done: Any) -> list[Any]:
    return [item for item in done.plan.decisions if item.role == "experts"]


def test_gpt_oss_runs_with_its_experts_packed(tmp_path: Path) -> None:
    """The oracle is transformers' own dequantization of MXFP4."""
    saved("GptOss", tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "q", layout="mxfp4")
    done = qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx", accuracy_level=0)
    found = experts(done)
    assert [(item.format, item.kernel, item.reason) for item in found] == [
        ("mxfp4", "portable", "NO_FUSED_KERNEL")
    ] * 2
    assert "the experts that a run hits are dequantized one by one" in found[0].detail
    assert GATHERED not in done.report.notes
    packed = sum(item.n * item.k * 17 // 32 for item in found)
    assert sum(item.packed_bytes for item in found) == packed  # 4.25 bits a weight
    constants = done.graph.model.graph.initializers
    entry = open_checkpoint(tmp_path / "q").entries["model.layers.0.mlp.experts.down_proj"]
    codes = constants[f"{entry.name}.codes"].const_value
    assert codes is not None
    assert codes.tobytes() == entry.stored["blocks"].rows(0, 4).tobytes()
    module = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    check(tmp_path, logits(module))
    check_export(tmp_path)


def check_export(folder: Path) -> None:
    """The stacks go back as they came; a layout of matrices alone has no place for them."""
    qgraph.export_checkpoint(folder / "o.onnx", folder / "back", layout="mxfp4", like=folder / "in")
    first, again = (open_checkpoint(folder / name) for name in ("q", "back"))
    assert list(again.entries) == list(first.entries)
    assert sorted(again.floats) == sorted(first.floats)
    for name, entry in first.entries.items():
        for part in ("blocks", "scales"):
            found = again.entries[name].stored[part].rows(0, 4)
            np.testing.assert_array_equal(found, entry.stored[part].rows(0, 4))
    with pytest.raises(InputError, match="a stack of 4 experts, and compressed-tensors holds each"):
        qgraph.export_checkpoint(folder / "o.onnx", folder / "no", layout="compressed-tensors")


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "pack-quantized": (
        "Mixtral",
        {},
        {"layout": "compressed-tensors", "format": "int4", "group": 32},
        "GatherBlockQuantized bits=4 block=32",
    ),
    "gptq": (
        "Mixtral",
        {},
        {"layout": "gptq", "format": "uint4", "group": 32},
        "GatherBlockQuantized bits=4 block=32",
    ),
    "awq": (
        "Qwen3Moe",
        QWEN,
        {"layout": "awq", "format": "uint4", "group": 64},
        "GatherBlockQuantized bits=4 block=64",
    ),
    "fp8 in blocks": ("Qwen3Moe", QWEN, {"layout": "fp8"}, "portable"),
}


@pytest.mark.parametrize("case", CASES)
def test_single_experts_become_a_stack_code_for_code(tmp_path: Path, case: str) -> None:
    kind, sizes, options, kernel = CASES[case]
    saved(kind, tmp_path / "in", **sizes)
    quantize_checkpoint(tmp_path / "in", tmp_path / "q", **options)
    done = qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx", accuracy_level=0)
    found = experts(done)
    assert [item.weight for item in found] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    ]
    assert [item.kernel for item in found] == [kernel] * 2
    assert all("code for code" in item.detail for item in found)
    check(tmp_path, logits(dequantized(tmp_path / "in", tmp_path / "q", tmp_path / "float")))


def test_experts_that_stayed_in_float_keep_their_values(tmp_path: Path) -> None:
    """Mixtral's files hold each expert's matrices alone; the module holds them as stacks."""
    module = saved("Mixtral", tmp_path / "in")
    quantize_checkpoint(
        tmp_path / "in", tmp_path / "q", format="int8", group=32, exclude=["*.experts.*"]
    )
    done = qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx", accuracy_level=0)
    assert done.report.totals["linears_quantized"] == 4
    assert {item.reason for item in experts(done)} == {"FLOAT_IN_CHECKPOINT"}
    assert GATHERED in done.report.notes
    found = open_checkpoint(tmp_path / "q")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in found.entries:
                rows = found.entries[name].dequantized(0, parameter.shape[0])
                parameter.copy_(torch.from_numpy(rows))
    want = logits(module)
    logits_found = qgraph.open(tmp_path / "o.onnx").run({"input_ids": IDS})["logits"]
    assert np.abs(logits_found - want).max() <= 1e-5 * np.abs(want).max()


def in_act_order(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.2.w3.g_idx"] = np.repeat([1, 0], 32).astype(
        np.int32
    )
    save_file(tensors, folder / "model.safetensors")


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "some in float": (
        {"exclude": ["*.experts.2.w3.weight"]},
        lambda folder: None,
        "not all quantized: of expert 2 not all of w1, w3 is",
    ),
    "act order": ({}, in_act_order, r"experts\.2\.w3\.weight is in act order.*without desc_act"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_fit_in_no_stack_are_named(tmp_path: Path, case: str) -> None:
    more, spoil, words = REFUSED[case]
    saved("Mixtral", tmp_path / "in")
    options = {"layout": "gptq", "format": "uint4", "group": 32}
    quantize_checkpoint(tmp_path / "in", tmp_path / "q", **options, **more)
    spoil(tmp_path / "q")
    with pytest.raises(InputError, match=words):
        qgraph.import_checkpoint(tmp_path / "q", None, tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


def test_stacks_are_bound_by_name_to_a_graph_from_elsewhere(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path / "in")
    options = {"layout": "gptq", "format": "uint4", "group": 32}
    quantize_checkpoint(tmp_path / "in", tmp_path / "q", **options)
    graph = qgraph.capture(tmp_path / "in")
    bindings = {}
    for name in ("gate_up_proj", "down_proj"):
        value = graph.model.graph.initializers.pop(f"model.layers.0.mlp.experts.{name}")
        bindings[f"experts/{name}"] = value.name or ""
        value.name = f"experts/{name}"
        graph.model.graph.initializers.add(value)
    done = qgraph.import_checkpoint(tmp_path / "q", graph, bindings=bindings)
    assert [item.weight for item in experts(done)] == list(bindings)
    assert all(item.solver == "imported" for item in experts(done))
