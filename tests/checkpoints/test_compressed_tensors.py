"""compressed-tensors: read what its own compressors write, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder
from rounded_entries import rounded

from qgraph.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

NAME = "model.layers.0.mlp.up_proj"


def arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


def configuration(name: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": name}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }


def compressor(name: str, weights: dict[str, Any]) -> tuple[Any, Any]:
    """The package's own compressor and the scheme that it takes."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    own = BaseCompressor.get_value_from_registry(name)
    return own, QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def grid(n: int, k: int, weights: dict[str, Any]) -> dict[str, Any]:
    """A random weight with scales (and zero points) of the strategy, as torch tensors."""
    import torch

    torch.manual_seed(n + k)
    size = weights.get("group_size") or k
    shape = {"tensor": (1,), "channel": (n, 1)}.get(weights["strategy"], (n, k // size))
    found = {"weight": torch.randn(n, k), "weight_scale": torch.rand(shape) * 0.2 + 0.05}
    if not weights["symmetric"]:
        half = 1 << (weights["num_bits"] - 1)
        found["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    return found


def as_numpy(tensors: dict[str, Any]) -> dict[str, Array]:
    """Torch tensors as numpy arrays, 8-bit floats too."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous()
        if data.dtype == torch.float8_e4m3fn:
            found[name] = data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        else:
            found[name] = data.numpy()
    return found


INTEGERS = {
    f"{bits} bits, {strategy}{'' if symmetric else ', zero points'}": (
        "pack-quantized",
        arguments(
            bits,
            "int",
            strategy,
            symmetric=symmetric,
            group_size=32 if strategy == "group" else None,
        ),
    )
    for bits in (2, 3, 4, 5, 8)
    for strategy in ("group", "channel")
    for symmetric in (True, False)
}
BYTES = {
    "int8, channel": ("int-quantized", arguments(8, "int", "channel")),
    "int8, tensor": ("int-quantized", arguments(8, "int", "tensor")),
    "int8, zero points": ("int-quantized", arguments(8, "int", "channel", symmetric=False)),
    "int8, groups": ("int-quantized", arguments(8, "int", "group", group_size=64)),
    "fp8, channel": ("float-quantized", arguments(8, "float", "channel")),
    "fp8, tensor": ("float-quantized", arguments(8, "float", "tensor")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*INTEGERS, *BYTES])
def test_weights_of_its_own_compressors(tmp_path: Path, case: str) -> None:
    name, weights = (INTEGERS | BYTES)[case]
    own, scheme = compressor(name, weights)
    packed = own.compress(grid(72, 192, weights), scheme)
    wanted = own.decompress(packed, scheme)["weight"].numpy()
    tensors = {f"{NAME}.{key}": value for key, value in as_numpy(packed).items()}
    folder = write_folder(tmp_path / "m", tensors, configuration(name, weights))
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries[f"{NAME}.weight"]
    assert not checkpoint.floats and not checkpoint.warnings
    np.testing.assert_array_equal(check_entry(entry), wanted)
    assert entry.format.symmetric == weights["symmetric"]
    held = {3: 4, 5: 8}.get(weights["num_bits"], weights["num_bits"])
    assert entry.format.bits == held
    assert bool(entry.notes) == (held != weights["num_bits"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n, k", [(8, 64), (40, 160)])
def test_nvfp4(tmp_path: Path, n: int, k: int) -> None:
    import torch

    weights = arguments(4, "float", "tensor_group", group_size=16, scale_dtype=None)
    own, scheme = compressor("nvfp4-pack-quantized", weights)
    torch.manual_seed(n)
    weight = torch.randn(n, k)
    whole = 448 * 6 / weight.abs().max().reshape(1)
    scale = (weight.abs().reshape(n, -1, 16).amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
    packed = own.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}, scheme
    )
    tensors = {f"{NAME}.{key}": value for key, value in as_numpy(packed).items()}
    folder = write_folder(tmp_path / "m", tensors, configuration("nvfp4-pack-quantized", weights))
    entry = open_checkpoint(folder).entries[f"{NAME}.weight"]
    found = check_entry(entry)
    # The package computes its bfloat16 codes times a float32 scale, divided by the global one.
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    codes = unpack_fp4_from_uint8(packed["weight_packed"], n, k, torch.float32)
    steps = (packed["weight_scale"].float() / whole).repeat_interleave(16, 1)
    np.testing.assert_allclose(found, (codes * steps).numpy(), rtol=2.5e-7, atol=0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    signed = np.concatenate([levels, -levels])[entry.rows(0, n).codes]
    np.testing.assert_array_equal(signed, codes.numpy())
    assert "reciprocal" in entry.notes[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, bits", [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)])
def test_mx(tmp_path: Path, name: str, bits: int) -> None:
    import torch

    weights = arguments(bits, "float", "group", group_size=32)
    own, scheme = compressor(name, weights | {"scale_dtype": torch.uint8})
    torch.manual_seed(bits)
    weight = torch.randn(24, 128)
    scale = 2.0 ** torch.floor(torch.log2(weight.abs().reshape(24, -1, 32).amax(-1)) - bits)
    packed = own.compress({"weight": weight, "weight_scale": scale}, scheme)
    wanted = own.decompress(packed, scheme)["weight"].float().numpy()
    tensors = {f"{NAME}.{key}": value for key, value in as_numpy(packed).items()}
    folder = write_folder(tmp_path / "m", tensors, configuration(name, weights))
    entry = open_checkpoint(folder).entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(check_entry(entry), wanted)
    assert entry.format.name == f"mxfp{bits}"


WRITTEN = {
    "int4:group=32": "pack-quantized",
    "uint4:group=64": "pack-quantized",
    "int8:group=row": "pack-quantized",
    "uint8:group=32": "pack-quantized",
    "int2:group=16": "pack-quantized",
    "int8-row": "int-quantized",
    "fp8-e4m3:scale=row": "float-quantized",
    "fp8-e4m3:scale=tensor": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}


@pytest.mark.parametrize("fmt", WRITTEN)
def test_what_is_written_reads_back(tmp_path: Path, fmt: str) -> None:
    entry = rounded(f"{NAME}.weight", 72, 192, fmt, ir.DataType.FLOAT)
    back = check_writing(COMPRESSED_TENSORS, entry, tmp_path / "m")
    np.testing.assert_array_equal(check_entry(back), entry.dequantized(0, 72))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fmt", WRITTEN)
def test_its_own_compressors_read_what_is_written(fmt: str) -> None:
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    entry = rounded(f"{NAME}.weight", 72, 192, fmt, ir.DataType.FLOAT)
    said = QuantizationConfig.model_validate(COMPRESSED_TENSORS.config([entry], []))
    (scheme,) = said.config_groups.values()
    assert scheme.format == said.format == WRITTEN[fmt]
    tensors = {}
    for name, array in COMPRESSED_TENSORS.write(entry).items():
        small = array.dtype == ml_dtypes.float8_e4m3fn
        data = torch.from_numpy(array.view(np.uint8) if small else array)
        tensors[name.removeprefix(f"{NAME}.")] = data.view(torch.float8_e4m3fn) if small else data
    own = BaseCompressor.get_value_from_registry(scheme.format)
    found = own.decompress(tensors, scheme)["weight"].float().numpy()
    np.testing.assert_array_equal(found, entry.dequantized(0, 72))


def test_nvfp4_keeps_codes_and_scales(tmp_path: Path) -> None:
    entry = rounded(f"{NAME}.weight", 40, 64, "nvfp4", ir.DataType.FLOAT)
    specs = COMPRESSED_TENSORS.specs(entry)
    written = COMPRESSED_TENSORS.write(entry)
    assert {n: (a.dtype, a.shape) for n, a in written.items()} == {
        n: (s.dtype, s.shape) for n, s in specs.items()
    }
    folder = write_folder(tmp_path / "m", written, COMPRESSED_TENSORS.config([entry], []))
    back = open_checkpoint(folder).entries[entry.name]
    own, theirs = entry.rows(0, 40), back.rows(0, 40)
    np.testing.assert_array_equal(own.codes, theirs.codes)
    np.testing.assert_array_equal(own.more["codes"], theirs.more["codes"])
    np.testing.assert_allclose(own.more["tensor"], theirs.more["tensor"], rtol=1.2e-7)
    zeros = rounded("w.weight", 8, 32, "nvfp4", ir.DataType.FLOAT)
    zeros.source.weight[:] = 0
    assert COMPRESSED_TENSORS.write(zeros)["w.weight_global_scale"] == 1


def test_several_formats_become_groups_of_names() -> None:
    entries = [
        rounded("a.q_proj.weight", 64, 64, "int4:group=32"),
        rounded("a.k_proj.weight", 64, 64, "fp8-e4m3", ir.DataType.FLOAT),
    ]
    said = COMPRESSED_TENSORS.config(entries, ["a.norm.weight", "lm_head.weight"])
    assert said["format"] == "mixed-precision"
    assert said["ignore"] == ["lm_head"]
    groups = said["config_groups"].values()
    assert [group["targets"] for group in groups] == [["a.q_proj"], ["a.k_proj"]]
    assert [group["format"] for group in groups] == ["pack-quantized", "float-quantized"]
    assert [bool(group["input_activations"]) for group in groups] == [False, True]


@pytest.mark.parametrize(
    "fmt, k, words",
    [
        ("nf4", 64, "no integer codes"),
        ("int4:group=64", 96, "groups of 64 do not divide K = 96"),
        ("mxfp8:element=e5m2", 64, "it is mxfp8:element=e5m2, wanted mxfp8"),
        ("nvfp4", 24, "its rows are 24 long, wanted a multiple of 16"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(fmt: str, k: int, words: str) -> None:
    entry = rounded("w.weight", 64, k, fmt, ir.DataType.FLOAT)
    assert words in str(COMPRESSED_TENSORS.can_write(entry))


def test_act_order_of_earlier_versions(tmp_path: Path) -> None:
    entry = rounded(f"{NAME}.weight", 72, 192, "uint4:group=32", ir.DataType.FLOAT)
    tensors = COMPRESSED_TENSORS.write(entry)
    groups = np.random.default_rng(0).permutation(np.arange(192) // 32)
    tensors[f"{NAME}.weight_g_idx"] = groups.astype(np.int32)
    said = COMPRESSED_TENSORS.config([entry], [])
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, said)).entries[entry.name]
    assert found.order is not None
    rows = entry.rows(0, 72)
    assert rows.zeros is not None
    wanted = (rows.codes.astype(np.float32) - rows.zeros[:, groups]) * rows.scales[:, groups]
    np.testing.assert_array_equal(check_entry(found), wanted)


def test_activations_are_mentioned_and_their_scales_taken_along(tmp_path: Path) -> None:
    entry = rounded(f"{NAME}.weight", 72, 192, "int8-row", ir.DataType.FLOAT)
    tensors = COMPRESSED_TENSORS.write(entry) | {f"{NAME}.input_scale": np.ones(1, np.float32)}
    tensors["model.layers.0.self_attn.input_scale"] = np.ones(1, np.float32)
    said = COMPRESSED_TENSORS.config([entry], [])
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors, said))
    assert "activations are to be quantized too" in checkpoint.warnings[0]
    assert list(checkpoint.floats) == ["model.layers.0.self_attn.input_scale"]


@pytest.mark.parametrize("name", ["marlin-24", "sparse-24-bitmask"])
def test_sparse_weights_are_refused(tmp_path: Path, name: str) -> None:
    said = configuration(name, arguments(4, "int", "channel"))
    with pytest.raises(InputError, match=f"compressed as '{name}', which cannot be read"):
        open_checkpoint(write_folder(tmp_path / "m", {"a": np.zeros(1, np.int8)}, said))


def spoiled(**changes: Any) -> dict[str, Array]:
    """The tensors of a linear, some of them replaced, or left out where None."""
    entry = rounded(f"{NAME}.weight", 72, 192, "uint4:group=32", ir.DataType.FLOAT)
    tensors = COMPRESSED_TENSORS.write(entry)
    for name, change in changes.items():
        whole = f"{NAME}.{name}"
        tensors[whole] = change(tensors[whole])
    return {name: array for name, array in tensors.items() if array is not None}


BAD = {
    "zero points of another shape": (
        {"weight_zero_point": lambda zeros: zeros[:-1]},
        r"weight_zero_point is int32 \[8, 6\], wanted int32 \[9, 6\]",
    ),
    "another width": (
        {"weight_packed": lambda packed: packed[:, :7]},
        r"weight_packed is \[72, 7\], and .*weight_shape says \[72, 192\]: no code of 1 to 8 bits",
    ),
    "no codes": ({"weight_packed": lambda _: None}, r"lacks .*weight_packed, found weight_scale"),
    "no scales": ({"weight_scale": lambda _: None}, r"lacks .*weight_scale, found weight_packed"),
    "no shape": ({"weight_shape": lambda _: None}, r"lacks .*weight_shape, found weight_packed"),
    "scales of other rows": (
        {"weight_scale": lambda scale: scale[1:]},
        r"weight_scale is float32 \[71, 6\], wanted .* \[72, 6\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_tensors_are_named(tmp_path: Path, case: str) -> None:
    changes, words = BAD[case]
    said = configuration("pack-quantized", arguments(4, "int", "group", group_size=32))
    with pytest.raises(InputError, match=words):
        open_checkpoint(write_folder(tmp_path / "m", spoiled(**changes), said))


@pytest.mark.parametrize("said", ["x", [1], 3, True, None])
def test_arguments_that_are_no_table_say_nothing(tmp_path: Path, said: Any) -> None:
    folder = write_folder(tmp_path / "m", spoiled(), configuration("pack-quantized", said))
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.warnings
    check_entry(checkpoint.entries[f"{NAME}.weight"])


@pytest.mark.parametrize(
    "said, words",
    [
        ({"num_bits": "4"}, "says '4' bits, and .* has 4"),
        ({"num_bits": 8}, "says 8 bits, and .* has 4"),
        ({"group_size": "32"}, "says group_size '32', and .* has groups of 32"),
        ({"group_size": 64}, "says group_size 64, and .* has groups of 32"),
    ],
)
def test_contradictions_are_warned_of(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    weights = arguments(4, "int", "group", group_size=32) | said
    folder = write_folder(tmp_path / "m", spoiled(), configuration("pack-quantized", weights))
    (warning,) = open_checkpoint(folder).warnings
    assert re.search(words, warning)


@pytest.mark.parametrize("block", [[0, 0], ["a", "b"], [64, 64], [-1, -1], "x"])
def test_blocks_that_have_no_format_are_refused(tmp_path: Path, block: Any) -> None:
    tensors = {
        f"{NAME}.weight": np.ones((128, 128), ml_dtypes.float8_e4m3fn),
        f"{NAME}.weight_scale": np.ones((2, 2), np.float32),
    }
    said = configuration("float-quantized", arguments(8, "float", "block", block_structure=block))
    with pytest.raises(InputError, match=r"weight_block_size is .*, wanted two multiples of 128"):
        open_checkpoint(write_folder(tmp_path / "m", tensors, said))


def test_rows_of_int8_are_the_format_of_rows(tmp_path: Path) -> None:
    entry = rounded(f"{NAME}.weight", 72, 192, "int8-row", ir.DataType.FLOAT)
    back = check_writing(COMPRESSED_TENSORS, entry, tmp_path / "m")
    assert back.format.spell() == "int8-row"
    check_writing(COMPRESSED_TENSORS, back, tmp_path / "again")


@pytest.mark.parametrize(
    "place, refused",
    [("input", True), ("k_cache", True), ("weight_input", False), ("weight_output", False)],
)
def test_rotations_of_activations_are_refused(tmp_path: Path, place: str, refused: bool) -> None:
    said = configuration("pack-quantized", arguments(4, "int", "group", group_size=32))
    apply = [{"targets": ["Linear"], "location": place}]
    groups = {"u": {"type": "hadamard", "apply": apply}}
    folder = write_folder(
        tmp_path / "m", spoiled(), said | {"transform_config": {"config_groups": groups}}
    )
    if not refused:
        assert open_checkpoint(folder).entries
        return
    with pytest.raises(InputError, match=f"transform_config with 'hadamard' at '{place}'"):
        open_checkpoint(folder)


def test_rows_that_no_block_fills(tmp_path: Path) -> None:
    entry = rounded(f"{NAME}.weight", 8, 80, "mxfp8", ir.DataType.FLOAT)
    codes = entry.format.pack(entry.rows(0, 8), entry.format.default_layout)
    tensors = {
        f"{NAME}.weight": codes["codes"].reshape(8, -1)[:, :80].view(ml_dtypes.float8_e4m3fn),
        f"{NAME}.weight_scale": codes["scales"],
    }
    said = configuration("mxfp8-quantized", arguments(8, "float", "group", group_size=32))
    found = open_checkpoint(write_folder(tmp_path / "m", tensors, said))
    wanted = entry.dequantized(0, 8)
    np.testing.assert_array_equal(check_entry(found.entries[f"{NAME}.weight"]), wanted)
    tensors = {
        f"{NAME}.weight_packed": np.zeros((8, 40), np.uint8),
        f"{NAME}.weight_scale": np.zeros((8, 2), np.uint8),
    }
    tensors |= {
        "b.weight_packed": np.zeros((8, 65), np.uint8),
        "b.weight_scale": np.zeros((8, 8), ml_dtypes.float8_e4m3fn),
        "b.weight_global_scale": np.ones(1, np.float32),
    }
    said = configuration("mxfp4-pack-quantized", arguments(4, "float", "group", group_size=32))
    with pytest.raises(InputError, match=r"uint8 \[8, 40\], wanted .* a multiple of 32"):
        open_checkpoint(write_folder(tmp_path / "n", tensors, said))
    alone = {name: array for name, array in tensors.items() if name.startswith("b.")}
    with pytest.raises(InputError, match=r"uint8 \[8, 65\], wanted .* a multiple of 16"):
        open_checkpoint(write_folder(tmp_path / "o", alone, said))


def test_weights_that_are_not_compressed_yet_are_told(tmp_path: Path) -> None:
    tensors = {
        f"{NAME}.weight": np.ones((8, 32), np.float16),
        f"{NAME}.weight_scale": np.ones((8, 1), np.float16),
    }
    said = configuration("dense", arguments(8, "int", "channel"))
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors, said))
    assert not checkpoint.entries
    assert "1 weight has scales and lies in float, such as" in checkpoint.warnings[0]
