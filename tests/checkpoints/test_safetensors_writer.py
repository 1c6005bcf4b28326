"""Writing folders: the package's own reader sees the same, and nothing is left half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rounded_entries import rounded
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qgraph.checkpoints import gptq, safetensors_writer
from qgraph.checkpoints.base import Outgoing
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError


def source(folder: Path) -> Path:
    """A float checkpoint with files beside it."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {
        "a.norm.weight": rng.standard_normal(9).astype(np.float16),
        "a.scalar": np.array(2.5, np.float32),
        "a.table": rng.standard_normal((50, 40)).astype(np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "merges.txt", "config.json", "quantize_config.json"):
        (folder / name).write_text("{}")
    (folder / ".hidden").write_text("x")
    (folder / "pytorch_model.bin").write_text("x")
    (folder / "sub").mkdir()
    return folder


def outgoing(folder: Path) -> Outgoing:
    floats = list(open_checkpoint(folder).floats.values())
    entry = rounded("a.up_proj.weight", 64, 96, "uint4:group=32")
    return Outgoing([entry], floats, {"model_type": "llama"}, folder)


def test_one_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = outgoing(source(tmp_path / "in"))
    files = gptq.V1.save(tmp_path / "out", out, lambda done, total: seen.append((done, total)))
    assert [path.name for path in files] == [
        "config.json", "model.safetensors", "merges.txt", "tokenizer.json",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in files}
    found = load_file(tmp_path / "out" / "model.safetensors")
    for tensor in out.floats:
        np.testing.assert_array_equal(found.pop(tensor.name), tensor.array())
    for name, array in gptq.V1.write(out.entries[0]).items():
        np.testing.assert_array_equal(found.pop(name), array)
    assert not found
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert seen[-1][0] == seen[-1][1] > 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_every_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    gptq.V1.save(tmp_path / "out", outgoing(source(tmp_path / "in")))
    for tensor in open_checkpoint(tmp_path / "out").floats.values():
        assert tensor.offset % tensor.dtype.itemsize == 0


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 6000)
    out = outgoing(source(tmp_path / "in"))
    files = gptq.V1.save(tmp_path / "out", out)
    shards = [path for path in files if path.suffix == ".safetensors"]
    assert [path.name for path in shards] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored: dict[str, str] = {}
    for path in shards:
        with safe_open(path, framework="numpy") as file:
            stored |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == stored
    sizes = sum(array.nbytes for path in shards for array in load_file(path).values())
    assert index["metadata"]["total_size"] == sizes
    back = open_checkpoint(tmp_path / "out").entries["a.up_proj.weight"]
    np.testing.assert_array_equal(back.dequantized(0, 64), out.entries[0].dequantized(0, 64))


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    out = outgoing(source(tmp_path / "in"))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out exists: choose another folder"):
        gptq.V1.save(tmp_path / "out", out)


def test_a_weight_that_fails_leaves_nothing(tmp_path: Path) -> None:
    out = outgoing(source(tmp_path / "in"))
    out.entries[0].source.weight[3, 4] = np.nan
    with pytest.raises(InputError, match="NON_FINITE_WEIGHT: nan at row 3, column 4"):
        gptq.V1.save(tmp_path / "out", out)
    assert os.listdir(tmp_path) == ["in"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    out = outgoing(source(tmp_path / "in"))
    (tmp_path / ".out.12345.tmp").mkdir()
    (tmp_path / ".out.12345.tmp" / "x").write_text("x")
    (tmp_path / ".other.1.tmp").mkdir()
    gptq.V1.save(tmp_path / "out", out)
    assert sorted(os.listdir(tmp_path)) == [".other.1.tmp", "in", "out"]


def test_a_link_beside_the_model_that_leads_out_is_refused(tmp_path: Path) -> None:
    out = outgoing(source(tmp_path / "in"))
    (tmp_path / "secret").write_text("x")
    (tmp_path / "in" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"'notes.txt' is /.*secret, outside the folder"):
        gptq.V1.save(tmp_path / "out", out)
    assert sorted(os.listdir(tmp_path)) == ["in", "secret"]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    out = outgoing(source(tmp_path / "in"))
    twice = Outgoing([*out.entries, *out.entries], out.floats, {}, None)
    with pytest.raises(InputError, match=r"two tensors are called a\.up_proj\."):
        gptq.V1.save(tmp_path / "out", twice)


def test_a_tensor_without_elements_is_written_at_once(tmp_path: Path) -> None:
    """A small file can declare 2^61 rows of no columns."""

    class Empty(Counted):
        shape = (1 << 61, 0)

    entry = rounded("a.weight", 64, 96, "uint4:group=32")
    gptq.V1.save(tmp_path / "out", Outgoing([entry], [Empty(np.int8)], {}))
    assert open_checkpoint(tmp_path / "out").floats["x"].shape == (1 << 61, 0)


def test_a_configuration_as_odd_as_json_allows(tmp_path: Path) -> None:
    entry = rounded("a.weight", 64, 96, "uint4:group=32")
    said = json.loads(r'{"half": "\ud800", "word": "\u00fc", "none": NaN}')
    gptq.V1.save(tmp_path / "out", Outgoing([entry], [], said))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["half"], found["word"]) == ("\ud800", "\u00fc")
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InputError, match=r"config\.json is nested too deeply to be written"):
        gptq.V1.save(tmp_path / "deep", Outgoing([entry], [], deep))
    assert os.listdir(tmp_path) == ["out"]


class Counted:
    """Twelve numbers of a type."""

    name, shape = "x", (3, 4)

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def rows(self, start: int, stop: int) -> Any:
        return np.arange(12).reshape(3, 4).astype(self.dtype)[start:stop]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64])
def test_types_are_copied_as_they_are(tmp_path: Path, dtype: Any) -> None:
    entry = rounded("a.weight", 64, 96, "uint4:group=32")
    gptq.V1.save(tmp_path / "out", Outgoing([entry], [Counted(dtype)], {}))
    found = open_checkpoint(tmp_path / "out").floats["x"]
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found.rows(0, 3), np.arange(12).reshape(3, 4).astype(dtype))
