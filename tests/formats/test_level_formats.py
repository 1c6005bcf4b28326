"""Hand examples and layouts of formats that look their codes up in a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, Layout, QuantizedWeight, parse, variants

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


def gaussian(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def one(text: str, *values: float) -> tuple[Format, QuantizedWeight, dict[Any, Array]]:
    """A row that starts with `values`, then zeros, rounded and packed."""
    fmt = parse(text)
    row = np.zeros((1, fmt.group or len(values)), np.float32)
    row[0, : len(values)] = values
    weight = fmt.quantize(row, F32)
    return fmt, weight, fmt.pack(weight, fmt.default_layout)


# -------------------------------------------------------------------------------- hand examples


def test_fp8_by_hand() -> None:
    _, weight, parts = one("fp8-e4m3", 448.0, -1.0, 17.0, 18.0, 19.0, 2.0**-9, 2.0**-10)
    assert weight.scales.tolist() == [[1.0]]
    # 17 lies in the middle of 16 and 18, and goes to the even fraction; so does 19, to 20.
    assert parts["codes"].tobytes().hex() == "7eb858595a0100"
    _, weight, parts = one("fp8-e5m2", 57344.0, -1.0, 9.0, 11.0)
    assert parts["codes"].tobytes().hex() == "7bbc484a"


def test_fp8_block_by_hand() -> None:
    """DeepSeek's scales: 448 in each block of 128 × 128 is its largest weight."""
    fmt = parse("fp8-e4m3:scale=block")
    rows = np.ones((130, 200), np.float32)
    rows[5, 7], rows[129, 150] = 896, -4.48
    weight = fmt.quantize(rows, F32)
    parts = fmt.pack(weight, fmt.default_layout)
    assert parts["scales"].shape == (2, 2)
    np.testing.assert_allclose(parts["scales"], [[2, 1 / 448], [1 / 448, 0.01]], rtol=1e-6)
    assert parts["codes"].shape == (130, 2, 128)
    assert not parts["codes"][:, 1, 72:].any()  # padding
    np.testing.assert_allclose(fmt.dequantize(weight), rows, rtol=1 / 16)


def test_nf4_by_hand() -> None:
    """The first element lies in the high half of its byte; zero is code 7."""
    fmt, weight, parts = one("nf4", -2.0, 2.0, 0.0, 1.0, -1.0)
    assert weight.scales.tolist() == [[2.0]]
    assert weight.codes[0, :5].tolist() == [0, 15, 7, 12, 2]
    assert parts["codes"].tobytes().hex() == "0f7c27" + "77" * 29
    assert fmt.dequantize(weight)[0, 3] == np.float32(2 * 0.44070983)


def test_fp4_by_hand() -> None:
    _, weight, _ = one("fp4", 12.0, 8.0, 6.0, 4.0, 3.0, 2.0, -0.0625, 0.01)
    assert weight.codes[0, :8].tolist() == [3, 2, 5, 4, 7, 6, 9, 0]


def test_double_quantization_by_hand() -> None:
    """Scales 1 and 3: mean 2, what is left is ±1 times one, in codes 255 and nearest to −1."""
    fmt = parse("nf4:double=true")
    rows = np.zeros((1, 128), np.float32)
    rows[0, 0], rows[0, 64] = 1, 3
    parts = fmt.pack(fmt.quantize(rows, F32), fmt.default_layout)
    assert parts["nested"].tolist() == [[1.0, 2.0]]
    assert parts["scales"].tolist() == [[0, 255]]
    found = fmt.quantize(rows, F32).scales[0]
    assert found[1] == 3
    assert found[0] == pytest.approx(2 - 0.9929687)


@pytest.mark.parametrize(
    "text, codes",
    [("mxfp4", "217365" + "00" * 13), ("mxfp4:order=halves", "0102030705060000" + "00" * 8)],
)
def test_mxfp4_by_hand(text: str, codes: str) -> None:
    """amax 6 has the scale 1 (byte 127); interleaved nibbles, and halves of the block."""
    fmt, weight, parts = one(text, 0.5, 1.0, 1.5, 6.0, 3.0, 4.0)
    assert parts["scales"].tolist() == [[127]]
    assert weight.codes[0, :6].tolist() == [1, 2, 3, 7, 5, 6]
    assert parts["codes"].tobytes().hex() == codes
    weight.codes[0, 16:22] = weight.codes[0, :6]
    if text != "mxfp4":
        both = fmt.pack(weight, fmt.default_layout)["codes"].tobytes().hex()
        assert both.startswith("112233775566")


