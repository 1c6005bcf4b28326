"""GGUF files: every type read exactly, names and rows of transformers, damaged numbers refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import check_entry
from gguf_files import TYPES, rows, write_gguf

from qgraph.checkpoints.base import Checkpoint
from qgraph.checkpoints.gguf_names import Names, halves_of_pairs
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError

gguf = pytest.importorskip("gguf")
HEADS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
HEADS_OF_K = "llama.attention.head_count_kv"
UP, UP_HERE = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"


def opened(path: Path, tensors: dict[str, Any], fields: Any = HEADS, **more: Any) -> Checkpoint:
    return open_checkpoint(write_gguf(path / "m.gguf", tensors, fields, **more))


@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    kind = TYPES[name]
    data = rows(kind, 24, 512, spread=5)
    found = opened(tmp_path, {UP: (name, data)})
    assert (found.layout, list(found.entries)) == ("gguf", [UP_HERE])
    entry = found.entries[UP_HERE]
    assert entry.shape == (24, 512)
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(check_entry(entry), theirs)


@pytest.mark.parametrize(
    "name, spelled",
    [
        ("Q4_0", "int4:group=32"),
        ("Q8_0", "int8:group=32"),
        ("Q5_0", "int8:group=32"),
        ("IQ4_NL", "int8:group=32"),
        ("Q6_K", "int8:group=16"),
        ("Q3_K", "int4:group=16"),
        ("Q4_1", "uint4:group=32,zero=float"),
        ("Q4_K", "uint4:group=32,zero=float"),
        ("Q2_K", "uint4:group=16,zero=float"),
        ("Q5_1", "uint8:group=32,zero=float"),
        ("Q5_K", "uint8:group=32,zero=float"),
        ("MXFP4", "mxfp4:order=halves"),
    ],
)
def test_formats(tmp_path: Path, name: str, spelled: str) -> None:
    entry = opened(tmp_path, {UP: (name, rows(TYPES[name], 8, 256))}).entries[UP_HERE]
    assert entry.format.spell() == spelled
    narrower = name in ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL")
    assert bool(entry.notes) == narrower


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_keep_their_type(tmp_path: Path, dtype: Any) -> None:
    values = np.random.default_rng(0).standard_normal((8, 32)).astype(dtype)
    tensor: Any = values if dtype != ml_dtypes.bfloat16 else ("BF16", values.view(np.uint8))
    found = opened(tmp_path, {"token_embd.weight": tensor})
    stored = found.floats["model.embed_tokens.weight"]
    assert (stored.shape, stored.dtype) == ((8, 32), np.dtype(dtype))
    np.testing.assert_array_equal(stored.rows(2, 5), values[2:5])


def test_rows_of_q_and_k_lie_as_transformers_has_them(tmp_path: Path) -> None:
    """llama.cpp's conversion, told in numpy: rows i and i + half of a head become neighbours."""
    data = {"q": rows(TYPES["Q4_0"], 32, 64), "k": rows(TYPES["Q8_0"], 16, 64)}
    tensors: dict[str, Any] = {}
    for which, kind, heads in (("q", "Q4_0", 4), ("k", "Q8_0", 2)):
        n = len(data[which])
        halves = data[which].reshape(heads, 2, n // heads // 2, -1).swapaxes(1, 2)
        tensors[f"blk.0.attn_{which}.weight"] = kind, halves.reshape(n, -1)
    bias = np.arange(32, dtype=np.float32)
    tensors["blk.0.attn_q.bias"] = bias.reshape(4, 2, 4).swapaxes(1, 2).reshape(-1)
    found = opened(tmp_path, tensors)
    for which, kind in (("q", "Q4_0"), ("k", "Q8_0")):
        entry = found.entries[f"model.layers.0.self_attn.{which}_proj.weight"]
        plain = gguf.dequantize(data[which], gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(check_entry(entry), plain)
    assert found.entries["model.layers.0.self_attn.q_proj.weight"].bias is not None
    np.testing.assert_array_equal(
        found.floats["model.layers.0.self_attn.q_proj.bias"].rows(3, 20), bias[3:20]
    )


def test_other_architectures_keep_the_order(tmp_path: Path) -> None:
    data = rows(TYPES["Q4_0"], 32, 64)
    found = opened(tmp_path, {"blk.0.attn_q.weight": ("Q4_0", data)}, architecture="qwen2")
    plain = gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_0)
    entry = found.entries["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(check_entry(entry), plain)


def test_experts(tmp_path: Path) -> None:
    data = rows(TYPES["MXFP4"], 24, 64)
    tensors = {"blk.0.ffn_down_exps.weight": ("MXFP4", data.reshape(3, 8, -1))}
    entry = opened(tmp_path, tensors, architecture="qwen3moe").entries[
        "model.layers.0.mlp.experts.down_proj"
    ]
    assert entry.shape == (3, 8, 64)
    plain = gguf.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(check_entry(entry), plain)


def test_norms_of_gemma_lie_one_higher(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_norm.weight": np.array([1.0, 1.5], np.float32)}
    found = opened(tmp_path, tensors, architecture="gemma3")
    norm = found.floats["model.layers.0.input_layernorm.weight"]
    assert norm.rows(0, 2).tolist() == [0.0, 0.5]


def test_an_unknown_architecture_keeps_its_names(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": ("Q4_0", rows(TYPES["Q4_0"], 8, 64))}
    found = opened(tmp_path, tensors, architecture="falcon")
    assert list(found.entries) == ["blk.0.attn_q.weight"]
    assert "the architecture 'falcon' is not known" in found.warnings[0]


ARCHITECTURES = "llama qwen2 qwen3 gemma gemma2 gemma3 phi3 qwen2moe qwen3moe granite smollm3"


@pytest.mark.parametrize("architecture", ARCHITECTURES.split())
def test_names_are_the_packages(architecture: str) -> None:
    """Every name that the package has for a model of this kind is ours for the same tensor."""
    names = Names(architecture)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, 4)
    known = {gguf.TENSOR_NAMES[kind].format(bid=3) for kind in gguf.MODEL_TENSORS[number]}
    checked = 0
    for own in known - {"output", "rope_freqs", "blk.3.attn_rot_embd"}:
        ours = names.transformers(f"{own}.weight")
        if ours != f"{own}.weight" and ".experts." not in ours:
            assert names.gguf(ours) == f"{own}.weight"
            assert table.get_name(ours, (".weight",)) == f"{own}.weight", ours
            checked += 1
    assert checked >= 9


def test_rotary_pairs_are_halves_again() -> None:
    # One head of size 6: the file holds rows 0 3 | 1 4 | 2 5; a second head follows it.
    file_order = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert file_order[halves_of_pairs(12, 2)].tolist() == list(range(12))


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": ("Q4_0", rows(TYPES["Q4_0"], 12, 64))}
    with pytest.raises(InputError, match=r"attn_q.weight' is \[12, 64\], wanted .* 2 · 4 heads"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "attn_q", "blk.0.attn_k"])
@pytest.mark.parametrize("shape", [(2, 8, 64), (12, 64), (12,)])
def test_rows_that_cannot_be_put_in_order(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match="wanted a matrix or vector, its rows a multiple of 2 · "):
        opened(tmp_path, {name: np.zeros(shape, np.float32)}, HEADS | {HEADS_OF_K: 4})


def test_a_tensor_under_both_names(tmp_path: Path) -> None:
    data = rows(TYPES["Q4_0"], 8, 64)
    for other in (("Q4_0", data), np.ones((8, 64), np.float32)):
        with pytest.raises(InputError, match=rf"'{UP_HERE}' and another tensor are both"):
            opened(tmp_path, {UP: ("Q4_0", data), UP_HERE: other})


def test_a_quantized_vector(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a vector of Q8_0, wanted one of floats"):
        opened(tmp_path, {"output_norm.weight": ("Q8_0", rows(TYPES["Q8_0"], 1, 64)[0])})


def test_a_number_of_heads_is_needed(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": ("Q4_0", rows(TYPES["Q4_0"], 8, 64))}
    with pytest.raises(InputError, match=r"no field llama\.attention\.head_count"):
        opened(tmp_path, tensors, {})


@pytest.mark.parametrize("name, at", [("Q4_0", 0), ("Q4_K", 2), ("Q6_K", 208)])
def test_scales_that_are_no_numbers(tmp_path: Path, name: str, at: int) -> None:
    kind = TYPES[name]
    data = rows(kind, 8, 512)
    where = 3, 512 // kind.size // 2 * kind.nbytes + at
    data[where[0], where[1] : where[1] + 2] = np.array([np.inf], np.float16).view(np.uint8)
    if name == "Q4_K":
        data[3, where[1] + 2 : where[1] + 14] = 255
    entry = opened(tmp_path, {UP: (name, data)}).entries[UP_HERE]
    with pytest.raises(
        InputError, match=r"ffn_up.weight holds the scale -?inf in group \d+ of row 3"
    ):
        entry.rows(0, 8)


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {UP: ("Q4_0", rows(TYPES["Q4_0"], 8, 64))}, HEADS)
    entry = open_checkpoint(path).entries[UP_HERE]
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(InputError, match="became shorter"):
        entry.rows(0, 8)


def test_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"something else, long enough")
    with pytest.raises(InputError, match="is no checkpoint"):
        open_checkpoint(tmp_path / "m.gguf")
