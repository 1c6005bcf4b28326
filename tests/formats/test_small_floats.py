"""Codes of small floats: all values and ties against ml_dtypes, torch and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper

from qgraph.formats import small_floats
from qgraph.formats.base import Array, parse
from qgraph.formats.bitsandbytes import scale_levels
from qgraph.formats.nearest import Nearest

TYPES = {
    "e4m3": (small_floats.E4M3, ml_dtypes.float8_e4m3fn, 448),
    "e5m2": (small_floats.E5M2, ml_dtypes.float8_e5m2, 57344),
    "e2m1": (small_floats.E2M1, ml_dtypes.float4_e2m1fn, 6),
}
kinds = pytest.mark.parametrize("kind", TYPES)


def by_definition(code: int, exponent_bits: int, fraction_bits: int, bias: int) -> float:
    """The value of a code from its sign, exponent and fraction."""
    sign = -1.0 if code >> (exponent_bits + fraction_bits) & 1 else 1.0
    exponent = code >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    if not exponent:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(
    "values, exponent_bits, fraction_bits, bias, other",
    [
        (small_floats.E4M3, 4, 3, 7, {0x7F, 0xFF}),
        (small_floats.E5M2, 5, 2, 15, {*range(0x7C, 0x80), *range(0xFC, 0x100)}),
        (small_floats.E2M1, 2, 1, 1, set()),
    ],
)
def test_values_by_definition(
    values: Array, exponent_bits: int, fraction_bits: int, bias: int, other: set[int]
) -> None:
    for code, value in enumerate(values):
        if code in other:
            assert not np.isfinite(value)
        else:
            assert value == by_definition(code, exponent_bits, fraction_bits, bias)
            assert np.signbit(value) == (code >= len(values) // 2)


def test_e8m0_values() -> None:
    assert (small_floats.E8M0[:255] == 2.0 ** (np.arange(255) - 127)).all()
    assert np.isnan(small_floats.E8M0[255])


def ties(levels: Array) -> Array:
    """Levels, the middles between neighbours, and the float32 beside each."""
    ordered = np.unique(levels[np.isfinite(levels)]).astype(np.float64)
    middles = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([ordered.astype(np.float32), middles, -np.zeros(1, np.float32)])
    infinity = np.float32(np.inf)
    beside = [np.nextafter(exact, infinity), np.nextafter(exact, -infinity)]
    return np.concatenate([exact, *beside])


@kinds
def test_codes_and_ties_against_ml_dtypes(kind: str) -> None:
    values, dtype, most = TYPES[kind]
    asked = np.clip(ties(values), -most, most)
    found = Nearest(small_floats.finite(values)).codes(asked)
    np.testing.assert_array_equal(found, asked.astype(dtype).view(np.uint8))
    assert set(range(len(values))) - set(found) <= {0x7C, 0x7D, 0x7E, 0x7F, *range(0xFC, 0x100)}


@kinds
@settings(deadline=None, max_examples=60)
@given(values=hnp.arrays(np.float32, 50, elements=st.floats(width=32, allow_nan=False)))
def test_any_number_against_ml_dtypes(kind: str, values: Array) -> None:
    levels, dtype, most = TYPES[kind]
    found = Nearest(small_floats.finite(levels)).codes(values)
    wanted = np.clip(values, -most, most).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_codes_and_ties_against_torch(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values, _, most = TYPES[kind]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    asked = np.clip(ties(values), -most, most)
    wanted = torch.from_numpy(asked).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(Nearest(small_floats.finite(values)).codes(asked), wanted)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_codes_and_ties_against_onnx_runtime(kind: str) -> None:
    values, _, _ = TYPES[kind]
    to = {"e4m3": TensorProto.FLOAT8E4M3FN, "e5m2": TensorProto.FLOAT8E5M2}[kind]
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=to, saturate=1),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 19)],
        ir_version=9,
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    asked = ties(values)
    wanted: Any = session.run(None, {"x": asked})[0]
    found = values[Nearest(small_floats.finite(values)).codes(asked)]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_any_table_has_the_nearest_level(name: str) -> None:
    levels = parse(name).levels
    asked = np.random.default_rng(0).uniform(-1.1, 1.1, 20000).astype(np.float32)
    asked = np.concatenate([asked, ties(levels)])
    found = levels[Nearest(levels).codes(asked)]
    errors = np.abs(asked[:, None].astype(np.float64) - levels.astype(np.float64))
    np.testing.assert_array_equal(np.abs(asked.astype(np.float64) - found), errors.min(1))


def test_scale_levels_have_the_nearest() -> None:
    levels = scale_levels()
    asked = ties(levels)
    found = levels[Nearest(levels).codes(asked)]
    errors = np.abs(asked[:, None].astype(np.float64) - levels.astype(np.float64))
    np.testing.assert_array_equal(np.abs(asked.astype(np.float64) - found), errors.min(1))


@pytest.mark.parametrize(
    "amax, top_exponent, code",
    [
        (6.0, 2, 127),
        (7.999, 2, 127),
        (8.0, 2, 128),
        (4.0, 2, 127),
        (3.999, 2, 126),
        (448.0, 8, 127),
        (0.0, 2, 0),
        (1e-45, 2, 0),
        (3.4e38, 2, 252),
        (np.inf, 2, 255),
        (np.nan, 2, 255),
    ],
)
def test_e8m0_scale(amax: float, top_exponent: int, code: int) -> None:
    assert small_floats.e8m0_scale(np.array([amax], np.float32), top_exponent).tolist() == [code]


def test_e4m3_scale_is_never_subnormal() -> None:
    found = small_floats.e4m3_scale(np.array([0, 1e-9, 2.0**-6, 1.0, 448, 1e9, np.nan], np.float32))
    values = small_floats.E4M3[found]
    np.testing.assert_array_equal(values, [2.0**-6, 2.0**-6, 2.0**-6, 1, 448, 448, np.nan])


def test_onnx_types_hold_the_bytes() -> None:
    """Codes in "qdq" are tensors of the type itself."""
    from qgraph.formats.base import Layout

    for name, dtype in (
        ("fp8-e4m3", ir.DataType.FLOAT8E4M3FN),
        ("fp8-e5m2", ir.DataType.FLOAT8E5M2),
    ):
        fmt = parse(name)
        rows = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
        weight = fmt.quantize(rows, ir.DataType.FLOAT)
        codes = fmt.pack(weight, Layout("qdq"))["codes"]
        assert fmt.parts(5, 9, ir.DataType.FLOAT, Layout("qdq"))["codes"].dtype == dtype
        assert ir.tensor(codes, dtype=dtype).tobytes() == weight.codes.tobytes()
