"""bitsandbytes checkpoints: what its own code saves and dequantizes, and bad files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import check_entry, check_writing, write_folder

from qgraph.checkpoints.base import Checkpoint
from qgraph.checkpoints.bitsandbytes import BITSANDBYTES
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array, parse
from qgraph.formats.bitsandbytes import scale_levels

SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def functional() -> Any:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "bitsandbytes.functional",
            reason="bitsandbytes is not installed",
            exc_type=ImportError,
        )


def by_hand(kind: str = "nf4", n: int = 24, k: int = 192, block: int = 64) -> dict[str, Array]:
    """A plain weight, without the package."""
    rng = np.random.default_rng(n + k)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    return {
        f"{NAME}.weight": rng.integers(0, 256, (n * k // 2, 1), np.uint8),
        f"{NAME}.weight.absmax": rng.uniform(0.1, 2, -(-n * k // block)).astype(np.float32),
        f"{NAME}.weight.quant_map": parse(kind).levels,
        f"{NAME}.weight.quant_state.bitsandbytes__{kind}": in_bytes(state),
    }


def doubled(n: int = 24, k: int = 192) -> dict[str, Array]:
    """Its scales quantized too."""
    rng, tensors, count = np.random.default_rng(1), by_hand("nf4", n, k), n * k // 64
    state = json.loads(tensors[f"{NAME}.weight.quant_state.bitsandbytes__nf4"].tobytes())
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.25}
    return tensors | {
        f"{NAME}.weight.absmax": rng.integers(0, 256, count, np.uint8),
        f"{NAME}.weight.nested_absmax": rng.uniform(0.1, 1, -(-count // 256)).astype(np.float32),
        f"{NAME}.weight.nested_quant_map": scale_levels(),
        f"{NAME}.weight.quant_state.bitsandbytes__nf4": in_bytes(state),
    }


def in_bytes(state: dict[str, Any]) -> Array:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def opened(folder: Path, tensors: dict[str, Array]) -> Checkpoint:
    return open_checkpoint(write_folder(folder, tensors, SAID))


def saved(functional: Any, weight: Array, **options: Any) -> tuple[dict[str, Array], Array]:
    """What bitsandbytes saves of a weight, and what it reads back."""
    import torch

    packed, state = functional.quantize_4bit(torch.from_numpy(weight), **options)
    tensors = {f"{NAME}.weight": packed.numpy()}
    for name, tensor in state.as_dict(packed=True).items():
        tensors[f"{NAME}.weight.{name}"] = tensor.numpy()
    return tensors, functional.dequantize_4bit(packed, state).numpy()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("n, k, block", [(512, 320, 64), (48, 256, 128), (64, 4096, 4096)])
def test_values_are_bitsandbytes(
    functional: Any, tmp_path: Path, kind: str, double: bool, n: int, k: int, block: int
) -> None:
    weight = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    options = {"quant_type": kind, "blocksize": block, "compress_statistics": double}
    tensors, theirs = saved(functional, weight, **options)
    entry = opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"]
    assert entry.format.spell() == (
        f"{kind}:group={min(block, 256)}" + (",double=true" if double else "")
    )
    np.testing.assert_array_equal(check_entry(entry), theirs)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_what_bitsandbytes_reads_is_what_was_written(
    functional: Any, tmp_path: Path, kind: str, double: bool
) -> None:
    import torch

    weight = np.random.default_rng(0).standard_normal((96, 320)).astype(np.float32)
    options = {"quant_type": kind, "compress_statistics": double}
    entry = opened(tmp_path / "first", saved(functional, weight, **options)[0]).entries[
        f"{NAME}.weight"
    ]
    back = check_writing(BITSANDBYTES, entry, tmp_path / "second")
    named = {name: torch.from_numpy(part.array()) for name, part in back.stored.items()}
    packed = named.pop("weight").reshape(-1, 1)
    state = functional.QuantState.from_dict(
        {name.removeprefix("weight."): value for name, value in named.items()}, "cpu"
    )
    theirs = functional.dequantize_4bit(packed, state).numpy()
    np.testing.assert_array_equal(entry.dequantized(0, 96), theirs)


def test_int8_is_bitsandbytes(functional: Any, tmp_path: Path) -> None:
    """The last bit apart, where bitsandbytes multiplies by the scale before it divides by 127."""
    import torch

    rng = np.random.default_rng(0)
    codes, scb = rng.integers(-127, 128, (48, 96), np.int8), rng.uniform(0.1, 3, 48).astype("f4")
    tensors = {f"{NAME}.weight": codes, f"{NAME}.SCB": scb}
    tensors[f"{NAME}.weight_format"] = np.zeros((), np.uint8)
    entry = opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"]
    theirs = functional.int8_vectorwise_dequant(torch.from_numpy(codes), torch.from_numpy(scb))
    np.testing.assert_allclose(check_entry(entry), theirs.numpy(), rtol=3e-7)
    np.testing.assert_array_equal(entry.rows(0, 48).codes, codes)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_first_element_lies_in_the_high_half(tmp_path: Path, kind: str) -> None:
    tensors = by_hand(kind, 2, 64)
    tensors[f"{NAME}.weight"][0] = 0x2C
    entry = opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"]
    assert entry.rows(0, 2).codes[0, :2].tolist() == [2, 12]
    scale = tensors[f"{NAME}.weight.absmax"][0]
    assert entry.dequantized(0, 1)[0, 0] == parse(kind).levels[2] * scale


@pytest.mark.parametrize("n, k, group", [(9, 96, 32), (5, 48, 16), (16, 192, 64)])
def test_blocks_that_span_rows(tmp_path: Path, n: int, k: int, group: int) -> None:
    """Groups that divide rows and blocks repeat the scales."""
    entry = opened(tmp_path / "m", by_hand("nf4", n, k)).entries[f"{NAME}.weight"]
    assert entry.format.group == group
    check_entry(entry)


def test_bytes_may_be_stored_in_another_type(tmp_path: Path) -> None:
    tensors = by_hand()
    plain = opened(tmp_path / "a", tensors).entries[f"{NAME}.weight"].dequantized(0, 24)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].view(np.uint8).reshape(-1).view("f4")
    other = opened(tmp_path / "b", tensors).entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(check_entry(other), plain)


@pytest.mark.parametrize("k, double", [(192, True), (96, True)])
def test_double_quantization_stays(tmp_path: Path, k: int, double: bool) -> None:
    entry = opened(tmp_path / "m", doubled(1024, k)).entries[f"{NAME}.weight"]
    assert entry.format.double is double  # type: ignore[attr-defined]
    check_entry(entry)


def test_scales_of_another_table_become_floats(tmp_path: Path) -> None:
    tensors = doubled()
    tensors[f"{NAME}.weight.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    entry = opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"]
    assert entry.format.spell() == "nf4:group=64"
    check_entry(entry)


def test_int8_is_written(tmp_path: Path) -> None:
    scb = np.array([1.27, 2.54, 0.5], np.float32)
    tensors = {f"{NAME}.weight": np.array([[1, -127]] * 3, np.int8), f"{NAME}.SCB": scb}
    entry = opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"]
    np.testing.assert_array_equal(entry.dequantized(0, 3)[:, 1], scb / np.float32(127) * -127)
    check_writing(BITSANDBYTES, entry, tmp_path / "second")
    said = BITSANDBYTES.config([entry], ["lm_head.weight", "model.norm.weight"])
    assert said == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_skip_modules": ["lm_head"],
    }


def test_floats_stay(tmp_path: Path) -> None:
    floats = {"lm_head.weight": np.ones((2, 4), "f2"), f"{NAME}.bias": np.ones(24, "f2")}
    found = opened(tmp_path / "m", by_hand() | floats)
    assert list(found.floats) == list(floats)
    assert found.entries[f"{NAME}.weight"].bias == f"{NAME}.bias"


STATE = f"{NAME}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    "change, message",
    [
        ({STATE: None}, r"up_proj lacks .*bitsandbytes__nf4, found"),
        ({STATE: in_bytes({"shape": [24, 192]})}, r"is no state of a weight \(KeyError"),
        ({STATE: np.frombuffer(b"{[", np.uint8)}, r"is no state of a weight"),
        (
            {STATE: in_bytes({"shape": [24, 192], "blocksize": 63})},
            r"shape \[24, 192\], blocksize 63 .*wanted sizes above 0 and blocks of 32",
        ),
        (
            {STATE: in_bytes({"shape": [1 << 40, 192], "blocksize": 64})},
            r"has 2304 bytes, and its state says \[1099511627776, 192\]",
        ),
        (
            {STATE: in_bytes({"shape": [24, 24], "blocksize": 64})},
            r"blocks of 64 across rows of 24, which no group",
        ),
        (
            {f"{NAME}.weight.absmax": np.ones(3, np.float32)},
            r"absmax is float32 \[3\], wanted float32 \[72\]",
        ),
        (
            {f"{NAME}.weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32)},
            r"quant_map has -0.866\d* as level 1, and nf4 has -0.696",
        ),
        (
            {f"{NAME}.weight.absmax": np.full(72, np.nan, np.float32)},
            r"absmax holds nan at \[0\], wanted finite",
        ),
    ],
)
def test_bad_files(tmp_path: Path, change: dict[str, Array | None], message: str) -> None:
    tensors = {name: value for name, value in {**by_hand(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "m", tensors).entries[f"{NAME}.weight"].rows(0, 24)


def test_tiled_weights_are_refused(tmp_path: Path) -> None:
    tensors = {f"{NAME}.weight": np.ones((3, 4), np.int8), f"{NAME}.SCB": np.ones(3, np.float32)}
    tensors[f"{NAME}.weight_format"] = np.array(2, np.uint8)
    with pytest.raises(InputError, match="tiled for one kind of GPU"):
        opened(tmp_path / "m", tensors)
