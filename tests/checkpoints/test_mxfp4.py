"""Experts in MXFP4, as gpt-oss has them: transformers' own reading is the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder

from qgraph.checkpoints.base import Checkpoint
from qgraph.checkpoints.mxfp4 import MXFP4_EXPERTS
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

SAID = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def experts(e: int = 3, n: int = 24, k: int = 96) -> dict[str, Array]:
    rng = np.random.default_rng(e + n + k)
    return {
        f"{NAME}_blocks": rng.integers(0, 256, (e, n, k // 32, 16), np.uint8),
        f"{NAME}_scales": rng.integers(100, 140, (e, n, k // 32), np.uint8),
        f"{NAME}_bias": np.ones((e, n), np.float32),
        "model.layers.0.mlp.router.weight": np.ones((e, k), np.float32),
    }


def opened(folder: Path, tensors: dict[str, Array]) -> Checkpoint:
    return open_checkpoint(write_folder(folder, tensors, SAID))


def test_experts_are_one_entry(tmp_path: Path) -> None:
    found = opened(tmp_path / "m", experts())
    entry = found.entries[NAME]
    assert entry.shape == (3, 24, 96)
    assert entry.format.spell() == "mxfp4"
    assert entry.bias == f"{NAME}_bias"
    assert list(found.floats) == [f"{NAME}_bias", "model.layers.0.mlp.router.weight"]
    check_entry(entry)


def test_by_hand(tmp_path: Path) -> None:
    blocks = np.zeros((1, 1, 1, 16), np.uint8)
    blocks[..., 0] = 0x7A  # low half first: -1, then 6
    scales = np.full((1, 1, 1), 128, np.uint8)
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    entry = opened(tmp_path / "m", tensors).entries[NAME]
    assert entry.dequantized(0, 1)[0, :3].tolist() == [-2.0, 12.0, 0.0]
    assert entry.rows(0, 1).codes[0, :3].tolist() == [10, 7, 0]


def test_values_are_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    loader = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = experts()
    tensors[f"{NAME}_scales"].reshape(-1)[:4] = 0, 1, 2, 254 - 3
    entry = opened(tmp_path / "m", tensors).entries[NAME]
    theirs = loader.convert_moe_packed_tensors(
        torch.from_numpy(tensors[f"{NAME}_blocks"]),
        torch.from_numpy(tensors[f"{NAME}_scales"]),
        dtype=torch.float32,
    )
    assert theirs.shape == (3, 96, 24)
    ours = check_entry(entry).reshape(entry.shape)
    np.testing.assert_array_equal(ours, theirs.transpose(1, 2).numpy())


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    tensors = experts(2, 40, 64)
    entry = opened(tmp_path / "first", tensors).entries[NAME]
    back = check_writing(MXFP4_EXPERTS, entry, tmp_path / "second")
    for part in ("blocks", "scales"):
        np.testing.assert_array_equal(back.stored[part].array(), tensors[f"{NAME}_{part}"])


def test_one_linear_alone_is_refused(tmp_path: Path) -> None:
    tensors = {f"{NAME}_{part}": experts()[f"{NAME}_{part}"][0] for part in ("blocks", "scales")}
    entry = opened(tmp_path / "m", tensors).entries[NAME]
    assert entry.shape == (24, 96)
    check_entry(entry)
    assert "no expert axis" in str(MXFP4_EXPERTS.can_write(entry))


@pytest.mark.parametrize(
    "change, message",
    [
        ({f"{NAME}_scales": None}, r"gate_up_proj_scales is missing"),
        ({f"{NAME}_blocks": None}, r"gate_up_proj_scales and no .*gate_up_proj_blocks"),
        (
            {f"{NAME}_scales": np.zeros((3, 24, 2), np.uint8)},
            r"gate_up_proj_scales is uint8 \[3, 24, 2\], wanted .* \[3, 24, 3\]",
        ),
        (
            {f"{NAME}_blocks": np.zeros((3, 24, 3, 8), np.uint8)},
            r"gate_up_proj_blocks is uint8 \[3, 24, 3, 8\], wanted uint8 \[3, 24, 3, 16\]",
        ),
        ({f"{NAME}_blocks": np.zeros((24, 16), np.uint8)}, r"_blocks is \[24, 16\], wanted \[E,"),
        (
            {f"{NAME}_scales": np.full((3, 24, 3), 255, np.uint8)},
            r"gate_up_proj_scales holds nan at \[0, 0\], wanted finite",
        ),
    ],
)
def test_bad_files(tmp_path: Path, change: dict[str, Array | None], message: str) -> None:
    tensors = {name: value for name, value in {**experts(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "m", tensors).entries[NAME].rows(0, 72)
