"""`qgraph quantize`: from a float checkpoint to a quantized one, without a graph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sparse_checkpoint import sparse_checkpoint

from qgraph.checkpoints.opening import open_checkpoint
from qgraph.cli import run
from qgraph.errors import CoverageError, InputError
from qgraph.formats.base import Array, parse
from qgraph.quantizing import quantize_checkpoint

LINEARS = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up")
FLOATS = ("model.embed_tokens", "lm_head", "model.layers.0.mlp.gate")


def model(folder: Path, dtype: Any = np.float16, k: int = 128) -> dict[str, Array]:
    """A float checkpoint of a few matrices."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal((64, k)) for name in (*LINEARS, *FLOATS)}
    tensors["model.layers.0.input_layernorm.weight"] = rng.standard_normal(k)
    tensors["model.layers.0.experts"] = rng.standard_normal((2, 8, k))
    tensors["model.layers.0.mlp.up_proj.bias"] = rng.standard_normal(64)
    typed = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    if dtype == np.float16:
        save_file(typed, folder / "model.safetensors")
    else:  # the package writes bfloat16 from torch only
        import torch
        from safetensors.torch import save_file as save_torch

        save_torch(
            {n: torch.from_numpy(t.astype(np.float32)).bfloat16() for n, t in typed.items()},
            folder / "model.safetensors",
        )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return typed


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "gptq_v2", "awq", "fp8"])
def test_linears_are_rounded_as_the_format_has_it(tmp_path: Path, layout: str, dtype: Any) -> None:
    tensors = model(tmp_path / "in", dtype)
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", layout=layout)
    assert {entry.name for entry in done.entries} == {f"{name}.weight" for name in LINEARS}
    found = open_checkpoint(tmp_path / "out")
    assert found.layout == layout and not any("says" in text for text in found.warnings)
    for entry in done.entries:
        back = found.entries[entry.name]
        weight = tensors[entry.name].astype(np.float32)
        wanted = parse(entry.format.spell()).quantize(weight, entry.scale_dtype)
        np.testing.assert_array_equal(back.rows(0, 64).codes, wanted.codes)
        np.testing.assert_array_equal(
            back.rows(0, 64).scales.astype(np.float32), wanted.scales.astype(np.float32)
        )
        assert back.difference(0, 64) == 0
    for name in set(tensors) - {entry.name for entry in done.entries}:
        np.testing.assert_array_equal(found.floats[name].rows(0, len(tensors[name])), tensors[name])
    assert (tmp_path / "out" / "tokenizer.json").exists()
    # 3 · 64 · 128 of 6 · 64 · 128 elements and those of two experts
    assert "quantized 3 of 7 weights (48.0 % of their elements)" in done.summary


def test_names_choose_and_exclude(tmp_path: Path) -> None:
    model(tmp_path / "in")
    done = quantize_checkpoint(
        tmp_path / "in",
        tmp_path / "out",
        include=["*mlp*", "lm_head"],
        exclude=["*.down_proj"],
        format="int8",
        group=64,
    )
    assert {entry.name for entry in done.entries} == {
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up.weight",
    }
    reasons = {kept.name: kept.reason for kept in done.kept}
    assert reasons["model.layers.0.mlp.down_proj.weight"] == "excluded"
    assert reasons["model.embed_tokens.weight"] == "not included"
    assert reasons["model.layers.0.experts"] == "rank 3"
    assert {entry.format.spell() for entry in done.entries} == {"int8:group=64"}


def test_hqq_is_nearer_to_the_weight_by_its_own_loss(tmp_path: Path) -> None:
    tensors = model(tmp_path / "in")
    errors = {}
    for solver in ("rtn", "hqq"):
        done = quantize_checkpoint(
            tmp_path / "in", tmp_path / solver, format="uint4", group=64, solver=solver
        )
        found = open_checkpoint(tmp_path / solver).entries[done.entries[0].name]
        weight = tensors[found.name].astype(np.float32)
        counts = 1 + 0.05 * weight**2 / (weight**2).mean(1, keepdims=True)
        errors[solver] = (counts * (weight - found.dequantized(0, 64)) ** 2).sum()
    assert errors["hqq"] < 0.97 * errors["rtn"]


