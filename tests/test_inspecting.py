"""`qgraph inspect`: what is in a checkpoint, and which kernels take it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import write_folder
from rounded_entries import rounded

import qgraph
from qgraph.checkpoints import gptq
from qgraph.checkpoints.base import CheckpointLayout
from qgraph.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from qgraph.cli import run
from qgraph.errors import InputError

NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")


def folder(
    place: Path,
    layout: CheckpointLayout = gptq.V1,
    fmt: str = "uint4:group=32",
    *,
    order: bool = False,
) -> Path:
    """Two linears, the second in act order if wanted, and a norm in float."""
    columns = np.random.default_rng(0).permutation(128) if order else None
    entries = [
        rounded(NAMES[0], 64, 128, fmt),
        rounded(NAMES[1], 64, 128, fmt, order=columns),
    ]
    tensors = {name: array for entry in entries for name, array in layout.write(entry).items()}
    tensors["model.norm.weight"] = np.ones(128, np.float16)
    return write_folder(place, tensors, layout.config(entries, []))


def test_formats_groups_and_bits(tmp_path: Path) -> None:
    found = qgraph.inspect(folder(tmp_path / "m", order=True), targets=["ort-cpu"])
    assert found.layout == "gptq"
    assert found.formats == {"uint4:group=32": 1, "uint4:group=32 in act order": 1}
    up = next(row for row in found.rows if row.name == NAMES[0])
    gate = next(row for row in found.rows if row.name == NAMES[1])
    assert (up.shape, up.bits, up.group, up.symmetric) == ((64, 128), 4, "32", False)
    assert (up.act_order, gate.act_order) == (False, True)
    # 4 bits, a float16 scale and a zero point of 4 bits for 32 weights, and 32 bits for a column.
    assert up.bits_per_weight == 4 + (16 + 4) / 32 + 32 / 64
    assert found.bits_per_weight == up.bits_per_weight
    assert (found.float_tensors, found.float_bytes) == (1, 256)
    assert up.kernels == {"ort-cpu": "MatMulNBits bits=4 block=32 level=4"}
    assert gate.kernels == {"ort-cpu": "MatMulNBits bits=4 block=32 level=4 behind a Gather"}


def test_experts_are_shown_with_the_kernel_of_one(tmp_path: Path) -> None:
    tensors = {
        "model.experts.up_blocks": np.ones((3, 64, 2, 16), np.uint8),
        "model.experts.up_scales": np.full((3, 64, 2), 127, np.uint8),
    }
    place = write_folder(tmp_path / "m", tensors, {"quant_method": "mxfp4"})
    (row,) = qgraph.inspect(place, targets=["ort-cpu"]).rows
    alone = folder(tmp_path / "n", COMPRESSED_TENSORS, "mxfp4")
    kernel = qgraph.inspect(alone, targets=["ort-cpu"]).rows[0].kernels["ort-cpu"]
    assert row.shape == (3, 64, 64)
    assert row.kernels["ort-cpu"] == f"{kernel}, for one expert"


def test_a_format_without_a_kernel_says_why(tmp_path: Path) -> None:
    place = folder(tmp_path / "m", COMPRESSED_TENSORS, "mxfp8")
    (kernel,) = {row.kernels["ort-cpu"] for row in qgraph.inspect(place, targets=["ort-cpu"]).rows}
    assert kernel.startswith("portable: NO_FUSED_KERNEL")
    assert all(not row.kernels for row in qgraph.inspect(place, kernels=False).rows)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(tmp_path / "m")
    assert run(["inspect", str(place), "--target", "ort-cpu", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert set(found) == {
        "schema", "path", "layout", "formats", "bits_per_weight", "float_tensors", "float_bytes",
        "warnings", "tensors",
    }  # fmt: skip
    assert set(found["tensors"][0]) == {
        "name", "shape", "format", "bits", "group", "symmetric", "act_order", "nbytes",
        "bits_per_weight", "kernels", "notes",
    }  # fmt: skip


def test_the_command_prints_every_tensor_and_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path / "m", order=True)
    assert run(["inspect", str(place), "--target", "ort-cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tensor", "shape", "format", "bits/weight", "act", "order"]
    assert sum(line.startswith(NAMES[1]) and line.endswith("yes") for line in lines) == 1
    assert "ort-cpu: 1 × uint4:group=32 → MatMulNBits bits=4 block=32 level=4" in lines
    assert lines[-1] == f"next: qgraph import {place} -o OUT.onnx"
    config = place / "config.json"  # as it is beside a model that was no folder of transformers
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": None}))
    assert run(["inspect", str(place), "--target", "ort-cpu"]) == 0
    assert capsys.readouterr().out.endswith(f"next: qgraph import {place} MODEL.onnx -o OUT.onnx\n")


def test_a_float_checkpoint_can_be_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_folder(tmp_path / "m", {"a.weight": np.ones((8, 8), np.float16)}, {})
    assert run(["inspect", str(place)]) == 0
    out = capsys.readouterr().out
    assert "nothing is quantized, 1 tensor in float (128 bytes)" in out
    assert f"next: qgraph quantize {place} -o OUT" in out


def test_an_onnx_model_is_explained_instead(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file and no folder: wanted a checkpoint"):
        qgraph.inspect(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a")
    with pytest.raises(InputError, match=r"qgraph explain .*model\.onnx"):
        qgraph.inspect(tmp_path / "model.onnx")
