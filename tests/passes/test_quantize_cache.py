"""A decoder's cache in int8 and int4: types, scales, what it costs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from decoders import decoder
from text_models import attention_decoder, byte_tokenizer

import qgraph
from qgraph.cli import run
from qgraph.errors import InputError
from qgraph.genai_config import genai_config
from qgraph.generating import TextModel
from qgraph.passes.cache_ranges import cached
from qgraph.report import Report

IDS = np.random.default_rng(0).integers(0, 256, (6, 24))
OPTIONS = {"format": "int8", "group": 32, "accuracy_level": 0, "check": False}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small attention with a rotary embedding that is one op already."""
    folder = tmp_path_factory.mktemp("small")
    byte_tokenizer(folder)
    return attention_decoder(folder / "model.onnx")


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    """The same weights, its cache in floats."""
    qgraph.optimize(source, source.with_name("float.onnx"), **OPTIONS)
    return source.with_name("float.onnx")


def quantized(source: Path, kind: str) -> tuple[Path, Report]:
    output = source.with_name(f"{kind.replace(':', '-')}.onnx")
    found = qgraph.optimize(source, output, kv_cache=kind, calibrate=IDS, force=True, **OPTIONS)
    return output, found.report


@pytest.mark.parametrize(
    "kind, element, width, mode, most",
    [
        ("int8", "INT8", 16, "PER_CHANNEL", 0.02),
        ("int8:scale=tensor", "INT8", 16, "PER_TENSOR", 0.02),
        ("int4", "UINT8", 8, "PER_CHANNEL", 0.5),
    ],
)
def test_attention_reads_codes_and_says_almost_the_same(
    source: Path, plain: Path, kind: str, element: str, width: int, mode: str, most: float
) -> None:
    output, report = quantized(source, kind)
    model = ir.load(output)
    (node,) = [each for each in model.graph if each.op_type == "GroupQueryAttention"]
    assert node.attributes["kv_cache_bit_width"].as_int() == 8 * width // 16
    assert [node.attributes[f"{part}_quant_type"].as_string() for part in "kv"] == [mode, mode]
    for value in (*model.graph.inputs[2:], *model.graph.outputs[1:]):
        assert value.dtype is not None and value.dtype.name == element
        assert value.shape is not None and value.shape[3] == width
    told = report.totals["kv_cache"]
    assert (told["bytes_before"], told["bytes_after"]) == (2 * 16 * 4, 2 * width)
    assert (told["tokens"], told["held"], told["apart"]) == (5 * 24, 24, True)
    assert any("KL divergence" in note and "kv cache" in note for note in report.notes)
    (step,) = [each for each in report.steps if each.pass_name == "quantize_cache"]
    assert (step.site, step.bytes_before, step.bytes_after) == (node.name, 128, 2 * width)
    fresh = np.random.default_rng(1).integers(0, 256, (4, 24))
    found = qgraph.compare(plain, output, fresh, sites=False).divergence
    assert found is not None and 0 < found.mean < most
    assert 0 < told["divergence"] < most


def test_text_goes_on_as_with_a_float_cache(source: Path, plain: Path) -> None:
    output, _ = quantized(source, "int8")
    one, two = TextModel(plain), TextModel(output)
    assert two.decoder.shared and two.decoder.io.cache[0].past.dtype == "int8"
    wanted, found = (
        each.generate([PROMPT, "The end"], max_tokens=24).finish() for each in (one, two)
    )
    for left, right in zip(wanted.rows, found.rows, strict=True):
        assert left.tokens[:8] == right.tokens[:8]


def test_scales_span_rotary_pairs_by_their_length(source: Path) -> None:
    """What is found on 24 tokens holds at every position: no key leaves it."""
    output, _ = quantized(source, "int8")
    model = ir.load(output)
    (node,) = [each for each in model.graph if each.op_type == "GroupQueryAttention"]
    assert cached(node).pairs.tolist() == [[at, at + 8] for at in range(8)]
    scales = model.graph.initializers["present_0_key.scale"].const_value
    assert scales is not None and scales.shape == (1, 1, 1, 16)
    keys = scales.numpy()[0, 0, 0]
    np.testing.assert_array_equal(keys[:8], keys[8:])
    late, early = (largest_keys(source, before) for before in (60, 0))
    assert (late <= 127 * keys * 1.0001).all()
    assert (late > 1.05 * early).any()  # each channel alone would not do


