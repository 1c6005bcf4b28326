"""Float GGUF files that are quantized to GGUF files, beside what the gguf package makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf_files import TYPES, rows, write_gguf

from qgraph.checkpoints.gguf_file import read_header
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.cli import run
from qgraph.errors import CoverageError, InputError
from qgraph.formats.base import Array
from qgraph.quantizing import quantize_checkpoint

gguf = pytest.importorskip("gguf")
Q, UP, DOWN = "blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
KEPT = ("token_embd.weight", "output.weight", "blk.0.ffn_gate_inp.weight", "output_norm.weight")
TYPE_NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14}


def weights(dtype: Any) -> dict[str, Array]:
    """Tensors of a Llama by GGUF's names; matrices of a type, as vectors are float32."""
    rng = np.random.default_rng(0)
    shapes = {Q: (64, 256), UP: (64, 256), DOWN: (24, 512), **dict.fromkeys(KEPT[:3], (8, 256))}
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return {**made, KEPT[3]: rng.standard_normal(256).astype(np.float32)}


def model(path: Path, dtype: Any = np.float16, architecture: str = "llama") -> dict[str, Array]:
    tensors = weights(dtype)
    fields = {f"{architecture}.attention.head_count": 4, "general.name": "mine"}
    if dtype == ml_dtypes.bfloat16:  # the package knows it by its bytes
        given = {
            name: ("BF16", array.view(np.uint8)) if array.ndim > 1 else array
            for name, array in tensors.items()
        }
        write_gguf(path, given, fields, architecture)
    else:
        write_gguf(path, tensors, fields, architecture)
    return tensors


def test_a_folder_that_is_not_there_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "in.gguf")
    monkeypatch.setattr("qgraph.checkpoints.gguf.choose", None)
    with pytest.raises(InputError, match=r"there is no folder .*none: create it"):
        quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "none" / "out.gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_scales_are_the_packages_and_codes_no_further_off(
    tmp_path: Path, kind: str, dtype: Any
) -> None:
    """The package rounds against the scale before it is stored in float16, and we against that.

    So codes differ by one step at most, and all in all weights are no further off. Of two largest
    magnitudes, which bfloat16 often has, the package takes the first and we the negative one.
    """
    tensors = model(tmp_path / "in.gguf", dtype)
    done = quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf", gguf_type=kind)
    assert done.layout == "gguf"
    number = gguf.GGMLQuantizationType[kind]
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert list(found) == list(tensors)
    for name in (Q, UP, DOWN):
        assert found[name].tensor_type == number
        wide = tensors[name].astype(np.float32)
        theirs = gguf.quants.quantize(wide, number)
        scales, wanted = (
            np.abs(np.asarray(each).reshape(-1, TYPES[kind].nbytes)[:, :2].copy().view(np.float16))
            for each in (found[name].data, theirs)
        )
        np.testing.assert_array_equal(scales, wanted)
        ours, other = (gguf.dequantize(each, number) for each in (found[name].data, theirs))
        steps = np.abs(ours - other).reshape(len(scales), -1) / scales.astype(np.float32)
        assert steps.max() < 1.01
        assert (steps > 0.5).mean() < 0.05
        assert np.linalg.norm(ours - wide) <= 1.001 * np.linalg.norm(other - wide)


def test_all_else_stays_as_it_is(tmp_path: Path) -> None:
    tensors = model(tmp_path / "in.gguf")
    done = quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf")
    assert {entry.format.spell() for entry in done.entries} == {"int4:group=32,scale=signed"}
    old, new = (read_header(tmp_path / f"{name}.gguf") for name in ("in", "out"))
    assert dict(new.fields) == {**old.fields, "general.file_type": TYPE_NUMBERS["Q4_0"]}
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    for name in KEPT:
        np.testing.assert_array_equal(reader[name].data, tensors[name])
    assert sum(kept.is_weight for kept in done.kept) == 3


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_names_are_chosen_and_left_out(tmp_path: Path, architecture: str) -> None:
    """Those of transformers where the architecture is known, else the file's."""
    model(tmp_path / "in.gguf", np.float16, architecture)
    known = architecture == "llama"
    done = quantize_checkpoint(
        tmp_path / "in.gguf",
        tmp_path / "out.gguf",
        gguf_type="q4_k",
        exclude=["*down_proj" if known else "*.ffn_down"],
    )
    kinds = {name: t.type for name, t in read_header(tmp_path / "out.gguf").tensors.items()}
    assert {name for name, kind in kinds.items() if kind is not None} == {Q, UP}
    assert {kind.name for kind in kinds.values() if kind is not None} == {"Q4_K"}
    assert "(layout gguf)" in done.summary


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = model(tmp_path / "in.gguf")
    out = tmp_path / "out.gguf"
    assert run(["quantize", str(tmp_path / "in.gguf"), "-o", str(out), "--gguf-type", "Q8_0"]) == 0
    assert "to int8:group=32 (layout gguf)" in capsys.readouterr().out
    found = open_checkpoint(out).entries["model.layers.0.self_attn.q_proj.weight"]
    values = gguf.dequantize(
        gguf.GGUFReader(out).tensors[list(tensors).index(Q)].data, gguf.GGMLQuantizationType.Q8_0
    )
    places = np.arange(64).reshape(4, 8, 2).swapaxes(1, 2).reshape(64)
    np.testing.assert_array_equal(found.dequantized(0, 64), values[places])
    assert run(["quantize", str(out), "-o", str(tmp_path / "again.gguf")]) == 2
    assert "is quantized already (layout gguf)" in capsys.readouterr().err


def test_what_is_refused(tmp_path: Path) -> None:
    model(tmp_path / "in.gguf")
    with pytest.raises(InputError, match="gptq is of Hugging Face folders: wanted the layout gguf"):
        quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out", layout="gptq")
    with pytest.raises(InputError, match="gptq has no types of GGUF"):
        quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "o", layout="gptq", gguf_type="Q8_0")
    with pytest.raises(InputError, match="no GGUF type 'Q4_2'; did you mean"):
        quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf", gguf_type="Q4_2")
    mixed = {UP: ("Q8_0", rows(TYPES["Q8_0"], 32, 256)), DOWN: weights(np.float16)[DOWN]}
    write_gguf(tmp_path / "mixed.gguf", mixed, {"llama.attention.head_count": 4})
    with pytest.raises(InputError, match="quantized already"):
        quantize_checkpoint(tmp_path / "mixed.gguf", tmp_path / "out.gguf")
    with pytest.raises(CoverageError, match="nothing in"):
        quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf", exclude=["*layers*"])
    assert not (tmp_path / "out.gguf").exists()