def test_solvers_that_need_data_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "in")
    with pytest.raises(InputError, match="solver gptq needs data and a graph"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", solver="gptq")
    with pytest.raises(InputError, match=r"hqq left the ranges alone: .* take --solver rtn"):
        quantize_checkpoint(
            tmp_path / "in", tmp_path / "out", format="fp8-e4m3:scale=tensor", solver="hqq"
        )


def test_groups_chosen_here_divide_every_row(tmp_path: Path) -> None:
    model(tmp_path / "in", k=192)
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", layout="awq")
    assert {entry.format.spell() for entry in done.entries} == {"uint4:group=64"}


def test_nothing_that_can_be_quantized_is_an_error(tmp_path: Path) -> None:
    model(tmp_path / "in", k=192)
    with pytest.raises(CoverageError, match=r"groups of 128 do not divide K = 192 \(3 of 7\)"):
        quantize_checkpoint(
            tmp_path / "in", tmp_path / "out", layout="awq", format="uint4", group=128
        )
    assert not (tmp_path / "out").exists()


def test_matrices_without_elements_stay_as_they_are(tmp_path: Path) -> None:
    tensors = model(tmp_path / "in")
    tensors |= {"a.weight": np.zeros((0, 64), np.float16), "b.weight": np.zeros((8, 0), np.float16)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="int4", group=32)
    reasons = {kept.name: kept.reason for kept in done.kept}
    assert reasons["a.weight"] == reasons["b.weight"] == "it has no elements"
    assert open_checkpoint(tmp_path / "out").floats["a.weight"].shape == (0, 64)


def test_linears_that_lie_turned_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match=r"a gpt2, which stores its linears \[inputs, outputs\]"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    "how, words",
    [
        ({"include": ["*up_prj"]}, r"'\*up_prj' matches no tensor; did you mean 'up_proj'"),
        ({"layout": "gtpq"}, "no checkpoint named 'gtpq'; did you mean"),
        ({"format": "int5"}, "no format named 'int5'"),
    ],
)
def test_wrong_options_name_the_nearest(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    model(tmp_path / "in")
    with pytest.raises(InputError, match=words):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", **how)


def test_outputs_within_the_input_and_quantized_inputs_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "in")
    with pytest.raises(InputError, match=r"lies in .*in: choose a folder outside"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "in" / "out")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    with pytest.raises(InputError, match=r"quantized already \(layout compressed-tensors\)"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again")


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    model(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[f"{LINEARS[0]}.weight"][7, 9] = np.nan
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(InputError, match=r"up_proj\.weight: NON_FINITE_WEIGHT: nan at row 7, co"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path / "in")
    out = tmp_path / "out"
    assert run(["quantize", str(tmp_path / "in"), "-o", str(out), "--layout", "gptq"]) == 0
    text = capsys.readouterr().out
    assert "3 × in float: no linear by its name" in text
    assert "1 × in float: rank 3; such as model.layers.0.experts" in text
    assert "quantized 3 of 7 weights (48.0 % of their elements) to uint4:group=128 (" in text
    assert f"wrote {out}/config.json" in text
    assert f"next: qgraph inspect {out}" in text
    assert run(["quantize", str(tmp_path / "in"), "-o", str(out)]) == 2
    assert "exists: choose another place" in capsys.readouterr().err


MEMORY = """
import resource, sys
from pathlib import Path
from qgraph.quantizing import quantize_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_checkpoint(sys.argv[1], sys.argv[2], layout=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, layout: str) -> None:
    sparse_checkpoint(tmp_path / "in", layers=10, n=2048, k=4096)  # 168 MB in float16
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "in"), str(tmp_path / "out"), layout],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(found.stdout) < 130_000  # kB: 64 MB of floats, one weight's codes, its words
