"""What a quantized cache holds, beside ONNX Runtime's own attention and casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from qgraph.errors import InputError
from qgraph.formats.kv_cache import CacheFormat

HEADS, SIZE, TOKENS = 2, 16, 5


def attention(fmt: CacheFormat) -> ort.InferenceSession:
    """One GroupQueryAttention without a rotary embedding, four heads on two."""
    kind = {"tensor": "PER_TENSOR", "channel": "PER_CHANNEL"}[fmt.scale]
    names = ["q", "k", "v", "past_k", "past_v", "last", "total", *[""] * 5, "k_scale", "v_scale"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["y", "present_k", "present_v"], domain="com.microsoft",
        num_heads=4, kv_num_heads=HEADS, kv_cache_bit_width=fmt.bits,
        k_quant_type=kind, v_quant_type=kind,
    )  # fmt: skip
    info, element = helper.make_tensor_value_info, fmt.data_type.value
    width = fmt.width(SIZE)
    floats = {"q": 64, "k": 32, "v": 32}
    graph = helper.make_graph(
        [node],
        "g",
        [
            *(info(name, TensorProto.FLOAT, [1, "S", size]) for name, size in floats.items()),
            *(info(f"past_{x}", element, [1, HEADS, "P", width]) for x in "kv"),
            info("last", TensorProto.INT32, [1]),
            info("total", TensorProto.INT32, [1]),
            *(info(f"{x}_scale", TensorProto.FLOAT, None) for x in "kv"),
        ],
        [
            info("y", TensorProto.FLOAT, None),
            *(info(f"present_{x}", element, None) for x in "kv"),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("text", ["int8", "int8:scale=tensor", "int4", "int4:scale=tensor"])
def test_codes_are_those_that_the_kernel_writes(text: str) -> None:
    fmt, rng = CacheFormat.parse(text), np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, TOKENS, n)).astype(np.float32) for n in (64, 32, 32))
    heads = [x.reshape(1, TOKENS, HEADS, SIZE).transpose(0, 2, 1, 3) for x in (k, v)]
    scales = [fmt.scales(0.8 * np.abs(x).max((0, 2))) for x in heads]  # some are clipped
    empty = [fmt.quantize(x[:, :, :0], scale) for x, scale in zip(heads, scales, strict=True)]
    feeds = {"q": q, "k": k, "v": v, "past_k": empty[0], "past_v": empty[1]}
    feeds |= {"last": np.array([TOKENS - 1], np.int32), "total": np.array([TOKENS], np.int32)}
    feeds |= {"k_scale": scales[0], "v_scale": scales[1]}
    y, *presents = attention(fmt).run(None, feeds)
    read = []
    for x, scale, present in zip(heads, scales, presents, strict=True):
        np.testing.assert_array_equal(fmt.quantize(x, scale), present)
        read.append(fmt.dequantize(present, scale))
    np.testing.assert_allclose(y, attended(q, *read), atol=2e-5)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in numpy: queries stay floats."""
    heads = q.reshape(1, TOKENS, 4, SIZE).transpose(0, 2, 1, 3)
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = heads @ k.transpose(0, 1, 3, 2) / np.sqrt(SIZE)
    scores[:, :, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(1, TOKENS, 64)


def test_fp8_is_the_cast_of_what_is_scaled_to_448() -> None:
    fmt = CacheFormat.parse("fp8")
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 4)).astype(np.float32)
    scales = fmt.scales(np.abs(x).max((0, 2)))
    assert fmt.data_type.value == onnx.TensorProto.FLOAT8E4M3FN and scales.shape == (1, 2, 1, 4)
    np.testing.assert_allclose(scales[0, :, 0] * 448, np.abs(x).max((0, 2)), rtol=1e-6)
    wanted = (x * (np.float32(1) / scales)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(fmt.quantize(x, scales), wanted)
    found = fmt.dequantize(fmt.quantize(10 * x, scales), scales)  # saturates, makes no NaN
    assert np.abs(found).max() <= np.abs(x).max() * 1.001


def test_a_channel_that_was_zero_may_become_something() -> None:
    largest = np.array([[0.0, 2.54], [0.0, 1.27]], np.float32)
    np.testing.assert_allclose(
        CacheFormat("int8").scales(largest), [[[[0.02, 0.02]], [[0.02, 0.01]]]]
    )
    np.testing.assert_allclose(CacheFormat("int8", "tensor").scales(largest), [0.02])
    assert (CacheFormat("int4").scales(np.zeros((1, 2))) > 0).all()


@pytest.mark.parametrize(
    "text, words",
    [
        ("int9", "did you mean 'int8'.*wanted one of int8, int4, fp8"),
        ("int8:", "wanted int8, int8:scale=channel or int8:scale=tensor"),
        ("int8:group=64", "wanted int8, int8:scale=channel or int8:scale=tensor"),
        ("int4:scale=row", "wanted int4, int4:scale=channel or int4:scale=tensor"),
    ],
)
def test_what_is_no_format_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        CacheFormat.parse(text)


def test_odd_heads_are_refused_in_four_bits() -> None:
    assert (CacheFormat("int4").width(64), CacheFormat("int8").width(5)) == (32, 5)
    with pytest.raises(InputError, match="heads of 5 channels fill no whole bytes"):
        CacheFormat("int4").width(5)
