"""GPTQ checkpoints, packed here code by code from the layout's definition, and bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder
from rounded_entries import rounded

from qgraph.checkpoints import gptq
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

NAME = "model.layers.0.mlp.up_proj"


def bits_of(codes: Array, bits: int) -> Array:
    """One row of codes as int32 words: code i lies in bits i·b to (i + 1)·b − 1 of the row."""
    number = sum(int(code) << (bits * at) for at, code in enumerate(codes))
    words = -(-len(codes) * bits // 32)
    return np.frombuffer(number.to_bytes(4 * words, "little"), "<i4")


def packed(codes: Array, bits: int) -> Array:
    """Rows of codes packed along their length."""
    return np.stack([bits_of(row, bits) for row in codes])


def linear(n: int, k: int, bits: int, group: int, *, seed: int = 0, **how: Any) -> dict[str, Any]:
    """Random codes, zero points and scales; `order` shuffles the columns' groups."""
    rng = np.random.default_rng(seed)
    nb = -(-k // group)
    zeros = rng.integers(0, 1 << bits, (n, nb))
    if how.get("sym"):
        zeros[:] = 1 << (bits - 1)
    groups = np.arange(k) // group
    if how.get("order"):
        groups = rng.permutation(groups)
    return {
        "codes": rng.integers(0, 1 << bits, (n, k)),
        "zeros": zeros,
        "scales": rng.uniform(0.01, 0.1, (n, nb)).astype(np.float16),
        "groups": groups,
    }


def tensors(made: dict[str, Any], bits: int, shift: int) -> dict[str, Array]:
    stored = (made["zeros"] - shift) % (1 << bits)
    return {
        f"{NAME}.qweight": packed(made["codes"], bits).T.copy(),
        f"{NAME}.qzeros": packed(stored.T, bits),
        f"{NAME}.scales": made["scales"].T.copy(),
        f"{NAME}.g_idx": made["groups"].astype(np.int32),
    }


def configuration(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **more}


def by_formula(made: dict[str, Any]) -> Array:
    groups = made["groups"]
    steps = made["scales"].astype(np.float32)[:, groups]
    found: Array = (made["codes"] - made["zeros"][:, groups]).astype(np.float32) * steps
    return found


@pytest.mark.parametrize("bits, held", [(2, 2), (3, 4), (4, 4), (8, 8)])
@pytest.mark.parametrize("shift", [1, 0], ids=["v1", "v2"])
@pytest.mark.parametrize("order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("sym", [False, True], ids=["zero points", "symmetric"])
def test_codes_zero_points_and_values(
    tmp_path: Path, bits: int, held: int, shift: int, order: bool, sym: bool
) -> None:
    made = linear(40, 96, bits, 32, order=order, sym=sym)
    said = configuration(bits, 32, sym=sym, checkpoint_format="gptq" if shift else "gptq_v2")
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors(made, bits, shift), said))
    entry = checkpoint.entries[f"{NAME}.weight"]
    assert checkpoint.layout == ("gptq" if shift else "gptq_v2")
    assert not checkpoint.warnings and not checkpoint.floats
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))
    assert entry.format.spell() == f"{'int' if sym else 'uint'}{held}:group=32"
    assert bool(entry.notes) == (bits != held)
    rows, columns = entry.rows(0, 40), np.arange(96) if entry.order is None else entry.order
    offset = 1 << (bits - 1) if sym else 0
    np.testing.assert_array_equal(rows.codes.astype(int) + offset, made["codes"][:, columns])
    if rows.zeros is not None:
        np.testing.assert_array_equal(rows.zeros, made["zeros"])
    assert (entry.order is not None) == order
    assert (np.diff(made["groups"][columns]) >= 0).all()


@pytest.mark.parametrize(
    "group, spelled, groups",
    [(96, "row", 1), (64, "64", 2), (48, "16", 6), (16, "16", 6), (320, "row", 1)],
)
def test_groups_that_are_not_ours_are_repeated(
    tmp_path: Path, group: int, spelled: str, groups: int
) -> None:
    made = linear(8, 96, 4, group)
    said = configuration(4, -1 if group >= 96 else group)
    entry = open_checkpoint(write_folder(tmp_path / "m", tensors(made, 4, 1), said)).entries[
        f"{NAME}.weight"
    ]
    assert entry.format.spell() == f"uint4:group={spelled}"
    assert entry.rows(0, 8).scales.shape == (8, groups)
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))


