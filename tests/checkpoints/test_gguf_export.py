"""`qgraph export --layout gguf`, its notes, and files that are like another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gguf_files import TYPES, like_weights, rows, write_gguf
from safetensors.numpy import save_file

import qgraph
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.cli import run
from qgraph.errors import InputError
from qgraph.formats.base import Array

gguf = pytest.importorskip("gguf")
pytest.importorskip("onnxruntime")

K = 256
UP, DOWN = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("up", "down"))
NORM, TABLE = "model.norm.weight", "model.embed_tokens.weight"
OWN = {UP: "blk.0.ffn_up.weight", DOWN: "blk.0.ffn_down.weight", NORM: "output_norm.weight"}
FLOAT_ZEROS = "uint4:group=32,zero=float"
TEXT = f"""<ir_version: 8, opset_import: ["" : 17]>
g (float[M, {K}] x) => (float[M, {K}] y) {{
    [up] a = Gemm <transB = 1> (x, up)
    [down] b = Gemm <transB = 1> (a, down)
    y = Mul (b, norm)
}}"""


def weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {UP: (2 * K, K), DOWN: (K, 2 * K), NORM: (K,)}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in shapes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A graph whose constants have the names of parameters."""
    proto = onnx.parser.parse_model(TEXT)
    names = {"up": UP, "down": DOWN, "norm": NORM}
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in weights().items()
    )
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def float_file(tmp_path: Path) -> Path:
    """The GGUF file of the same model, which also has a table, quantized."""
    tensors: dict[str, Any] = {
        "token_embd.weight": ("Q8_0", rows(TYPES["Q8_0"], 8, K)),
        **{OWN[name]: array for name, array in weights().items()},
    }
    fields = {"llama.attention.head_count": 4, "tokenizer.chat_template": "{{ x }}"}
    return write_gguf(tmp_path / "float.gguf", tensors, fields)


def read(path: Path) -> dict[str, tuple[str, Array]]:
    """Type and values of each tensor, by the package."""
    return {
        t.name: (t.tensor_type.name, gguf.dequantize(t.data, t.tensor_type).astype(np.float32))
        for t in gguf.GGUFReader(path).tensors
    }


def test_a_model_like_a_file(tmp_path: Path, model: Path, float_file: Path) -> None:
    out = tmp_path / "out.gguf"
    done = qgraph.export_checkpoint(model, out, layout="gguf", like=float_file)
    assert (done.files, done.floats, done.notes) == ([out], 1, [])
    assert done.weights == [UP, DOWN, TABLE]
    old, new = read(float_file), read(out)
    assert {name: kind for name, (kind, _) in new.items()} == {
        "token_embd.weight": "Q8_0",
        OWN[UP]: "Q4_0",
        OWN[DOWN]: "Q4_0",
        OWN[NORM]: "F32",
    }
    assert list(new) == list(old)
    own = open_checkpoint(out).entries
    for name in (UP, DOWN):
        np.testing.assert_array_equal(new[OWN[name]][1], own[name].dequantized(0, own[name].n))
    for name in ("token_embd.weight", OWN[NORM]):
        np.testing.assert_array_equal(new[name][1], old[name][1])
    assert open_checkpoint(out).config["tokenizer.chat_template"] == "{{ x }}"


@pytest.mark.parametrize("kind", [None, "Q4_1", "q4_k"])
def test_float_zero_points_are_written_with_a_note(
    tmp_path: Path, model: Path, float_file: Path, kind: str | None
) -> None:
    out = tmp_path / "out.gguf"
    given = {"format": FLOAT_ZEROS} if kind is None else {"gguf_type": kind}
    done = qgraph.export_checkpoint(model, out, layout="gguf", like=float_file, **given)
    (note,) = done.notes
    assert note.startswith("2 of 3 weights change as they are written")
    assert read(out)[OWN[UP]][0] == (kind or "Q4_1").upper()


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K", "Q8_0", "Q5_1"])
def test_from_a_file_through_a_graph_and_back(
    tmp_path: Path, model: Path, float_file: Path, kind: str
) -> None:
    """The graph keeps minimums in float32; the file gets the very numbers that it came with."""
    tensors: dict[str, Any] = {
        OWN[UP]: (kind, like_weights(TYPES[kind], 2 * K, K, 1)),
        OWN[DOWN]: (kind, like_weights(TYPES[kind], K, 2 * K, 2)),
        OWN[NORM]: weights()[NORM],
    }
    given = write_gguf(tmp_path / "in.gguf", tensors, {"llama.attention.head_count": 4})
    qgraph.import_checkpoint(given, model, tmp_path / "q.onnx", accuracy_level=0)
    out = tmp_path / "out.gguf"
    done = qgraph.export_checkpoint(tmp_path / "q.onnx", out, layout="gguf", like=float_file)
    assert done.notes == []
    old, new = read(given), read(out)
    for name in (UP, DOWN):
        assert new[OWN[name]][0] == kind
        np.testing.assert_array_equal(new[OWN[name]][1], old[OWN[name]][1])