def test_keys_that_nothing_turns_have_ranges_of_their_own(source: Path, tmp_path: Path) -> None:
    model = ir.load(source)
    (node,) = [each for each in model.graph if each.op_type == "GroupQueryAttention"]
    node.attributes.add(ir.AttrInt64("do_rotary", 0))
    ir.save(model, tmp_path / "m.onnx")
    qgraph.optimize(
        tmp_path / "m.onnx", tmp_path / "out.onnx", kv_cache="int8", calibrate=IDS, **OPTIONS
    )
    scales = ir.load(tmp_path / "out.onnx").graph.initializers["present_0_key.scale"].const_value
    assert scales is not None
    largest = largest_keys(tmp_path / "m.onnx", 0)
    np.testing.assert_allclose(127 * scales.numpy()[0, 0, 0], largest, rtol=0.03)  # weights: int8


def largest_keys(path: Path, before: int) -> np.ndarray:
    """Of the tokens of the calibration, `before` places later, by channel."""
    session, found = ort.InferenceSession(path), []
    for row in IDS[:5, None]:
        feeds = {"input_ids": row, "attention_mask": np.ones((1, before + 24), np.int64)}
        for part in ("key", "value"):
            feeds[f"past_0_{part}"] = np.zeros((1, 1, before, 16), np.float32)
        found.append(session.run(["present_0_key"], feeds)[0])
    return np.abs(np.concatenate(found)).max((0, 1, 2))


def test_padding_of_calibration_data_does_not_count(source: Path, tmp_path: Path) -> None:
    mask = np.ones_like(IDS)
    mask[:, :9] = 0
    padded = [{"input_ids": np.where(m, i, 7)[None], "attention_mask": m[None]}
              for i, m in zip(IDS, mask, strict=True)]  # fmt: skip
    output = tmp_path / "out.onnx"
    found = qgraph.optimize(source, output, kv_cache="int8", calibrate=padded, **OPTIONS)
    assert (found.report.totals["kv_cache"]["tokens"], found.report.totals["kv_cache"]["held"]) == (
        5 * 15, 15,
    )  # fmt: skip


def test_one_sample_says_that_it_judges_itself(source: Path, tmp_path: Path) -> None:
    found = qgraph.optimize(
        source, tmp_path / "out.onnx", kv_cache="int8", calibrate=IDS[:1], **OPTIONS
    )
    assert any("there is one sample" in note for note in found.report.notes)


def test_explain_says_what_the_cache_holds(source: Path, plain: Path) -> None:
    output, _ = quantized(source, "int4")
    assert (
        "the cache is quantized: int4, per channel; 16 bytes a token"
        in qgraph.explain(output).notes
    )
    assert not any("cache" in note for note in qgraph.explain(plain).notes)