def test_a_version_that_the_values_belie_is_read_as_the_values_have_it(tmp_path: Path) -> None:
    made = linear(32, 64, 4, 32, sym=True)
    said = configuration(4, 32, sym=True)
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors(made, 4, 0), said))
    assert checkpoint.layout == "gptq_v2"
    assert "read as gptq_v2" in checkpoint.warnings[0]
    entry = checkpoint.entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))


@pytest.mark.parametrize(
    "said, words",
    [
        ({"sym": True}, "says sym, and zero points differ"),
        ({"bits": 8}, "says 8 bits, and .* has 4"),
        ({"group_size": 128}, "says group_size 128, and .* has groups of 32"),
    ],
)
def test_contradictions_are_warned_of(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    made = linear(32, 128, 4, 32)
    folder = write_folder(tmp_path / "m", tensors(made, 4, 1), configuration(4, 32) | said)
    checkpoint = open_checkpoint(folder)
    (warning,) = checkpoint.warnings
    assert re.search(words, warning)
    entry = checkpoint.entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))


@pytest.mark.parametrize("size", ["128", [32], {}, -5, True, 1.5])
def test_a_group_size_that_is_none_is_warned_of(tmp_path: Path, size: Any) -> None:
    made = linear(32, 128, 4, 32)
    folder = write_folder(tmp_path / "m", tensors(made, 4, 1), configuration(4, size))
    (warning,) = open_checkpoint(folder).warnings
    assert f"says group_size {size!r}, and" in warning


def test_a_last_group_that_is_shorter_and_no_g_idx(tmp_path: Path) -> None:
    """Two groups of 224 columns are 128 and 96, not 112 each, as the configuration alone says."""
    made = linear(16, 224, 4, 128)
    stored = tensors(made, 4, 1)
    del stored[f"{NAME}.g_idx"]
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", stored, configuration(4, 128)))
    entry = checkpoint.entries[f"{NAME}.weight"]
    assert not checkpoint.warnings and entry.format.spell() == "uint4:group=128"
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))


def test_groups_that_cannot_be_and_no_g_idx(tmp_path: Path) -> None:
    stored = tensors(linear(16, 272, 4, 16), 4, 1)
    del stored[f"{NAME}.g_idx"]
    stored[f"{NAME}.qweight"] = stored[f"{NAME}.qweight"][:32]
    with pytest.raises(InputError, match=r"scales has 17 groups, which 256 inputs cannot be cut"):
        open_checkpoint(write_folder(tmp_path / "m", stored, configuration(4, 16)))


def test_a_configuration_of_its_own_file_and_no_g_idx(tmp_path: Path) -> None:
    made = linear(32, 64, 4, 32)
    stored = tensors(made, 4, 1)
    del stored[f"{NAME}.g_idx"]
    bias = {f"{NAME}.bias": np.zeros(32, np.float16)}
    folder = write_folder(tmp_path / "m", stored | bias, {})
    own = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    (folder / "quantize_config.json").write_text(json.dumps(own))
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(check_entry(entry), by_formula(made))
    assert entry.bias == f"{NAME}.bias"
    assert list(checkpoint.floats) == [f"{NAME}.bias"]


