"""Stacks of experts, from float to MXFP4: transformers' gpt-oss is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_folders import write_folder

from qgraph.checkpoints.expert_stacks import ExpertStack, stack_of
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.tensors import open_stored
from qgraph.cli import run
from qgraph.errors import CoverageError
from qgraph.formats.base import Array, parse
from qgraph.quantizing import quantize_checkpoint

E, N, K = 3, 24, 64
UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
ROUTER = "model.layers.0.mlp.router.weight"


def stack(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def folder(place: Path, tensors: dict[str, Array], **config: Any) -> Path:
    write_folder(place, tensors, {})
    said = {"model_type": "gpt_oss", "hidden_size": K, **config}
    (place / "config.json").write_text(json.dumps(said))
    return place


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_expert_is_rounded_on_its_own(tmp_path: Path, turned: bool, bias: bool) -> None:
    """[E, K, N] and [E, N, K], told apart by the biases or by the hidden size."""
    weight = stack(E, N, K)
    tensors = {UP: np.ascontiguousarray(weight.swapaxes(1, 2)) if turned else weight}
    tensors[ROUTER] = stack(E, K)
    tensors |= {f"{UP}_bias": stack(E, N)} if bias else {}
    done = quantize_checkpoint(folder(tmp_path / "in", tensors), tmp_path / "o", layout="mxfp4")
    assert done.summary.startswith("quantized 1 of 2 weights")
    found = open_checkpoint(tmp_path / "o")
    assert found.layout == "mxfp4" and found.warnings == ()
    entry = found.entries[UP]
    assert entry.shape == (E, N, K)
    assert entry.bias == (f"{UP}_bias" if bias else None)
    back = entry.rows(0, E * N)
    for expert in range(E):
        want = parse("mxfp4").quantize(weight[expert], ir.DataType.FLOAT)
        rows = slice(expert * N, (expert + 1) * N)
        np.testing.assert_array_equal(back.codes[rows], want.codes)
        np.testing.assert_array_equal(back.scales[rows], want.scales)
    for name in tensors.keys() - {UP}:
        np.testing.assert_array_equal(found.floats[name].rows(0, E), tensors[name])
    said = json.loads((tmp_path / "o" / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "mxfp4"
    assert said["model_type"] == "gpt_oss"


def test_down_proj_gives_the_hidden_size(tmp_path: Path) -> None:
    tensors = {DOWN: stack(E, 96, K)}  # [E, K, N]
    quantize_checkpoint(folder(tmp_path / "in", tensors), tmp_path / "o", layout="mxfp4")
    assert open_checkpoint(tmp_path / "o").entries[DOWN].shape == (E, K, 96)


def test_square_experts_lie_as_gpt_oss_has_them(tmp_path: Path) -> None:
    tensors = {DOWN: stack(E, K, K), f"{DOWN}_bias": stack(E, K)}
    stored = open_stored(folder(tmp_path / "in", tensors)).tensors
    found = stack_of(stored[DOWN], stored, {"model_type": "gpt_oss"})
    assert isinstance(found, ExpertStack) and found.turned
    assert "experts are square, [64, 64]" in str(stack_of(stored[DOWN], stored, {}))


def test_rows_across_experts(tmp_path: Path) -> None:
    tensors = {UP: stack(E, K, N), f"{UP}_bias": stack(E, N)}
    stored = open_stored(folder(tmp_path / "in", tensors)).tensors
    found = stack_of(stored[UP], stored, {})
    assert isinstance(found, ExpertStack)
    matrix = tensors[UP].swapaxes(1, 2).reshape(-1, K)
    for start, stop in [(0, 5), (20, 30), (3, E * N), (N, N), (0, E * N)]:
        np.testing.assert_array_equal(found.rows(start, stop), matrix[start:stop])


@pytest.mark.parametrize(
    "tensors, config, words",
    [
        (
            {"a.weight": stack(8, 64), "b.weight": stack(8, 32)},
            {},
            r"layout mxfp4: found 2 other weights, such as a\.weight \[8, 64\]; wanted a stack "
            r"\[E, K, N\] .*experts\.gate_up_proj.*compressed-tensors, --format mxfp4",
        ),
        ({"norm.weight": stack(8)}, {}, "found no weights; wanted a stack"),
        (
            {UP: stack(E, K, N), f"{UP}_bias": stack(E, 7)},
            {},
            r"gate_up_proj: its biases are \[3, 7\], wanted \[3, 64\] or \[3, 24\]",
        ),
        ({UP: stack(E, 32, N)}, {}, "no biases, and config.json's hidden_size 64 is not one of"),
        ({UP: stack(E, K, K)}, {"model_type": "qwen3_moe"}, r"square, \[64, 64\]"),
        ({UP: stack(E, 40, N)}, {"hidden_size": 40}, "its rows are 40 long, wanted a multiple"),
    ],
)
def test_folders_without_stacks_say_what_was_found(
    tmp_path: Path, tensors: dict[str, Array], config: dict[str, Any], words: str
) -> None:
    given = folder(tmp_path / "in", tensors, **config)
    with pytest.raises(CoverageError, match=words):
        quantize_checkpoint(given, tmp_path / "o", layout="mxfp4")
    assert not (tmp_path / "o").exists()


def test_names_leave_stacks_out(tmp_path: Path) -> None:
    tensors = {UP: stack(E, K, N), DOWN: stack(E, 96, K)}
    given = folder(tmp_path / "in", tensors)
    command = ["quantize", str(given), "-o", str(tmp_path / "o"), "--layout", "mxfp4"]
    assert run([*command, "--exclude", "*.down_proj"]) == 0
    found = open_checkpoint(tmp_path / "o")
    assert (list(found.entries), list(found.floats)) == ([UP], [DOWN])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_transformers_reads_the_same_numbers(tmp_path: Path, kind: str) -> None:
    """Its own unpacking, bit for bit, and the logits of gpt-oss with those weights in float."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loader = pytest.importorskip("transformers.integrations.mxfp4")
    made = gpt_oss(torch, transformers).to(getattr(torch, kind))
    made.save_pretrained(tmp_path / "in")
    module = type(made).from_pretrained(tmp_path / "in", dtype=torch.float32)
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "o", layout="mxfp4")
    assert len(done.entries) == 2 * module.config.num_hidden_layers
    found, stored = open_checkpoint(tmp_path / "o"), open_stored(tmp_path / "o").tensors
    for name, parameter in module.named_parameters():
        if name not in found.entries:
            continue
        entry = found.entries[name]
        ours = entry.dequantized(0, entry.total_rows).reshape(entry.shape).swapaxes(1, 2)
        packed = (torch.from_numpy(stored[f"{name}_{x}"].array()) for x in ("blocks", "scales"))
        theirs = loader.convert_moe_packed_tensors(*packed, dtype=torch.float32)
        np.testing.assert_array_equal(ours, theirs.numpy())
        assert np.abs(ours - parameter.detach().numpy()).max() < 0.1
        parameter.data.copy_(theirs)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "o",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        found_logits, want = loaded(ids).logits, module(ids).logits
    assert want.std() > 0.01
    torch.testing.assert_close(found_logits, want, rtol=1e-5, atol=1e-6)


def gpt_oss(torch: Any, transformers: Any) -> Any:
    """Two layers of two experts; down_proj is square, as in the published models."""
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(config).eval()
