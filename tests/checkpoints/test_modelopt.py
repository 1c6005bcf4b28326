"""Checkpoints of NVIDIA's Model Optimizer: NVFP4 against torchao, FP8 by its definition."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder

from qgraph.checkpoints.fp8 import ACTIVATIONS
from qgraph.checkpoints.modelopt import MODELOPT
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

E4M3 = ml_dtypes.float8_e4m3fn
SAID = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
NAME = "model.layers.0.mlp.up_proj"


def nvfp4(n: int = 24, k: int = 96) -> dict[str, Array]:
    rng = np.random.default_rng(n + k)
    return {
        f"{NAME}.weight": rng.integers(0, 256, (n, k // 2), np.uint8),
        f"{NAME}.weight_scale": rng.uniform(0.02, 448, (n, k // 16)).astype(E4M3),
        f"{NAME}.weight_scale_2": np.array(0.0123, np.float32),
        f"{NAME}.input_scale": np.array(0.5, np.float32),
    }


def fp8(*shape: int) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        f"{NAME}.weight": rng.uniform(-448, 448, (256, 128)).astype(E4M3),
        f"{NAME}.weight_scale": rng.uniform(0.01, 1, shape).astype(np.float32),
    }


def test_by_hand(tmp_path: Path) -> None:
    weight = np.zeros((1, 8), np.uint8)
    weight[0, 0] = 0x7A  # low half first: -1, then 6
    tensors = {
        f"{NAME}.weight": weight,
        f"{NAME}.weight_scale": np.array([[1.5]], E4M3),
        f"{NAME}.weight_scale_2": np.array(2.0, np.float32),
    }
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, SAID)).entries[f"{NAME}.weight"]
    assert entry.dequantized(0, 1)[0, :3].tolist() == [-3.0, 18.0, 0.0]
    assert entry.rows(0, 1).codes[0, :3].tolist() == [10, 7, 0]


def test_nvfp4_is_torchao(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    tensors = nvfp4()
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, SAID)).entries[f"{NAME}.weight"]
    scale = torch.from_numpy(tensors[f"{NAME}.weight_scale"].view(np.uint8))
    theirs = NVFP4Tensor(
        torch.from_numpy(tensors[f"{NAME}.weight"]),
        scale.view(torch.float8_e4m3fn),
        16,
        torch.float32,
        torch.from_numpy(tensors[f"{NAME}.weight_scale_2"]),
    ).dequantize(torch.float32)
    np.testing.assert_array_equal(check_entry(entry), theirs.numpy())


def test_hf_quant_config_names_the_layout_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", nvfp4(), {})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    found = open_checkpoint(folder)
    assert found.layout == "modelopt"
    assert found.entries[f"{NAME}.weight"].format.spell() == "nvfp4"
    assert not found.floats
    assert found.warnings == (ACTIVATIONS,)


@pytest.mark.parametrize(
    "shape, kind", [((), "tensor"), ((256,), "row"), ((2, 1, 1, 1), "block"), ((2, 1), "block")]
)
def test_fp8(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    tensors = fp8(*shape)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.array(1, np.float32)
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, SAID))
    entry = found.entries[f"{NAME}.weight"]
    assert entry.format.scale == kind  # type: ignore[attr-defined]
    scale = tensors[f"{NAME}.weight_scale"].reshape(-1, 1)
    wide = np.repeat(scale, 128 if kind == "block" else 1, axis=0)
    values = tensors[f"{NAME}.weight"].astype(np.float32) * wide
    np.testing.assert_array_equal(check_entry(entry), values)
    assert found.warnings == ("scales of the key and value cache are left out",)


@pytest.mark.parametrize(
    "tensors, algorithm",
    [(nvfp4(), "NVFP4"), (fp8(), "FP8"), (fp8(256), "FP8_PER_CHANNEL_PER_TOKEN")],
)
def test_what_is_written_reads_back(
    tmp_path: Path, tensors: dict[str, Array], algorithm: str
) -> None:
    first = open_checkpoint(write_folder(tmp_path / "first", tensors, SAID))
    entry = first.entries[f"{NAME}.weight"]
    back = check_writing(MODELOPT, entry, tmp_path / "second")
    for part, stored in back.stored.items():
        assert stored.array().tobytes() == entry.stored[part].array().tobytes()
    said = MODELOPT.config([entry], ["lm_head.weight", "model.norm.weight"])
    assert (said["quant_algo"], said["ignore"]) == (algorithm, ["lm_head"])


def test_blocks_are_not_written(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path / "m", fp8(2, 1), SAID))
    reason = MODELOPT.can_write(found.entries[f"{NAME}.weight"])
    assert reason is not None
    assert "wanted fp8-e4m3:scale=tensor or fp8-e4m3:scale=row, or nvfp4" in reason


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight_scale": None}, r"up_proj lacks .*weight_scale, found input_scale, weight"),
        ({"weight_scale_2": None}, r"up_proj lacks .*weight_scale_2, found"),
        (
            {"weight_scale": np.zeros((24, 5), E4M3)},
            r"weight_scale is float8_e4m3fn \[24, 5\], wanted float8_e4m3fn \[24, 6\]",
        ),
        (
            {"weight_scale_2": np.zeros(2, np.float32)},
            r"weight_scale_2 is float32 \[2\], wanted float32 \[\]",
        ),
        ({"weight": np.zeros((24, 44), np.uint8)}, r"uint8 \[24, 44\], wanted \[N, K/2\]"),
        (
            {"pre_quant_scale": np.ones(96, np.float16)},
            r"has .*pre_quant_scale, by which activations are to be multiplied",
        ),
        ({"weight_scale_2": np.array(np.inf, np.float32)}, r"weight_scale_2 holds inf at \[0\]"),
        (
            {"weight_scale": np.full((24, 6), 0x7F, np.uint8).view(E4M3)},
            r"weight_scale holds nan at \[0, 0\]",
        ),
    ],
)
def test_bad_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    named = {f"{NAME}.{part}": value for part, value in change.items()}
    tensors = {name: value for name, value in {**nvfp4(), **named}.items() if value is not None}
    folder = write_folder(tmp_path / "m", tensors, SAID)
    with pytest.raises(InputError, match=message):
        open_checkpoint(folder).entries[f"{NAME}.weight"].rows(0, 24)
