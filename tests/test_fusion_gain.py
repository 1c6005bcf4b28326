"""What a run says of fusing an encoder: where its multiply-adds are, and what is fused anyway."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from attentions import MASKS, text

import qgraph
from qgraph import fusion_gain, registry
from qgraph.capturing import capture
from qgraph.fusion_gain import FusionGain, count
from qgraph.run_profile import RunOf

CPU = registry.load("target", "ort-cpu")
WIDE, TOKENS = 32, 128


def encoder(path: Path, most: int = 0, mask: str = "none") -> Path:
    """Attention of two heads on linears `[32, 32]`; a table of `most` positions, if any."""
    moved = "shape1 = Shape(x)  n1 = Gather(shape1, one)  n = Squeeze(n1) "
    moved += "at = Range(zero_i, n, one_i)  place1 = Gather(table, at)  moved = Add(x, place1) "
    linears = "q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)"
    linears = moved + linears.replace("(x", "(moved") if most else linears
    body = text(MASKS[mask]).replace("q = Sin(x)  k = Cos(x)  v = Neg(x)", linears)
    model = onnx.parser.parse_model(body)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((WIDE, WIDE)) / 6 for name in ("wq", "wk", "wv")}
    if most:
        arrays["table"] = rng.standard_normal((most, WIDE))
    for name, array in arrays.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    onnx.save(model, path)
    return path


def notes(path: Path, **options: object) -> list[str]:
    output = path.with_name("out.onnx")
    found = qgraph.optimize(path, output, force=True, group=32, min_elements=0, **options)
    return [note for note in found.report.notes if "fusing gains" in note or "many" in note]


def test_multiply_adds_are_those_counted_by_hand(tmp_path: Path) -> None:
    found = count(capture(encoder(tmp_path / "m.onnx")), CPU)
    assert found.kept == 3 * TOKENS * WIDE * WIDE
    assert found.others == 2 * TOKENS * TOKENS * WIDE  # q·k and p·v of all heads
    assert (found.linears, found.convolutions) == (3, 0)
    assert found.share == pytest.approx(3 * WIDE / (3 * WIDE + 2 * TOKENS))
    assert found.made == {"FusedMatMul": 1}  # the scores and their division
    before, runs = found.nodes
    assert runs < before == len(onnx.load(tmp_path / "m.onnx").graph.node)


def test_a_convolution_counts_as_what_no_fusion_changes(tmp_path: Path) -> None:
    body = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[batch, 3, 8, 8] x) => (float[batch, s, 16] y)
    <int64[3] shape = {0, 16, -1}> {
      c = Conv<strides = [2, 2]>(x, w)  flat = Reshape(c, shape)
      rows = Transpose<perm = [0, 2, 1]>(flat)  y = MatMul(rows, wl) }"""
    model = onnx.parser.parse_model(body)
    for name, shape in (("w", (16, 3, 2, 2)), ("wl", (16, 16))):
        array = np.ones(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    found = count(capture(tmp_path / "m.onnx"), CPU)
    assert (found.kept, found.others) == (16 * 16 * 3 * 2 * 2 + 16 * 16 * 16, 0)
    assert (found.linears, found.convolutions, found.run.rows) == (1, 1, 1)


def test_the_line_expects_little_where_linears_are_nearly_all() -> None:
    run = RunOf({"x": (1, 128)}, 128, 1)
    most = FusionGain(run, "Some Runtime 1", (20, 12), Counter(BiasGelu=2), 6, 0, 90, 10)
    assert most.line("out.onnx --against m.onnx") == (
        "what fusing gains: at 128 rows (x 1×128) 90.0% of the multiply-adds are in the 6 linears, "
        "which no fusion changes, and Some Runtime 1 makes 2 BiasGelu by itself when it loads the "
        "model as it came (12 of 20 nodes run): expect little of it; "
        "`qgraph bench out.onnx --against m.onnx` measures it"
    )
    less = dataclasses.replace(most, others=11, made=Counter(), convolutions=2)
    assert "the 6 linears and 2 × Conv, which no fusion changes" in less.line("")
    assert "fuses nothing by itself in the model as it came" in less.line("")
    assert "expect little" not in less.line("")


def test_a_run_says_it_of_encoders_that_it_wrote_and_checked(tmp_path: Path) -> None:
    path = encoder(tmp_path / "m.onnx")
    first, second = notes(path)
    assert first.startswith("what fusing gains: at 128 rows (x 1×128×32) 27.3% of")
    assert "`qgraph bench out.onnx --against m.onnx` measures it" in first
    assert second.startswith("3 linears run in MatMulNBits") and "--for prefill" in second
    (alone,) = notes(path, purpose="prefill")
    assert alone == first


@pytest.mark.parametrize(
    "options", [{"check": False}, {"fuse": False}, {"target": "qdq"}, {"dry_run": True}]
)
def test_runs_that_load_or_fuse_nothing_say_nothing(
    tmp_path: Path, options: dict[str, object]
) -> None:
    assert notes(encoder(tmp_path / "m.onnx"), **options) == []


def test_a_decoder_has_other_gains(tmp_path: Path) -> None:
    assert notes(encoder(tmp_path / "m.onnx", mask="added")) == []


def test_a_large_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_gain, "MOST_BYTES", 1000)
    (found, _) = notes(encoder(tmp_path / "m.onnx"))
    assert "was not counted: the model has 0 MB, and up to 0 MB are run" in found


def test_a_model_of_few_positions_is_run_on_few(tmp_path: Path) -> None:
    found = count(capture(encoder(tmp_path / "m.onnx", most=40)), CPU)
    assert (found.run.rows, found.run.shapes) == (16, {"x": (1, 16, 32)})
