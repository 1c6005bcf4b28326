"""Values without what first tokens share: the same outputs, and taken only where they share it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from text_models import attention_decoder, byte_tokenizer

import qgraph
from qgraph.generating import TextModel
from qgraph.passes.cache_offsets import first_values, offset_of, take_off
from qgraph.passes.cache_ranges import Cached, cached
from qgraph.rewrite import Rewriter

IDS = np.random.default_rng(0).integers(0, 256, (2, 24))
RNG = np.random.default_rng(1)


def attention(model: ir.Model) -> Cached:
    (node,) = [each for each in model.graph if each.op_type == "GroupQueryAttention"]
    return cached(node)


def load(folder: Path, packed: bool = True) -> ir.Model:
    """Two heads of queries on one of keys and values, all in one input or each in its own."""
    model = ir.load(attention_decoder(folder / "model.onnx"))
    node = attention(model).node
    if not packed:
        rewriter = Rewriter(model)
        sizes = rewriter.constant("sizes", np.array([32, 16, 16]))
        value = node.inputs[0]
        split = rewriter.node("Split", [value, sizes], name="split", attributes={"axis": 2},
                              dtype=ir.DataType.FLOAT, outputs=3)  # fmt: skip
        split.outputs[0].shape = ir.Shape([None, None, 32])
        for at, output in enumerate(split.outputs):
            output.name = f"split_{at}"
            node.replace_input_with(at, output)
        rewriter.insert_before(node, [split])
    return model


def outputs(model: ir.Model) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feeds["attention_mask"][1, :5] = 0
    for part in ("key", "value"):
        feeds[f"past_0_{part}"] = np.zeros((2, 1, 0, 16), np.float32)
    return list(session.run(None, feeds))


@pytest.mark.parametrize("packed", [True, False])
def test_outputs_stay_and_the_cache_holds_the_difference(tmp_path: Path, packed: bool) -> None:
    model = load(tmp_path, packed)
    logits, keys, values = outputs(model)
    offset = RNG.standard_normal((1, 16)).astype(np.float32)
    take_off(Rewriter(model), attention(model), offset)
    found, same_keys, moved = outputs(model)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(same_keys, keys)
    np.testing.assert_allclose(moved, values - offset[:, None], atol=1e-5)
    assert attention(model).size == 16  # the size of heads is still known


def test_first_tokens_are_those_behind_the_padding() -> None:
    values = np.arange(2 * 1 * 4 * 2, dtype=np.float32).reshape(2, 1, 4, 2)
    np.testing.assert_array_equal(first_values(values, None), values[:, :, 0])
    mask = np.array([[0, 0, 1, 1], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(first_values(values, mask), values[:1, :, 2])
    assert first_values(values[:, :, :0], None).shape == (0, 1, 2)


def test_only_what_first_tokens_share_is_taken_off(tmp_path: Path) -> None:
    found = attention(load(tmp_path))
    shared = RNG.standard_normal((1, 16))
    alike = [shared + 0.1 * RNG.standard_normal((4, 1, 16)) for _ in range(2)]
    offset = offset_of(found, alike)
    assert offset is not None and offset.dtype == np.float32
    np.testing.assert_allclose(offset, np.concatenate(alike).mean(0), rtol=1e-6)
    assert offset_of(found, [RNG.standard_normal((8, 1, 16))]) is None
    assert offset_of(found, [alike[0][:1]]) is None  # one text shows nothing
    found.node.attributes.add(ir.AttrInt64("smooth_softmax", 1))
    assert offset_of(found, alike) is None  # its weights do not add up to 1


def test_int4_takes_it_and_int8_does_not(tmp_path: Path) -> None:
    source = attention_decoder(tmp_path / "m.onnx")
    byte_tokenizer(tmp_path)
    ids = np.random.default_rng(0).integers(0, 256, (6, 24))
    ids[:, 0] = 1
    for kind, adds in (("int4", 2), ("int8", 0)):
        found = qgraph.optimize(
            source, tmp_path / "out.onnx", kv_cache=kind, calibrate=ids, force=True, check=False,
            format="int8", group=32,
        )  # fmt: skip
        model = ir.load(tmp_path / "out.onnx")
        names = [node.name for node in model.graph if "/values_" in (node.name or "")]
        assert len(names) == adds
        (step,) = [each for each in found.report.steps if each.pass_name == "quantize_cache"]
        assert ("values less those that all first tokens have" in step.detail) == bool(adds)
        text = TextModel(tmp_path / "out.onnx").generate(["Once upon"], max_tokens=6).finish()
        assert len(text.rows[0].tokens) == 6  # one token at a time, behind what is stored
