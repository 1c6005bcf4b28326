"""A change of a millionth: nothing beside float activations, and told beside rounded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from text_models import attention_decoder

import qgraph
from qgraph.formats.kv_cache import CacheFormat
from qgraph.passes.cache_noise import MOVED, move, rounds_activations
from qgraph.passes.quantize_cache import CacheFinding

IDS = np.random.default_rng(0).integers(0, 256, (6, 24))


def present(model: ir.Model) -> np.ndarray:
    """The values that attention was given, and the logits behind it."""
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feeds |= {f"past_0_{part}": np.zeros((6, 1, 0, 16), np.float32) for part in ("key", "value")}
    (found,) = session.run(["present_0_value"], feeds)
    return np.asarray(found)


def test_all_that_attention_reads_moves_by_a_millionth(tmp_path: Path) -> None:
    model = ir.load(attention_decoder(tmp_path / "m.onnx"))
    before = present(model)
    move(model)
    np.testing.assert_allclose(present(model), before * np.float32(MOVED), rtol=2e-7)
    assert not np.array_equal(present(model), before)


@pytest.mark.parametrize("level", [0, 4])
def test_a_run_measures_it_where_activations_are_rounded(tmp_path: Path, level: int) -> None:
    found = qgraph.optimize(
        attention_decoder(tmp_path / "m.onnx"), tmp_path / "out.onnx", kv_cache="int8",
        calibrate=IDS, format="uint4", group=32, accuracy_level=level, check=False,
    )  # fmt: skip
    assert rounds_activations(ir.load(tmp_path / "out.onnx")) == (level == 4)
    noise = found.report.totals["kv_cache"]["noise"]
    assert noise is None if level == 0 else 0 <= noise < 0.1


@pytest.mark.parametrize("noise, told", [(None, False), (0.0006, False), (0.0071, True)])
def test_noise_that_is_much_of_what_is_measured_is_told(noise: float | None, told: bool) -> None:
    finding = CacheFinding(CacheFormat("int8"), {}, 512, 0.0072, noise, 256, True, 4, 1)
    words = "; rounded activations make 0.0071 of any change, however small"
    assert finding.line.endswith(f"on 256 tokens held out{words if told else ''}")
    assert finding.to_json()["noise"] == noise


@pytest.mark.parametrize("op, found", [("QuantizeLinear", True), ("Neg", False)])
def test_rounding_in_the_body_of_an_if_counts(op: str, found: bool) -> None:
    node = ir.Node("", op, [None], name="inner")
    body = ir.Graph([], list(node.outputs), nodes=[node], name="few")
    branch = ir.Node("", "If", [None], [ir.AttrGraph("then_branch", body)])
    graph = ir.Graph([], [], nodes=[branch], opset_imports={"": 21}, name="g")
    assert rounds_activations(ir.Model(graph, ir_version=10)) is found
