"""What a decoder's graph says of how it may be run, and the head on the last token alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from decoders import VOCABULARY, decoder
from onnx import TensorProto, helper, numpy_helper
from text_models import POSITIONS, attention_decoder

from qgraph.decoder_graph import head_sizes, most_positions, shares_cache
from qgraph.decoder_head import last_logits

PASTS, PRESENTS = (["past_0_key", "past_0_value"], ["present_0_key", "present_0_value"])


def test_a_cache_is_shared_where_only_attention_touches_it(tmp_path: Path) -> None:
    shared = ir.load(attention_decoder(tmp_path / "a.onnx"))
    assert shares_cache(shared, PASTS, PRESENTS)
    measured = ir.load(attention_decoder(tmp_path / "b.onnx", measures_past=True))
    assert not shares_cache(measured, PASTS, PRESENTS)
    assert not shares_cache(shared, PASTS, ["logits"])


def test_tables_and_attention_say_their_sizes(tmp_path: Path) -> None:
    model = ir.load(attention_decoder(tmp_path / "a.onnx", padded=True))
    assert most_positions(model, None) == POSITIONS
    assert head_sizes(model) == dict.fromkeys(PASTS, 16)
    plain = ir.load(decoder(tmp_path / "b.onnx"))
    assert (most_positions(plain, None), head_sizes(plain)) == (None, {})


@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_is_given_the_last_token(tmp_path: Path, rows: int) -> None:
    path = decoder(tmp_path / "a.onnx")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, 7))
    (whole,) = ort.InferenceSession(path).run(None, {"input_ids": ids})
    model = shaped(path)
    assert last_logits(model, "logits")
    ir.save(model, tmp_path / "b.onnx")
    session = ort.InferenceSession(tmp_path / "b.onnx")
    assert session.get_outputs()[0].shape[1:] == [1, VOCABULARY]
    (last,) = session.run(None, {"input_ids": ids})
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-5)


def test_caps_of_logits_stay_behind_the_head(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 10, (2, 5))
    path = capped(tmp_path / "a.onnx")
    (whole,) = ort.InferenceSession(path).run(None, {"ids": ids})
    model = shaped(path)
    assert last_logits(model, "logits")
    ir.save(model, tmp_path / "b.onnx")
    (last,) = ort.InferenceSession(tmp_path / "b.onnx").run(None, {"ids": ids})
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-5)


def test_a_head_that_others_read_stays_as_it_is(tmp_path: Path) -> None:
    model = shaped(capped(tmp_path / "a.onnx", shown=True))
    before = [node.op_type for node in model.graph]
    assert not last_logits(model, "logits")
    assert [node.op_type for node in model.graph] == before


def shaped(path: Path) -> ir.Model:
    """A model with inferred shapes."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(path)))


def capped(path: Path, shown: bool = False) -> Path:
    """`30 · tanh(head / 30)`; the head's own output may be one of the model's."""
    rng = np.random.default_rng(0)
    floats = {"table": rng.standard_normal((10, 8)), "w": rng.standard_normal((8, 10)), "cap": 30.0}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["raw"]),
        helper.make_node("Div", ["raw", "cap"], ["small"]),
        helper.make_node("Tanh", ["small"], ["bounded"]),
        helper.make_node("Mul", ["bounded", "cap"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    names = ["logits", *(["raw"] if shown else [])]
    graph = helper.make_graph(
        nodes,
        "capped",
        [info("ids", TensorProto.INT64, ["B", "T"])],
        [info(name, TensorProto.FLOAT, ["B", "T", 10]) for name in names],
        [numpy_helper.from_array(np.asarray(v, np.float32), name) for name, v in floats.items()],
    )
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path