def test_the_command_line_takes_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "ids.npz", input_ids=IDS)
    given = ["--format", "int8", "--group", "32", "--no-check", "--calibrate"]
    given += [str(tmp_path / "ids.npz"), "--kv-cache", "int8", "-o", str(tmp_path / "out.onnx")]
    assert run(["optimize", str(source), *given]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "kv cache: int8, one scale a channel, 128 → 32 bytes a token; KL divergence" in words


def test_genai_is_told_of_whole_bytes_only(source: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2,
              "max_position_embeddings": 96}  # fmt: skip
    whole, _ = quantized(source, "int8")
    assert genai_config(whole, config)["model"]["decoder"]["head_size"] == 16
    half, _ = quantized(source, "int4")
    with pytest.raises(InputError, match="two channels in a byte: take --kv-cache int8"):
        genai_config(half, config)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"calibrate": None}, "--kv-cache int8 takes calibration data"),
        ({"fuse": False}, "--kv-cache int8 needs fused attention: leave out --no-fuse"),
        (
            {"kv_cache": "fp8"},
            "ort-cpu has no kernel that reads it .* take --kv-cache int8 or int4",
        ),
        ({"kv_cache": "int7"}, "wanted one of int8, int4, fp8"),
        ({"target": "qdq"}, "--kv-cache is for the targets ort-cpu, ort-cuda"),
        ({"target": "ort-cuda"}, "not available here, to see what the cache spans"),
    ],
)
def test_requests_that_cannot_be_met(
    source: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    if options.get("target") == "ort-cuda" and "CUDAExecutionProvider" in (
        ort.get_available_providers()
    ):
        pytest.skip("CUDA is here")
    given = {"kv_cache": "int8", "calibrate": IDS, **OPTIONS, **options}
    with pytest.raises(InputError, match=words):
        qgraph.optimize(source, tmp_path / "out.onnx", **given)
    assert not list(tmp_path.iterdir())


def test_the_size_of_a_head_is_that_of_the_past_where_the_graph_says_no_other(source: Path) -> None:
    model = ir.load(source)
    (node,) = [each for each in model.graph if each.op_type == "GroupQueryAttention"]
    query = node.inputs[0]
    assert query is not None
    query.shape = ir.Shape(["B", "T", None])
    assert cached(node).size == 16


def test_float16_reads_codes_since_a_later_runtime(source: Path, tmp_path: Path) -> None:
    """ONNX Runtime 1.27 and 1.28 read them with float32 activations alone."""
    model = onnx.load(source)
    half = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = half
    onnx.save(model, tmp_path / "half.onnx")
    given = {**OPTIONS, "format": "float", "kv_cache": "int8", "calibrate": IDS}
    given.pop("group")
    with pytest.raises(InputError, match=r"float16, .* since ONNX Runtime 1\.29, and 1\.28 has to"):
        qgraph.optimize(tmp_path / "half.onnx", **given, min_runtime="1.28")
    found = qgraph.optimize(tmp_path / "half.onnx", **given, min_runtime="1.29")
    told = found.report.totals["oldest_runtime"]
    assert told["oldest"] == "1.29"
    assert told["needs"][0]["what"] == "GroupQueryAttention with a quantized cache in float16"


def test_codes_beside_a_mask_are_read_since_a_later_runtime(source: Path, tmp_path: Path) -> None:
    """ONNX Runtime 1.27 adds the mask of a batch's first row to all of them."""
    model = onnx.load(source)
    (node,) = [each for each in model.graph.node if each.op_type == "GroupQueryAttention"]
    node.input.extend(["", "bias"])
    assert list(node.input).index("bias") == 10
    bias = onnx.numpy_helper.from_array(np.zeros((1, 1, 1, 1), np.float32), "bias")
    model.graph.initializer.append(bias)
    onnx.save(model, tmp_path / "masked.onnx")
    given = {**OPTIONS, "kv_cache": "int8", "calibrate": IDS, "min_runtime": "1.27"}
    with pytest.raises(InputError, match=r"adds a mask .* since ONNX Runtime 1\.28, and 1\.27 has"):
        qgraph.optimize(tmp_path / "masked.onnx", tmp_path / "out.onnx", **given)


def asked_for(_sample: int) -> NoReturn:
    """Data that nobody may ask for: reading or making it takes long."""
    raise AssertionError("refused too late")


def test_graphs_whose_cache_is_not_attentions_own(source: Path, tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        for options in ({"calibrate": map(asked_for, range(1))}, {"dry_run": True}):
            with pytest.raises(InputError, match=words):
                qgraph.optimize(path, tmp_path / "out.onnx", kv_cache="int8", **options, **OPTIONS)

    refused(quantized(source, "int8")[0], "quantized already: start from the float model")
    measures = attention_decoder(tmp_path / "shape.onnx", measures_past=True)
    refused(measures, "the past past_0_key of .* is also read by")
    model = onnx.load(source)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[3] = node.input[4] = ""
    for values in (model.graph.input, model.graph.output):
        del values[-2:]
    for node in model.graph.node:
        for at, name in enumerate(node.output):
            node.output[at] = "" if name.startswith("present") else name
    onnx.save(model, tmp_path / "none.onnx")
    refused(tmp_path / "none.onnx", "has no cache: add one with --add-cache")
    model = onnx.load(decoder(tmp_path / "plain.onnx"))
    info, past = onnx.helper.make_tensor_value_info, ["B", 1, "P", 16]
    model.graph.input.append(info("past_0_key", onnx.TensorProto.FLOAT, past))
    model.graph.output.append(info("present_0_key", onnx.TensorProto.FLOAT, past))
    model.graph.node.append(
        onnx.helper.make_node("Abs", ["past_0_key"], ["present_0_key"], "spelled")
    )
    onnx.save(model, tmp_path / "spelled.onnx")
    refused(
        tmp_path / "spelled.onnx",
        r"no attention became GroupQueryAttention: spelled \(Abs\) reads the cache",
    )