def test_mxfp4_clips_by_up_to_two_steps() -> None:
    fmt, weight, _ = one("mxfp4", 7.99, 5.0, 3.5, 2.5)
    assert weight.scales.tolist() == [[1.0]]
    assert fmt.dequantize(weight)[0, :4].tolist() == [6, 4, 4, 2]  # ties to even codes
    assert 1.99 < fmt.error_bound(weight).item() < 2.01


def test_mxfp8_by_hand() -> None:
    _, weight, parts = one("mxfp8", 3.0, 1.0)
    assert parts["scales"].tolist() == [[120]]  # 2^(1 − 8)
    assert weight.scales.item() == 2.0**-7
    assert parts["codes"].tobytes()[:2].hex() == "7c70"  # 384 and 128
    _, _, parts = one("mxfp8:element=e5m2", 3.0)
    assert parts["scales"].tolist() == [[127 + 1 - 15]]


def test_nvfp4_by_hand() -> None:
    """One block at the largest weight (scale 448 · s), one at a half of it, one of zeros."""
    fmt = parse("nvfp4")
    rows = np.zeros((1, 48), np.float32)
    rows[0, :2], rows[0, 16:18] = (2688, -448), (1344, 224)
    parts = fmt.pack(fmt.quantize(rows, F32), fmt.default_layout)
    assert parts["tensor"].tolist() == [1.0]
    assert parts["scales"].tolist() == [[0x7E, 0x76, 0x08]]  # 448, 224, 2^-6
    assert parts["codes"].tobytes().hex() == "a7" + "00" * 7 + "27" + "00" * 7 + "00" * 8
    np.testing.assert_array_equal(fmt.dequantize(fmt.quantize(rows, F32)), rows)


# -------------------------------------------------------------------------------- other layouts

LAYOUTS = [
    *((f"fp8-{kind}:scale={scale}", Layout(layout)) for kind in ("e4m3", "e5m2")
      for scale in ("tensor", "row", "block") for layout in ("qdq", "own")),
    ("nf4", Layout("flat")),
    ("fp4:group=32", Layout("flat")),
    ("mxfp4", Layout("nbits8", 32)),
    ("mxfp4:order=halves", Layout("nbits8", 32)),
    ("nvfp4", Layout("nbits8", 16)),
    ("nvfp4", Layout("own")),
]  # fmt: skip


@pytest.mark.parametrize("text, layout", LAYOUTS, ids=str)
def test_every_layout_holds_the_weight(text: str, layout: Layout) -> None:
    """Read back it is the same; blocks of rows concatenate; the parts are as was said."""
    fmt, n, k = parse(text), 256, 192
    rows = gaussian(n, k)
    weight = fmt.quantize(rows, F32)
    parts, specs = fmt.pack(weight, layout), fmt.parts(n, k, F32, layout)
    assert list(parts) == list(specs)
    for part, spec in specs.items():
        assert (parts[part].shape, parts[part].dtype) == (spec.shape, spec.dtype.numpy())
    raw: dict[Any, Array] = {
        part: np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        for part, array in parts.items()
    }
    found = fmt.unpack(raw, n, k, layout)
    np.testing.assert_array_equal(fmt.dequantize(found), fmt.dequantize(weight))
    half = fmt.pack(weight.rows(slice(128, 256)), layout)
    for part, spec in specs.items():
        first, last = spec.span(128, 256)
        assert parts[part].tobytes()[first:last] == half[part].tobytes()


