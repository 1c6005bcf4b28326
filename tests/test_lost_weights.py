"""Weights too small or too large for the scales of a format or layout: never in silence."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoint_folders import write_folder
from rounded_entries import ArraySource

import qgraph
from qgraph import registry
from qgraph.checkpoints.base import SourceEntry
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.lost_weights import LOST
from qgraph.quantizing import quantize_checkpoint

UP, DOWN = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("up", "down"))
LAYOUTS = {
    "gptq": "uint4:group=32",
    "gptq_v2": "int8:group=32",
    "awq": "uint4:group=64",
    "gguf": "int8:group=32",
    "fp8": "fp8-e4m3:scale=block",
    "bitsandbytes": "nf4",
    "modelopt": "nvfp4",
    "compressed-tensors": "int4:group=32",
}
LLAMA = {
    "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 80, "hidden_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 128,
    "intermediate_size": 64,
}  # fmt: skip


def weights(size: float) -> dict[str, Array]:
    """Up is of that size, down of size one."""
    rng = np.random.default_rng(0)
    up = rng.standard_normal((64, 128)) * size
    return {UP: up.astype(np.float32), DOWN: rng.standard_normal((128, 64)).astype(np.float32)}


def folder(path: Path, size: float) -> Path:
    found = write_folder(path, weights(size), {})
    (found / "config.json").write_text(str(LLAMA).replace("'", '"'))
    (found / "tokenizer_config.json").write_text("{}")
    return found


def graph(path: Path, size: float) -> Path:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[M, 128] x) => (float[M, 128] y) {\n"
        "[up] a = MatMul (x, u)\n[down] y = MatMul (a, d)\n}"
    )
    for node, name in zip(proto.graph.node, (UP, DOWN), strict=True):
        node.input[1] = name
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ascontiguousarray(array.T), name)
        for name, array in weights(size).items()
    )
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("how", ["quantize", "export"])
@pytest.mark.parametrize("size", [1e-12, 1e8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_a_weight_or_says_that_it_cannot(
    tmp_path: Path, layout: str, size: float, how: str
) -> None:
    out = tmp_path / "out"
    beside = folder(tmp_path / "f", size)

    def write() -> None:
        if how == "quantize":
            quantize_checkpoint(beside, out, layout=layout, format=LAYOUTS[layout])
        else:
            source = graph(tmp_path / "m.onnx", size)
            qgraph.export_checkpoint(
                source, out, layout=layout, format=LAYOUTS[layout], like=beside
            )

    if not registry.load("checkpoint", layout).half_scales:
        write()
        own, rows = weights(size)[UP], open_checkpoint(out).entries[UP].dequantized(0, 64)
        assert np.linalg.norm((rows - own) / size) < 0.2 * np.linalg.norm(own / size)
        return
    what = "WEIGHT_LOST: quantized, it is 100% off" if size < 1 else "its scale does not fit"
    way = f"--exclude '{re.escape(UP)}', or take a layout whose scales are float32"
    with pytest.raises(InputError, match=f"^weight {re.escape(UP)}: .*{what}.*{way}"):
        write()
    assert not out.exists()


@pytest.mark.parametrize("layout", ["gptq", "gguf"])
@pytest.mark.parametrize("size", [1e-12, 1e8])
def test_scales_of_a_graph_that_float16_does_not_hold(
    tmp_path: Path, layout: str, size: float
) -> None:
    """They are float32 there, and the codes are found already."""
    source, fmt = graph(tmp_path / "m.onnx", size), LAYOUTS[layout]
    qgraph.optimize(source, tmp_path / "q.onnx", format=fmt, accuracy_level=0, check=False)
    what = "WEIGHT_LOST: .*it is 100% off" if size < 1 else "is beyond float16"
    with pytest.raises(InputError, match=f"{re.escape(UP)}: .*{what}"):
        qgraph.export_checkpoint(
            tmp_path / "q.onnx", tmp_path / "out", layout=layout, like=folder(tmp_path / "f", size)
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("small, lost", [(0, False), (30, False), (63, True), (64, True)])
def test_rows_that_are_lost_count_by_what_they_weigh(small: int, lost: bool) -> None:
    """Rows of 1e-7, of which float16's scales leave nothing, beside rows that are 100 times that.

    The rows that are left count by their scales, a part of what they are, unless they are many.
    """
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) * 1e-7
    rows[small:] *= 100_000
    if lost and small < 64:
        rows[small:] = 0
    source = ArraySource(rows, "int4:group=32", ir.DataType.FLOAT16)
    entry = SourceEntry.of(source, "w")
    for start in range(0, 64, 8):
        entry.rows(start, start + 8)
    assert (entry.tally.error > LOST) == lost
    if lost:
        with pytest.raises(InputError, match="weight w: WEIGHT_LOST"):
            entry.check_written()
    else:
        entry.check_written()


def off(wanted: Array, found: Array) -> float:
    return float(np.linalg.norm(wanted - found) / np.linalg.norm(wanted))


@pytest.mark.parametrize("size, noted", [(1.0, False), (1e-4, True)])
@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_a_weight_that_lost_bits_to_float16_is_noted(
    tmp_path: Path, layout: str, size: float, noted: bool
) -> None:
    source = folder(tmp_path / "f", size)
    done = quantize_checkpoint(source, tmp_path / "out", layout=layout, format=LAYOUTS[layout])
    entry = open_checkpoint(tmp_path / "out").entries[UP]
    error = off(weights(size)[UP], entry.dequantized(0, 64))
    told = [each for each in done.warnings if "too coarse" in each]
    assert len(told) == (noted and layout == "gptq")
    if told:
        assert told[0].startswith("256 of 256 groups in 1 weight have steps")
        assert f"{UP} is {error:.1%} off; keep it in float with --exclude '{UP}', or" in told[0]
        assert 0.15 < error < 0.2
    else:
        assert error < 0.1


def half_graph(path: Path, size: float) -> Path:
    """`graph` in float16, the first half of up's columns of that size and the others of size 1."""
    proto = onnx.load(graph(path, 1.0))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        if tensor.name == UP:
            array[:64] *= np.float16(size)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_a_float16_graph_that_lost_bits_is_noted(tmp_path: Path, size: float) -> None:
    source = half_graph(tmp_path / "m.onnx", size)
    made = qgraph.optimize(source, tmp_path / "q.onnx", format="uint4", group=32)
    told = [each for each in made.report.notes if "too coarse" in each]
    assert len(told) == (size < 1)
    if told:
        assert told[0].startswith("128 of 256 groups in 1 weight have steps that are too coarse")
        assert "up is " in told[0]
        assert told[0].endswith("--exclude 'up', or make the model float32 first")