@pytest.mark.parametrize("layout", [gptq.V1, gptq.V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    "fmt", ["uint4:group=32", "int4:group=64", "int8:group=row", "uint2:group=16", "uint8:group=64"]
)
@pytest.mark.parametrize("order", [False, True], ids=["in order", "act order"])
def test_what_is_written_reads_back(
    tmp_path: Path, layout: gptq.Gptq, fmt: str, order: bool
) -> None:
    k = 192
    columns = np.random.default_rng(3).permutation(k) if order and "row" not in fmt else None
    entry = rounded(f"{NAME}.weight", 64, k, fmt, order=columns)
    assert layout.can_write(entry) is None
    folder = write_folder(tmp_path / "m", layout.write(entry), layout.config([entry], []))
    back = open_checkpoint(folder).entries[entry.name]
    np.testing.assert_array_equal(check_entry(back), entry.dequantized(0, 64))
    assert back.format.spell() == fmt
    if columns is None:
        check_writing(layout, entry, tmp_path / "n")


def test_what_the_layout_cannot_hold_is_refused() -> None:
    reasons = {
        "uint4:group=32,zero=float": "no integer codes",
        "mxfp4": "no integer codes",
    }
    for fmt, words in reasons.items():
        entry = rounded("w.weight", 64, 64, fmt, ir.DataType.FLOAT)
        assert words in str(gptq.V1.can_write(entry))
    odd = rounded("w.weight", 60, 64, "uint4:group=32")
    assert "[60, 64], wanted both sizes a multiple of 8" in str(gptq.V1.can_write(odd))
    two = [rounded("a.weight", 64, 64, fmt) for fmt in ("uint4:group=32", "uint4:group=64")]
    with pytest.raises(InputError, match="found uint4:group=32, uint4:group=64: choose one"):
        gptq.V1.config(two, [])


def test_linears_left_in_float_are_named(tmp_path: Path) -> None:
    entry = rounded("model.layers.0.mlp.up_proj.weight", 64, 64, "uint4:group=32")
    said = gptq.V1.config([entry], ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
    assert said["dynamic"] == {r"-:^model\.layers\.1\.mlp\.up_proj$": {}}


def spoiled(name: str, change: Any) -> Any:
    def spoil(stored: dict[str, Array]) -> None:
        stored[f"{NAME}.{name}"] = change(stored[f"{NAME}.{name}"])

    return spoil


def uneven(groups: Array) -> Array:
    groups = groups.copy()
    groups[0] = 1
    return groups


BAD = {
    "zero points of another shape": (
        spoiled("qzeros", lambda zeros: zeros[:, :-1]),
        rf"{NAME}\.qzeros is \[2, 3\] .* for 32 outputs and 64 inputs: no code of 2, 3, 4, 8 bits",
    ),
    "zero points of other groups": (
        spoiled("qzeros", lambda zeros: zeros[:1]),
        rf"{NAME}\.qzeros is int32 \[1, 4\], wanted int32 \[2, 4\]",
    ),
    "scales of another type": (
        spoiled("scales", lambda scales: scales.astype(np.int32)),
        rf"{NAME}\.scales is int32 \[2, 32\], wanted float16 or bfloat16 or float32 \[2, 32\]",
    ),
    "a missing tensor": (
        lambda stored: stored.pop(f"{NAME}.scales"),
        rf"{NAME} lacks {NAME}\.scales, found g_idx, qweight, qzeros",
    ),
    "missing codes": (
        lambda stored: stored.pop(f"{NAME}.qweight"),
        rf"{NAME} lacks {NAME}\.qweight, found g_idx, qzeros, scales",
    ),
    "groups of unequal length": (
        spoiled("g_idx", uneven),
        rf"{NAME}\.g_idx puts 64 columns into groups 0 to 1, not of equal length",
    ),
    "groups beyond the scales": (
        spoiled("g_idx", lambda groups: groups * 7),
        r"into groups 0 to 7, not of equal length: wanted 2 groups of 32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_tensors_are_named(tmp_path: Path, case: str) -> None:
    spoil, words = BAD[case]
    stored = tensors(linear(32, 64, 4, 32), 4, 1)
    spoil(stored)
    with pytest.raises(InputError, match=words):
        open_checkpoint(write_folder(tmp_path / "m", stored, configuration(4, 32)))


def test_scales_that_are_no_numbers_are_found_when_they_are_read(tmp_path: Path) -> None:
    stored = tensors(linear(32, 64, 4, 32), 4, 1)
    stored[f"{NAME}.scales"][1, 5] = np.nan
    folder = write_folder(tmp_path / "m", stored, configuration(4, 32))
    entry = open_checkpoint(folder).entries[f"{NAME}.weight"]
    with pytest.raises(InputError, match=rf"{NAME}\.scales holds nan at \[1, 5\], wanted finite"):
        entry.rows(0, 32)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_kernels_own_packings_are_refused(tmp_path: Path, key: str) -> None:
    said = configuration(4, 32, **{key: "marlin"})
    stored = tensors(linear(32, 64, 4, 32), 4, 1)
    with pytest.raises(InputError, match="checkpoint_format 'marlin': wanted gptq or gptq_v2"):
        open_checkpoint(write_folder(tmp_path / "m", stored, said))