@pytest.mark.parametrize(
    "text, layout, n, k, dtype, words",
    [
        ("nf4", Layout("flat"), 4, 100, F32, "blocks that divide K = 100"),
        ("nf4:double=true", Layout("flat"), 4, 128, F32, "no double quantization"),
        ("nvfp4", Layout("own"), 4, 40, F32, "blocks of 16 do not divide K = 40"),
        ("mxfp4", Layout("nbits8", 16), 4, 64, F32, "has blocks of 32, not 16"),
        ("mxfp8", Layout("qdq"), 4, 64, F32, "cannot lie as qdq"),
        ("nf4", Layout("blocks", 32), 4, 64, F32, "wanted blocks of 64"),
        ("uint4:zero=float", Layout("qdq"), 4, 64, F32, "no float zero points"),
    ],
)
def test_layouts_that_a_format_cannot_take(
    text: str, layout: Layout, n: int, k: int, dtype: ir.DataType, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        parse(text).parts(n, k, dtype, layout)


def test_bits_per_weight() -> None:
    """As the specifications count them, at K = 4096."""
    wanted = {
        "int8-row": 8, "int4-row": 4, "fp8-e4m3": 8, "fp8-e4m3:scale=tensor": 8,
        "fp8-e5m2:scale=block": 8, "nf4": 4.5, "nf4:double=true": 4.127, "fp4": 4.5,
        "mxfp4": 4.25, "mxfp8": 8.25, "nvfp4": 4.5, "uint4:zero=float": 5, "int4": 4.5,
    }  # fmt: skip
    for text, bits in wanted.items():
        assert parse(text).size_bits(4096, F32) == pytest.approx(bits, abs=0.01)


# ------------------------------------------------------------------------------ float zero points


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_float_zero_points_by_hand(bits: int) -> None:
    """The grid runs from the least to the largest weight, wherever zero lies."""
    fmt = parse(f"uint{bits}:zero=float", group=0)
    high = (1 << bits) - 1
    rows = np.array([[2.0, 2.0 + high / 2, 2.5, 2.0]], np.float32)
    weight = fmt.quantize(rows, F32)
    assert weight.zeros is not None
    assert (weight.scales.item(), weight.zeros.item()) == (0.5, -4.0)
    assert weight.codes.tolist() == [[0, high, 1, 0]]
    np.testing.assert_array_equal(fmt.dequantize(weight), rows)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_weights_far_from_zero_and_close_together(dtype: ir.DataType) -> None:
    """The zero point stays a number that its type holds; a constant comes back."""
    fmt = parse("uint4:zero=float", group=16)
    rows = np.full((2, 16), 3.0, np.float32)
    rows[1] += np.linspace(0, 1e-4, 16, dtype=np.float32)
    weight = fmt.quantize(rows, dtype)
    assert weight.zeros is not None
    assert np.abs(weight.zeros).max() <= 1025
    assert np.abs(fmt.dequantize(weight) - rows).max() < 3.0 / 1000


def test_float_zero_points_are_better_than_integers() -> None:
    rows = gaussian(64, 256) + np.float32(0.7)
    errors = {
        text: np.square(parse(text).dequantize(parse(text).quantize(rows, F32)) - rows).sum()
        for text in ("uint4", "uint4:zero=float")
    }
    assert errors["uint4:zero=float"] < errors["uint4"]


# --------------------------------------------------------------------------- relations on Gaussians


def test_errors_are_in_the_order_of_the_field() -> None:
    """‖W − Ŵ‖/‖W‖ on Gaussian weights."""
    rows = gaussian(256, 1024)
    names = [
        fmt.spell()
        for n in registry.names("format")
        for fmt in variants(registry.load("format", n))
    ]
    error = {}
    for text in names:
        fmt = parse(text)
        off = fmt.dequantize(fmt.quantize(rows, F32)) - rows
        error[text] = float(np.linalg.norm(off) / np.linalg.norm(rows))
    assert error["int8:group=64"] < error["int8-row"] < 0.01
    assert error["fp8-e4m3"] < 0.03 < error["fp8-e5m2"] < 0.06
    assert error["nvfp4"] < error["mxfp4"]
    assert error["nf4:group=64"] < error["int4:group=64"]
    assert error["nf4:group=64"] < error["fp4:group=64"]
    assert error["nf4:group=64,double=true"] == pytest.approx(error["nf4:group=64"], rel=0.01)
    assert error["mxfp4"] == error["mxfp4:order=halves"]


def test_fitted_formats_stay_what_they_are() -> None:
    """What a format learned of a weight is no option, and is not spelled."""
    for text in ("nvfp4", "fp8-e4m3:scale=tensor", "nf4:group=64,double=true"):
        fmt = parse(text)
        fitted = fmt.fitted_to(gaussian(4, 128))
        assert fmt.needs_survey
        assert fitted != fmt
        assert fitted.spell() == fmt.spell() == text
        assert dataclasses.asdict(fitted).keys() == dataclasses.asdict(fmt).keys()
