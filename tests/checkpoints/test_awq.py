"""AWQ checkpoints, packed output by output from the layout's definition; and others' reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder
from rounded_entries import rounded

from qgraph.checkpoints.awq import AWQ
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

NAME = "model.layers.0.self_attn.q_proj"
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)
"""The lowest bit of each of eight outputs in a word."""


def words(codes: Array) -> Array:
    """Codes `[m, N]` as int32 `[m, N/8]`."""
    m, n = codes.shape
    found = np.zeros((m, n // 8), np.uint32)
    for at in range(n):
        found[:, at // 8] |= codes[:, at].astype(np.uint32) << np.uint32(PLACES[at % 8])
    return found.view(np.int32)


def made(n: int, k: int, group: int, *, sym: bool = False) -> tuple[dict[str, Array], Array]:
    """The tensors of a random linear, and its weight by the formula."""
    rng = np.random.default_rng(n + k)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    if sym:
        zeros[:] = 8
    scales = rng.uniform(0.01, 0.1, (k // group, n)).astype(np.float16)
    wide = [np.repeat(each, group, axis=0) for each in (zeros, scales.astype(np.float32))]
    tensors = {
        f"{NAME}.qweight": words(codes),
        f"{NAME}.qzeros": words(zeros),
        f"{NAME}.scales": scales,
    }
    return tensors, ((codes - wide[0]).astype(np.float32) * wide[1]).T


def configuration(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", **more}


@pytest.mark.parametrize("n, k, group", [(16, 64, 32), (40, 256, 128), (8, 96, 96)])
@pytest.mark.parametrize("sym", [False, True])
def test_values(tmp_path: Path, n: int, k: int, group: int, sym: bool) -> None:
    tensors, weight = made(n, k, group, sym=sym)
    checkpoint = open_checkpoint(
        write_folder(tmp_path / "m", tensors, configuration(group_size=group))
    )
    entry = checkpoint.entries[f"{NAME}.weight"]
    assert checkpoint.layout == "awq" and not checkpoint.warnings
    np.testing.assert_array_equal(check_entry(entry), weight)
    assert entry.format.symmetric == sym
    np.testing.assert_array_equal(entry.dequantized(3, 7), weight[3:7])


def test_a_converter_of_others_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, _ = made(40, 256, 128)
    converter = AutoAWQConverter(group_size=128)
    found = converter.process({name: torch.tensor(array) for name, array in tensors.items()})
    codes = unpack_from_int32(found[f"{NAME}.weight_packed"], 4, torch.Size((40, 256))).numpy()
    zeros = unpack_from_int32(
        found[f"{NAME}.weight_zero_point"], 4, torch.Size((40, 2)), packed_dim=0
    ).numpy()
    folder = write_folder(tmp_path / "m", tensors, configuration(group_size=128))
    rows = open_checkpoint(folder).entries[f"{NAME}.weight"].rows(0, 40)
    assert rows.zeros is not None
    np.testing.assert_array_equal(rows.codes.astype(int) - 8, codes)
    np.testing.assert_array_equal(rows.zeros.astype(int) - 8, zeros)


@pytest.mark.parametrize("fmt", ["uint4:group=32", "int4:group=64", "uint4:group=row"])
def test_what_is_written_reads_back(tmp_path: Path, fmt: str) -> None:
    entry = rounded(f"{NAME}.weight", 72, 128, fmt)
    back = check_writing(AWQ, entry, tmp_path / "m")
    np.testing.assert_array_equal(check_entry(back), entry.dequantized(0, 72))
    assert back.format.spell() == fmt


def test_what_the_layout_cannot_hold_is_refused() -> None:
    cases = {
        "int8:group=32": (64, 64, "has 8 bits, wanted 4"),
        "uint4:group=64": (64, 96, "groups of 64 do not divide K = 96"),
        "uint4:group=32": (60, 64, "it has N = 60, wanted a multiple of 8"),
    }
    for fmt, (n, k, reason) in cases.items():
        assert reason in str(AWQ.can_write(rounded("w.weight", n, k, fmt)))
    moved = rounded("w.weight", 64, 64, "uint4:group=32", order=np.arange(64)[::-1])
    assert "act order" in str(AWQ.can_write(moved))


@pytest.mark.parametrize(
    "said, reason",
    [
        ({"version": "gemv"}, "AWQ of version 'gemv' with 4 bits: wanted gemm with 4"),
        ({"bits": 8}, "AWQ of version 'gemm' with 8 bits"),
        ({"bits": "4"}, "AWQ of version 'gemm' with '4' bits"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, said: dict[str, Any], reason: str) -> None:
    tensors, _ = made(16, 64, 32)
    with pytest.raises(InputError, match=reason):
        open_checkpoint(write_folder(tmp_path / "m", tensors, configuration() | said))


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("qzeros", lambda a: a[:, :1], r"qzeros is int32 \[2, 1\], wanted int32 \[2, 2\]"),
        ("qweight", lambda a: a[:, :1], r"qweight is int32 \[64, 1\], wanted int32 \[64, 2\]"),
        ("scales", lambda a: a[0], r"scales \[16\]: wanted two matrices"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, name: str, change: Any, reason: str) -> None:
    tensors, _ = made(16, 64, 32)
    tensors[f"{NAME}.{name}"] = change(tensors[f"{NAME}.{name}"])
    with pytest.raises(InputError, match=reason):
        open_checkpoint(write_folder(tmp_path / "m", tensors, configuration()))


def test_another_group_than_said_is_warned_of(tmp_path: Path) -> None:
    tensors, weight = made(16, 64, 32)
    folder = write_folder(tmp_path / "m", tensors, configuration(group_size=64))
    checkpoint = open_checkpoint(folder)
    assert "says group_size 64, and" in checkpoint.warnings[0]
    np.testing.assert_array_equal(check_entry(checkpoint.entries[f"{NAME}.weight"]), weight)


@pytest.mark.parametrize("size", ["128", [32], {}, float("nan"), -5])
def test_a_group_size_that_is_none_is_warned_of(tmp_path: Path, size: Any) -> None:
    tensors, _ = made(16, 64, 32)
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, configuration(group_size=size)))
    assert f"says group_size {size!r}, and" in found.warnings[0]


def test_a_last_group_that_is_shorter(tmp_path: Path) -> None:
    """Two groups of 224 inputs are 128 and 96, as the configuration alone says."""
    tensors, weight = made(16, 256, 128)
    tensors[f"{NAME}.qweight"] = tensors[f"{NAME}.qweight"][:224]
    folder = write_folder(tmp_path / "m", tensors, configuration(group_size=128))
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.warnings
    found = check_entry(checkpoint.entries[f"{NAME}.weight"])
    np.testing.assert_array_equal(found, weight[:, :224])


def test_a_version_of_null_is_gemm(tmp_path: Path) -> None:
    tensors, weight = made(16, 64, 32)
    said = configuration() | {"version": None, "bits": None}
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, said))
    np.testing.assert_array_equal(found.entries[f"{NAME}.weight"].dequantized(0, 16), weight)
