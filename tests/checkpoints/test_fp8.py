"""FP8 checkpoints: blocks, tensors and rows, against transformers, and by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder

from qgraph.checkpoints.fp8 import FP8
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN = {"quant_method": "fp8"}
NAME = "model.layers.0.mlp.up_proj"


def weights(n: int, k: int, dtype: Any = E4M3) -> Array:
    values = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
    return np.clip(values * 100, -448, 448).astype(dtype)


def scales(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).uniform(0.001, 0.1, shape).astype(np.float32)


def test_by_hand(tmp_path: Path) -> None:
    weight = np.array([[1.0, -2.0], [448.0, 0.5]]).astype(E4M3)
    tensors = {"w.weight": weight, "w.weight_scale_inv": np.array([[0.25]], np.float32)}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, BLOCKS)).entries["w.weight"]
    assert entry.dequantized(0, 2).tolist() == [[0.25, -0.5], [112.0, 0.125]]
    assert entry.format.spell() == "fp8-e4m3:scale=block"


@pytest.mark.parametrize("n, k", [(256, 256), (200, 300), (8, 128), (129, 127)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_blocks_with_ragged_edges(tmp_path: Path, n: int, k: int, dtype: Any) -> None:
    weight, scale = weights(n, k), scales(-(-n // 128), -(-k // 128)).astype(dtype)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, BLOCKS)).entries[f"{NAME}.weight"]
    wide = np.repeat(np.repeat(scale.astype(np.float32), 128, 0)[:n], 128, 1)[:, :k]
    np.testing.assert_array_equal(check_entry(entry), weight.astype(np.float32) * wide)
    np.testing.assert_array_equal(entry.rows(0, n).codes, weight.view(np.uint8))


def test_blocks_are_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    loader = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = weights(256, 384), scales(2, 3)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, BLOCKS)).entries[f"{NAME}.weight"]
    own = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128)))
    codes = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    theirs = loader.Fp8Dequantize(own)._dequantize_one(codes, torch.from_numpy(scale))
    assert theirs.dtype == torch.float32
    np.testing.assert_array_equal(check_entry(entry), theirs.numpy())


def test_larger_blocks_repeat_their_scales(tmp_path: Path) -> None:
    weight, scale = weights(512, 512), scales(2, 4)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    said = {"quant_method": "fp8", "weight_block_size": [256, 128]}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, said)).entries[f"{NAME}.weight"]
    wide = np.repeat(np.repeat(scale, 256, 0), 128, 1)
    np.testing.assert_array_equal(check_entry(entry), weight.astype(np.float32) * wide)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48,), (48, 1)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_one_scale_per_tensor_or_row(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    weight, scale = weights(48, 64, dtype), scales(*shape)
    tensors = {
        f"{NAME}.weight": weight,
        f"{NAME}.weight_scale": scale,
        f"{NAME}.input_scale": np.ones((), np.float32),
        f"{NAME}.bias": np.ones(48, np.float32),
        "model.norm.weight": np.ones(64, np.float32),
    }
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, PLAIN))
    entry = found.entries[f"{NAME}.weight"]
    kind = "row" if 48 in shape else "tensor"
    assert entry.format.scale == kind  # type: ignore[attr-defined]
    wanted = weight.astype(np.float32) * scale.reshape(-1, 1)
    np.testing.assert_array_equal(check_entry(entry), wanted)
    assert entry.bias == f"{NAME}.bias"
    assert list(found.floats) == [f"{NAME}.bias", "model.norm.weight"]
    assert "scales of activations are left out" in found.warnings[0]


@pytest.mark.parametrize("said", [BLOCKS, PLAIN])
@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_what_is_written_reads_back(tmp_path: Path, said: dict[str, Any], kind: str) -> None:
    block = kind == "block"
    scale = scales(2, 3) if block else scales()
    name = "weight_scale_inv" if block else "weight_scale"
    tensors = {f"{NAME}.weight": weights(200, 300), f"{NAME}.{name}": scale}
    if said == BLOCKS and not block:
        said = {**said, "weight_block_size": None}
    first = write_folder(tmp_path / "first", tensors, said)
    entry = open_checkpoint(first).entries[f"{NAME}.weight"]
    check_writing(FP8, entry, tmp_path / "second")
    theirs = (tmp_path / "second" / "model.safetensors").read_bytes()
    assert theirs[-entry.nbytes :] == (first / "model.safetensors").read_bytes()[-entry.nbytes :]
    assert FP8.config([entry], ["lm_head.weight", "model.norm.weight"]) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128] if block else None,
        "modules_to_not_convert": ["lm_head"],
    }


def test_float16_scales_stay_float16(tmp_path: Path) -> None:
    tensors = {f"{NAME}.weight": weights(16, 32), f"{NAME}.weight_scale": scales(16).astype("f2")}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, PLAIN)).entries[f"{NAME}.weight"]
    assert entry.scale_dtype == ir.DataType.FLOAT16
    assert entry.rows(0, 16).scales.dtype == np.float16


@pytest.mark.parametrize("said", [BLOCKS, PLAIN])
def test_a_scale_of_zero_makes_a_weight_of_zeros(tmp_path: Path, said: dict[str, Any]) -> None:
    """The format stores 1 in place of such a scale: codes must say that the weight is 0."""
    scale = scales(2, 2) if said == BLOCKS else scales(200, 1)
    scale[1] = 0
    name = "weight_scale_inv" if said == BLOCKS else "weight_scale"
    tensors = {f"{NAME}.weight": weights(200, 200), f"{NAME}.{name}": scale}
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors, said)).entries[f"{NAME}.weight"]
    wanted = check_entry(entry)
    fmt, layout = entry.format, entry.format.default_layout
    stored = fmt.unpack(fmt.pack(entry.rows(0, 200), layout), 200, 200, layout)
    np.testing.assert_array_equal(fmt.dequantize(stored), wanted)
    rows = slice(128, 200) if said == BLOCKS else slice(1, 2)
    assert not wanted[rows].any() and wanted[:1].any()


def nan_weight() -> dict[str, Array]:
    weight = weights(16, 32)
    weight[3, 5] = np.nan
    return {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scales()}


@pytest.mark.parametrize(
    "tensors, said, message",
    [
        (
            {f"{NAME}.weight": weights(16, 32)},
            PLAIN,
            r"up_proj lacks model.layers.0.mlp.up_proj.weight_scale_inv, found weight",
        ),
        (
            {f"{NAME}.weight": weights(256, 256), f"{NAME}.weight_scale_inv": scales(2, 1)},
            BLOCKS,
            r"weight_scale_inv is float32 \[2, 1\], wanted .* \[2, 2\]",
        ),
        (
            {f"{NAME}.weight": weights(16, 32), f"{NAME}.weight_scale": scales(1).astype("i4")},
            PLAIN,
            r"weight_scale is int32 \[1\], wanted float16",
        ),
        (
            {f"{NAME}.weight": weights(16, 32)[0], f"{NAME}.weight_scale": scales()},
            PLAIN,
            r"weight is \[32\], wanted a matrix",
        ),
        (
            {f"{NAME}.weight": weights(64, 64), f"{NAME}.weight_scale_inv": scales(1, 1)},
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size is \[64, 64\], wanted two multiples of 128",
        ),
        *(
            (
                {f"{NAME}.weight": weights(64, 64), f"{NAME}.weight_scale_inv": scales(1, 1)},
                {"quant_method": "fp8", "weight_block_size": said},
                "weight_block_size is .*, wanted two multiples of 128",
            )
            for said in ([0, 0], [-128, 128], ["a", "b"], "x", [128], {}, [True, True])
        ),
        (
            {f"{NAME}.weight": weights(16, 32), f"{NAME}.weight_scale": scales(1) * np.nan},
            PLAIN,
            r"weight_scale holds nan at \[0, 0\], wanted finite",
        ),
        (nan_weight(), PLAIN, r"up_proj.weight holds nan at \[3, 5\], wanted finite"),
    ],
)
def test_bad_files(
    tmp_path: Path, tensors: dict[str, Array], said: dict[str, Any], message: str
) -> None:
    folder = write_folder(tmp_path / "m", tensors, said)
    with pytest.raises(InputError, match=message):
        open_checkpoint(folder).entries[f"{NAME}.weight"].rows(0, 16)
