"""Rows of 8 bits for kernels that add pairs of products in 16 bits: what fits, what it costs."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from qgraph.formats.base import Array, QuantizedWeight, parse
from qgraph.formats.pairs import MOST, fit_16_bits
from qgraph.runtimes.ort_session import open_session

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
FMT = parse("int8-pairs")


def test_what_fits_16_bits() -> None:
    """All pairs of codes against all corners of the bytes that they may meet."""
    codes = np.arange(-128, 128)
    first, second = np.meshgrid(codes, codes)
    corners = [a * first + b * second for a, b in itertools.product((0, 255), repeat=2)]
    fits = np.all([(each >= -(2**15)) & (each < 2**15) for each in corners], axis=0)
    np.testing.assert_array_equal(fits, np.abs(first + second) <= MOST)


def test_by_hand() -> None:
    """The sum of columns 2 and 3 is the largest number of the first row; a sum of unlike signs
    counts for little, and the last of an odd number of columns stands alone."""
    rows = np.array([[1, -1, 1.27, 1.27, 0.02], [1.27, -1.27, 0, 0.02, 1.27]], np.float32)
    weight = FMT.quantize(rows, F32)
    np.testing.assert_allclose(weight.scales, [[0.02], [0.01]], rtol=1e-6)
    assert weight.codes.tolist()[1] == [127, -127, 0, 2, 127]
    assert weight.codes[0, 2:].tolist() in ([64, 64, 1], [63, 63, 1])  # 63.5, as float32 has it


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32 - 1),
    st.sampled_from([F32, F16]), st.booleans(), st.sampled_from([1e-3, 1.0, 300.0]),
)  # fmt: skip
def test_codes_fit_and_are_half_a_step_off(
    n: int, k: int, seed: int, dtype: ir.DataType, turned: bool, size: float
) -> None:
    rows = np.random.default_rng(seed).standard_t(2, (n, k)).astype(np.float32) * np.float32(size)
    rows = np.clip(rows, -6e4, 6e4)
    given_rows = np.asfortranarray(rows) if turned else rows
    weight = FMT.quantize(given_rows, dtype)
    assert fit_16_bits(weight.codes)
    off = np.abs(FMT.dequantize(weight) - rows)
    assert (off <= FMT.error_bound(weight)).all()
    least = parse("int8-row").quantize(rows, dtype)
    step, plain = (each.scales.astype(np.float32) for each in (weight, least))
    assert (plain <= step).all() and (step <= 2.01 * plain).all()


@given(st.lists(st.lists(st.integers(-128, 127), min_size=7, max_size=7), min_size=1, max_size=5))
def test_settled_codes_fit_and_keep_their_signs(rows: list[list[int]]) -> None:
    codes = np.array(rows, np.int8)
    weight = QuantizedWeight(codes, np.ones((len(codes), 1), np.float32))
    found = FMT.settled(weight).codes
    assert found.dtype == np.int8
    assert fit_16_bits(found)
    assert (np.sign(found) * np.sign(codes) >= 0).all()
    assert (np.abs(found.astype(int)) <= np.abs(codes.astype(int))).all()
    sums = np.abs(codes[:, 0:6:2].astype(int) + codes[:, 1:6:2])
    kept = np.repeat(sums <= MOST, 2, axis=1)
    np.testing.assert_array_equal(found[:, :6][kept], codes[:, :6][kept])
    left = np.abs(found[:, 0:6:2].astype(int) + found[:, 1:6:2])
    assert (left[sums > MOST] == MOST).all()


def test_settling_leaves_what_fits_alone() -> None:
    weight = FMT.quantize(np.random.default_rng(0).standard_normal((8, 30), np.float32), F32)
    assert FMT.settled(weight) is weight
    assert parse("int8-row").settled(weight) is weight


def test_gaussian_weights_cost_a_quarter_more_than_rows_of_8_bits() -> None:
    rows = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)

    def error(text: str) -> float:
        fmt = parse(text)
        off = fmt.dequantize(fmt.quantize(rows, F32)) - rows
        return float(np.linalg.norm(off))

    assert 1.15 < error("int8-pairs") / error("int8-row") < 1.35


def product(codes: Array, x: Array) -> Array:
    """x · codesᵀ by ONNX Runtime's MatMulIntegerToFloat, uint8 × int8."""
    node = helper.make_node(
        "MatMulIntegerToFloat", ["x", "w", "one", "ones", "zero"], ["y"], domain="com.microsoft"
    )
    constants = {
        "w": np.ascontiguousarray(codes.T), "one": np.ones((), np.float32),
        "ones": np.ones(len(codes), np.float32), "zero": np.array(128, np.uint8),
    }  # fmt: skip
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["M", codes.shape[1]])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["M", len(codes)])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return open_session(model.SerializeToString(), threads=1).run({"x": x})["y"]


@pytest.mark.parametrize("k", [2, 7, 64, 129, 500])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_kernels_of_signed_codes_are_exact(m: int, k: int) -> None:
    """Every pair at the limit, on the bytes that are worst for it; whatever the processor is."""
    rng = np.random.default_rng(m * k)
    first = rng.integers(-128, 128, (33, (k + 1) // 2))
    second = np.clip(
        np.where(rng.random(first.shape) < 0.5, MOST - first, -MOST - first), -128, 127
    )
    codes = np.stack([first, second], axis=2).reshape(33, -1)[:, :k].astype(np.int8)
    assert fit_16_bits(codes)
    x = rng.choice(np.array([0, 1, 254, 255], np.uint8), (m, k))
    x[0] = 255
    wanted = (x.astype(np.int64) - 128) @ codes.astype(np.int64).T
    np.testing.assert_array_equal(product(codes, x), wanted.astype(np.float32))