def test_a_folder_is_quantized_without_a_graph(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    save_file({**weights(), TABLE: np.ones((8, K), np.float32)}, folder / "model.safetensors")
    sizes = {
        "vocab_size": 8,
        "hidden_size": K,
        "intermediate_size": 2 * K,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    out = tmp_path / "out.gguf"
    done = qgraph.quantize_checkpoint(folder, out, layout="gguf")
    assert (done.files, done.warnings) == ((out,), ())
    assert read(out)[OWN[UP]][0] == "Q4_0"
    again = qgraph.quantize_checkpoint(
        folder, tmp_path / "b.gguf", layout="gguf", format=FLOAT_ZEROS
    )
    assert again.warnings[0].startswith("2 of 2 weights change as they are written")


def test_a_file_of_tensors_like_another(tmp_path: Path, float_file: Path) -> None:
    """Without a configuration, all that the new file says of its model is the other file's."""
    given = {**weights(), TABLE: np.ones((8, K), np.float16)}
    save_file(given, tmp_path / "f.safetensors")
    out = tmp_path / "out.gguf"
    arguments = ["quantize", tmp_path / "f.safetensors", "-o", out, "--layout", "gguf"]
    assert run([str(each) for each in (*arguments, "--like", float_file)]) == 0
    found = read(out)
    assert list(found) == list(read(float_file))
    assert [found[OWN[name]][0] for name in (UP, DOWN, NORM)] == ["Q4_0", "Q4_0", "F32"]
    np.testing.assert_array_equal(found["token_embd.weight"][1], given[TABLE])
    for more in (["--layout", "gptq"], ["--like", tmp_path]):
        assert run([str(each) for each in (*arguments, "--like", float_file, *more)]) == 2


def test_a_graph_has_no_stacks_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """`quantize` offers all layouts, `export` all that can hold one linear."""
    assert run(["export", "m", "-o", "o", "--layout", "mxfp4"]) == 2
    assert "known: gptq, gptq_v2, awq" in capsys.readouterr().err
    assert run(["quantize", "m", "-o", "o", "--layout", "mxfp4"]) == 2
    assert "m is no file and no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layout": "gptq", "like": "float.gguf"}, r"float\.gguf has no config\.json"),
        ({"layout": "gptq", "gguf_type": "Q4_K"}, "gptq has no types of GGUF: leave 'Q4_K' out"),
        ({"layout": "gguf", "gguf_type": "Q4_L"}, "no GGUF type 'Q4_L'"),
        ({"layout": "gguf", "like": "m.onnx"}, "m.onnx is no checkpoint"),
        (
            {"layout": "gguf", "like": "f.safetensors"},
            "wanted a Hugging Face folder or a GGUF file",
        ),
    ],
)
def test_wrong_options(
    tmp_path: Path, model: Path, float_file: Path, options: dict[str, str], message: str
) -> None:
    save_file(weights(), tmp_path / "f.safetensors")
    if "like" in options:
        options = {**options, "like": str(tmp_path / options["like"])}
    with pytest.raises(InputError, match=message):
        qgraph.export_checkpoint(model, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_model(tmp_path: Path, model: Path) -> None:
    tensors = {OWN[UP]: weights()[UP]}
    other = write_gguf(tmp_path / "other.gguf", tensors, {"llama.attention.head_count": 4})
    with pytest.raises(InputError, match=rf"other\.gguf has no tensor '{DOWN}'.*not of this model"):
        qgraph.export_checkpoint(model, tmp_path / "out", layout="gguf", like=other)
