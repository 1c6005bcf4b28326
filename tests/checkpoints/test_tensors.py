"""Reading safetensors: against the package's own writer, and files that are damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.tensors import open_stored, read_header
from qgraph.errors import InputError

INDEX = "model.safetensors.index.json"


def with_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_that_the_package_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((6, 5)).astype(np.float32),
        "b": rng.standard_normal((3, 2, 2)).astype(np.float16),
        "c": rng.integers(-100, 100, (7,)).astype(np.int8),
        "d": np.array(3.5, np.float64),
        "e": np.zeros((0, 4), np.int32),
        "f": rng.standard_normal((6, 5)).astype(ml_dtypes.bfloat16),
    }
    save_file({name: array for name, array in arrays.items() if name != "f"}, tmp_path / "x")
    found = read_header(tmp_path / "x")
    assert set(found) == set("abcde")
    for name, tensor in found.items():
        array = tensor.array()
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
    np.testing.assert_array_equal(found["a"].rows(1, 4), arrays["a"][1:4])
    np.testing.assert_array_equal(found["a"].columns(1, 4), arrays["a"][:, 1:4])
    assert found["d"].rows(0, 1).shape == ()


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"w.scales": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HUGE = 1 << 40
BAD_HEADERS = {
    "no header": (b"", "has .* bytes and says that its header takes"),
    "no JSON": (b"{", "has a damaged header"),
    "not a table": (b"[1]", "has a header that is no table"),
    "deep JSON": (b"[" * 100_000, "has a damaged header"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, "the header describes w as"),
    "negative sizes": (tensor([-1], [0, 4]), r"the header describes w\.scales as"),
    "a bool as a size": (tensor([True], [0, 4]), r"the header describes w\.scales as"),
    "an unknown type": (tensor([1], [0, 4], "F3"), r"w\.scales has the type 'F3', known are F64"),
    "data beyond the file": (
        tensor([4], [0, 16]),
        r"w\.scales lies at bytes 0 to 16 of the data, which has 8: the file is truncated",
    ),
    "data that ends before it begins": (tensor([1], [8, 4]), r"lies at bytes 8 to 4"),
    "another size": (tensor([1], [0, 8]), r"float32 \[1\], which takes 4 bytes, and has 8"),
    "two tensors of one name": (
        b'{"w": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},'
        b' "w": {"dtype": "I8", "shape": [1], "data_offsets": [1, 2]}}',
        "has a damaged header .the key 'w' stands there twice",
    ),
    "tensors that lie on one another": (
        {
            "v": {"dtype": "I8", "shape": [5], "data_offsets": [0, 5]},
            "w": {"dtype": "I8", "shape": [4], "data_offsets": [4, 8]},
        },
        "v and w lie on one another",
    ),
    "axes that no array has": (
        {"w": {"dtype": "I8", "shape": [1] * 100, "data_offsets": [0, 1]}},
        "the header describes w as",
    ),
    "a product that overflows": (tensor([HUGE, HUGE], [0, 8]), r"which takes 4835703278458\d+ "),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, words = BAD_HEADERS[case]
    path = with_header(tmp_path / "model.safetensors", header, bytes(8) if header else b"")
    if not header:
        path.write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(InputError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_file_shorter_than_its_header_says(tmp_path: Path) -> None:
    save_file({"a": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for end in (0, 5, 40, len(data) - 1):
        (tmp_path / "model.safetensors").write_bytes(data[:end])
        with pytest.raises(InputError, match="truncated"):
            open_checkpoint(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 119), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=200)
def test_any_damage_is_an_input_error_or_none(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("m")
    save_file({"a": np.ones(4, np.float32), "b": np.ones(2, np.int8)}, folder / "x.safetensors")
    data = bytearray((folder / "x.safetensors").read_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    (folder / "x.safetensors").write_bytes(data)
    try:
        found = open_checkpoint(folder / "x.safetensors")
    except InputError:
        return
    for tensor in found.floats.values():
        assert tensor.array().nbytes <= 18


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    save_file({"a": np.ones((100, 4), np.float32)}, tmp_path / "model.safetensors")
    (found,) = open_checkpoint(tmp_path).floats.values()
    os.truncate(tmp_path / "model.safetensors", 200)
    for read in (lambda: found.rows(90, 100), lambda: found.columns(0, 2)):
        with pytest.raises(InputError, match="became shorter: 200 bytes, and a ends at"):
            read()


def sharded(folder: Path, places: dict[str, str]) -> None:
    """Two shards, and an index that says what `places` says."""
    folder.mkdir()
    save_file({"a": np.ones(3, np.float32)}, folder / "one.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, folder / "two.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def test_shards(tmp_path: Path) -> None:
    sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"})
    floats = open_checkpoint(tmp_path / "m").floats
    assert {name: tensor.rows(0, 1).tolist() for name, tensor in floats.items()} == {
        "a": [1.0],
        "b": [0.0],
    }


BAD_INDICES: dict[str, tuple[dict[str, str], Callable[[Path], object], str]] = {
    "a way out": (
        {"a": "../one.safetensors"},
        lambda f: (f / "one.safetensors").rename(f.parent / "one.safetensors"),
        r"its '\.\./one.safetensors' is /.*, outside the folder",
    ),
    "a missing shard": (
        {"a": "one.safetensors", "b": "two.safetensors"},
        lambda f: (f / "two.safetensors").unlink(),
        r"lacks 'two.safetensors'",
    ),
    "a missing tensor": (
        {"a": "one.safetensors", "b": "one.safetensors"},
        lambda f: None,
        "one.safetensors lacks b, which the index says it has",
    ),
    "neither of two shards": (
        {"c": "one.safetensors", "d": "two.safetensors"},
        lambda f: [
            save_file({"a": np.ones(1, np.int8), own: np.ones(1, np.int8)}, f / name)
            for own, name in (("c", "one.safetensors"), ("d", "two.safetensors"))
        ],
        r"one.safetensors and two.safetensors both hold a, and the index names neither",
    ),
    "a link that leads out": (
        {"a": "one.safetensors"},
        lambda f: (
            (f / "one.safetensors").rename(f.parent / "x.safetensors"),
            (f / "one.safetensors").symlink_to(f.parent / "x.safetensors"),
        ),
        "outside the folder",
    ),
}


@pytest.mark.parametrize("case", BAD_INDICES)
def test_bad_indices_are_refused(tmp_path: Path, case: str) -> None:
    places, spoil, words = BAD_INDICES[case]
    sharded(tmp_path / "m", places)
    spoil(tmp_path / "m")
    with pytest.raises(InputError, match=words):
        open_checkpoint(tmp_path / "m")


def test_an_index_that_names_a_tensor_twice(tmp_path: Path) -> None:
    sharded(tmp_path / "m", {})
    twice = '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'
    (tmp_path / "m" / INDEX).write_text(twice)
    with pytest.raises(InputError, match=r"index.json is no JSON \(the key 'a' stands there twice"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("name, value", [("one", 1.0), ("two", 2.0)])
def test_of_two_shards_that_hold_a_tensor_the_index_s_counts(
    tmp_path: Path, name: str, value: float
) -> None:
    sharded(tmp_path / "m", {"a": f"{name}.safetensors", "b": "two.safetensors"})
    both = {"a": np.full(3, 2, np.float32), "b": np.zeros(3, np.float32)}
    save_file(both, tmp_path / "m" / "two.safetensors")
    if name == "two":  # else the shard is not the model's
        places = {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
        (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": places}))
        save_file({"a": np.ones(3, np.float32), "c": both["b"]}, tmp_path / "m" / "one.safetensors")
    assert open_checkpoint(tmp_path / "m").floats["a"].rows(0, 1).tolist() == [value]


@pytest.mark.parametrize("said", [3, "gptq", [1]])
def test_a_quantization_that_is_no_table_is_refused(tmp_path: Path, said: Any) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(InputError, match=r"config.json has the quantization_config .*wanted a tab"):
        open_checkpoint(tmp_path)


def test_modules_are_told_apart_by_the_longest_suffix(tmp_path: Path) -> None:
    names = ("a.weight", "a.weight.absmax", "b.weight", "weight", "c.other")
    save_file({name: np.ones(1, np.float32) for name in names}, tmp_path / "model.safetensors")
    found = open_stored(tmp_path).modules(("weight", "weight.absmax"))
    assert {module: set(parts) for module, parts in found.items()} == {
        "a": {"weight", "weight.absmax"},
        "b": {"weight"},
        "": {"weight"},
    }


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(InputError, match="is no checkpoint: wanted a folder with safetensors"):
        open_checkpoint(tmp_path / "x.txt")
    with pytest.raises(InputError, match="is no file and no folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(InputError, match="is no file and no folder"):
        open_checkpoint(tmp_path / ("n" * 300))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"no model.safetensors, but x\.gguf: name that file"):
        open_checkpoint(tmp_path)


def test_an_unknown_method_is_refused_with_what_is_known(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    said = {"quantization_config": {"quant_method": "gptk"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"method 'gptk'; did you mean .*'gptq'.*known: gptq, "):
        open_checkpoint(tmp_path)
