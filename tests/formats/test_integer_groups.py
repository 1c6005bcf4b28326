"""Codes and scales of integer groups: hand examples, the definition, edge values."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
import warnings
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integer_formats import (
    F16,
    F32,
    FORMATS,
    SIGNED,
    assert_same,
    gaussian,
    quick,
    with_group,
)

from qgraph.errors import InputError
from qgraph.formats.base import Layout, parse
from qgraph.formats.grouping import ScaleOverflow
from qgraph.formats.integer_groups import INT2, INT4, INT8, UINT2, UINT4, IntegerGroups

# ------------------------------------------------------------------------------ hand examples


@pytest.mark.parametrize(
    "row, codes, two_complement",
    [
        ([1.75, -0.6, 0.1, 0.3], [7, -2, 0, 1], "e710"),
        ([0.375, -0.125, 0.625, 1.75], [2, 0, 2, 7], "0272"),
    ],
)
def test_hand_examples_int4(row: list[float], codes: list[int], two_complement: str) -> None:
    format_ = with_group(INT4, 4)
    weight = format_.quantize(np.array([row], np.float32), F32)
    assert weight.scales.tolist() == [[0.25]]
    assert weight.codes.tolist() == [codes]
    assert format_.pack(weight, Layout("qdq"))["codes"].tobytes().hex() == two_complement
    blocks = format_.pack(weight, Layout("blocks", 4))["codes"]
    assert blocks.shape == (1, 1, 2)
    assert blocks.tobytes() == bytes(b ^ 0x88 for b in bytes.fromhex(two_complement))


def test_hand_example_uint4() -> None:
    format_ = with_group(UINT4, 4)
    weight = format_.quantize(np.array([[-1.0, 0.25, 1.25, 2.75]], np.float32), F32)
    assert weight.scales.tolist() == [[0.25]]  # (2.75 + 1) / 15
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[4]]
    assert weight.codes.tolist() == [[0, 5, 9, 15]]
    parts = format_.pack(weight, Layout("blocks", 4))
    assert parts["codes"].tobytes().hex() == "50f9"
    assert parts["zeros"].tobytes().hex() == "04"
    np.testing.assert_array_equal(format_.dequantize(weight), [[-1.0, 0.25, 1.25, 2.75]])


def test_rounding_comes_before_an_odd_zero_point() -> None:
    # w/s = 0.5, 1.5, 2.5 round to 0, 2, 2; adding z = 1 first would give 2, 2, 4.
    weight = with_group(UINT4, 4).quantize(np.array([[-1, 0.5, 1.5, 14]], np.float32), F32)
    assert weight.zeros is not None
    assert (weight.scales.item(), weight.zeros.item()) == (1, 1)
    assert weight.codes.tolist() == [[0, 1, 3, 15]]


@pytest.mark.parametrize(
    "row, scale, zero",
    [([1.0, 3.0], 1.0, 0), ([-3.0, -1.5], 1.0, 3), ([0.0, 0.0], 0.0, 0)],
)
def test_asymmetric_grid_includes_zero(row: list[float], scale: float, zero: int) -> None:
    weight = with_group(UINT2, 2).quantize(np.array([row], np.float32), F32)
    assert weight.zeros is not None
    assert (weight.scales.item(), weight.zeros.item()) == (scale, zero)


@pytest.mark.parametrize(
    "row, scale, codes",
    [
        ([-4, 1, 2, 3], 0.5, [-8, 2, 4, 6]),
        ([4, 1, 2, -3], -0.5, [-8, -2, -4, 6]),
        ([4, 1, 2, -4], 0.5, [7, 2, 4, -8]),  # equal magnitudes: the negative one; +4 is clipped
        ([-4, 3.75, 0, 0], 0.5, [-8, 7, 0, 0]),  # 7.5 rounds to 8, which there is not
    ],
)
def test_signed_scale_uses_all_levels(row: list[float], scale: float, codes: list[int]) -> None:
    format_ = dataclasses.replace(INT4, group=4, scale="signed")
    weight = format_.quantize(np.array([row], np.float32), F32)
    assert weight.scales.tolist() == [[scale]]
    assert weight.codes.tolist() == [codes]


@pytest.mark.parametrize("bits", [2, 8])
def test_signed_scale_clips_at_every_width(bits: int) -> None:
    format_ = dataclasses.replace({2: INT2, 8: INT8}[bits], group=2, scale="signed")
    weight = format_.quantize(np.array([[-1, 1], [1, -1]], np.float32), F32)
    half = 1 << (bits - 1)
    assert weight.codes.tolist() == [[-half, half - 1], [half - 1, -half]]


def test_codes_are_chosen_against_the_scale_as_stored() -> None:
    rows = gaussian(64, 256)
    format_ = with_group(INT8, 64)
    weight = format_.quantize(rows, F16)
    scale = (np.abs(rows.reshape(64, 4, 64)).max(2) / np.float32(127)).astype(np.float16)
    np.testing.assert_array_equal(weight.scales, scale)
    stored = np.repeat(scale.astype(np.float32), 64, axis=1)
    np.testing.assert_array_equal(weight.codes, np.rint(rows / stored))
    assert (weight.codes != format_.quantize(rows, F32).codes).mean() > 0.001


# -------------------------------------------------------------------------- exact definition


def defined(row: list[float], format_: IntegerGroups) -> tuple[float, int, list[int]]:
    """Scale, zero point and codes of one group from the formulas, element by element."""
    low, high = -(1 << (format_.bits - 1)), (1 << (format_.bits - 1)) - 1
    if not format_.symmetric:
        low, high = 0, (1 << format_.bits) - 1
    one = np.float32
    if not format_.symmetric:
        scale = (one(max(*row, 0)) - one(min(*row, 0))) / one(high)
    elif format_.scale == "signed":
        scale = -one(max(row, key=lambda w: (abs(w), w < 0))) / one(high + 1)
    else:
        scale = one(max(abs(w) for w in row)) / one(high)
    if not scale:
        return 0.0, 0, [0] * len(row)
    zero = 0 if format_.symmetric else round(float(-one(min(*row, 0)) / scale))
    codes = [min(max(round(float(one(w) / scale)) + zero, low), high) for w in row]
    return float(scale), zero, codes


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@quick
@given(
    row=st.lists(
        st.one_of(
            st.integers(-64, 64).map(lambda i: i / 16),  # many ties
            st.floats(-100, 100, width=32, allow_subnormal=False).filter(
                lambda w: w == 0 or abs(w) > 1e-20
            ),
        ),
        min_size=2,
        max_size=16,
    )
)
def test_agrees_with_the_definition(format_: IntegerGroups, row: list[float]) -> None:
    weight = with_group(format_, 0).quantize(np.array([row], np.float32), F32)
    scale, zero, codes = defined(row, format_)
    assert weight.scales.item() == scale
    assert weight.codes[0].tolist() == codes
    assert weight.zeros is None or weight.zeros.item() == zero


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 0])
def test_groups_rows_and_tiles_do_not_mix(format_: IntegerGroups, group: int) -> None:
    """A block of rows gives what each of its groups gives alone."""
    format_ = with_group(format_, group)
    rows = gaussian(700, 450)  # more than one tile, and a partial group in each row
    weight = format_.quantize(rows, F32)
    alone = with_group(format_, 0)
    for row, index in itertools.product((0, 333, 582, 699), range(weight.scales.shape[1])):
        columns = slice(index * group, (index + 1) * group) if group else slice(None)
        one = alone.quantize(rows[row : row + 1, columns], F32)
        np.testing.assert_array_equal(weight.codes[row, columns], one.codes[0])
        assert weight.scales[row, index] == one.scales.item()
        if weight.zeros is not None and one.zeros is not None:
            assert weight.zeros[row, index] == one.zeros.item()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_rows_of_other_float_types_and_orders(dtype: Any) -> None:
    rows = gaussian(32, 48).astype(dtype)
    wanted = parse("uint4:group=16").quantize(rows.astype(np.float32), F32)
    assert_same(parse("uint4:group=16").quantize(np.asfortranarray(rows), F32), wanted)


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@pytest.mark.parametrize("group", [16, 48, 256, 0])
def test_rows_that_lie_column_by_column(format_: IntegerGroups, group: int) -> None:
    """The weight of a MatMul, `[K, N]`, is quantized as it lies: same codes, same bytes."""
    format_ = with_group(format_, group)
    rows = gaussian(2600, 333)  # several tiles, and a partial group
    rows[:, 16:32] = 0
    wanted = format_.quantize(rows, F16)
    weight = format_.quantize(np.asfortranarray(rows), F16)
    assert weight.codes.flags.f_contiguous
    assert_same(weight, wanted)
    for layout in (format_.default_layout, Layout("qdq")):
        found = format_.pack(weight, layout)
        for part, array in format_.pack(wanted, layout).items():
            np.testing.assert_array_equal(found[part], array)


@pytest.mark.parametrize("order", ["C", "F"])
def test_which_group_does_not_fit(order: Any) -> None:
    rows = np.ones((1200, 1100), np.float32, order)
    rows[1100, 1090] = 3e38
    with pytest.raises(ScaleOverflow) as caught:
        parse("int4:group=32").quantize(rows, F16)
    assert (caught.value.row, caught.value.group) == (1100, 34)


@pytest.mark.parametrize("text", ["int4:group=64,scale=signed", "uint4:group=16", "uint8:group=48"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_temporaries_stay_small(text: str, order: Any) -> None:
    """However large the block of rows: a few tiles of 1 MB beside what is returned."""
    name, _, group = text.partition(":group=")
    format_ = parse(text) if "48" not in group else dataclasses.replace(parse(name), group=48)
    rows = np.asarray(gaussian(4096, 1024), order=order)
    layout = Layout("blocks", format_.group)
    weight = format_.quantize(rows, F16)
    parts = format_.pack(weight, layout)
    for call, result in (
        (lambda: format_.quantize(rows, F16), weight.codes.nbytes + 4 * weight.scales.nbytes),
        (lambda: format_.dequantize(weight), rows.nbytes),
        (lambda: format_.pack(weight, layout), sum(2 * a.nbytes for a in parts.values())),
        (lambda: format_.unpack(parts, 4096, 1024, layout), weight.codes.nbytes),
    ):
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < result + 8e6


# ------------------------------------------------------------------------------ edge values


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@pytest.mark.parametrize("scale_dtype", [F32, F16])
def test_zero_groups_have_scale_and_codes_zero(
    format_: IntegerGroups, scale_dtype: ir.DataType
) -> None:
    rows = gaussian(4, 48)
    rows[:, 16:32] = 0
    rows[0, 16] = -0.0
    weight = with_group(format_, 16).quantize(rows, scale_dtype)
    assert (weight.scales[:, 1] == 0).all()
    assert not np.signbit(weight.scales[:, 1]).any()
    assert (weight.codes[:, 16:32] == 0).all()
    assert (with_group(format_, 16).dequantize(weight)[:, 16:32] == 0).all()
    assert weight.scales[:, [0, 2]].all()


def test_scales_below_the_normal_range_are_raised_to_it() -> None:
    tiny = float(np.finfo(np.float16).smallest_normal)
    format_ = with_group(INT4, 4)
    weight = format_.quantize(np.array([[3, -1, 0.4, 0]], np.float32) * np.float32(tiny), F16)
    assert weight.scales.item() == tiny  # 3/7 of it would be subnormal
    assert weight.codes.tolist() == [[3, -1, 0, 0]]
    signed = dataclasses.replace(format_, scale="signed")
    weight = signed.quantize(np.array([[3, -1, 0.4, 0]], np.float32) * np.float32(tiny), F16)
    assert weight.scales.item() == -tiny
    assert weight.codes.tolist() == [[-3, 1, 0, 0]]
    underflow = format_.quantize(np.full((1, 4), 1e-9, np.float32), F16)
    assert underflow.codes.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
def test_a_scale_beyond_float16_names_row_and_group(format_: IntegerGroups) -> None:
    rows = gaussian(600, 500)  # the second tile
    rows[590, 40] = 3e38
    with pytest.raises(ScaleOverflow, match=r"row 590, group 2: .* float16") as error:
        with_group(format_, 16).quantize(rows, F16)
    assert (error.value.row, error.value.group) == (590, 2)
    assert with_group(format_, 16).quantize(rows, F32).scales[590, 2] != 0


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_never_warn(format_: IntegerGroups, value: float) -> None:
    rows = gaussian(4, 64)
    rows[2, 3] = value
    inputs = with_group(format_, 32), rows, F16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if np.isinf(value):
            with pytest.raises(ScaleOverflow) as error:
                IntegerGroups.quantize(*inputs)
            assert (error.value.row, error.value.group) == (2, 0)
        else:
            codes = IntegerGroups.quantize(*inputs).codes
            clean = with_group(format_, 32).quantize(gaussian(4, 64), F16).codes
            np.testing.assert_array_equal(codes[[0, 1, 3]], clean[[0, 1, 3]])


def test_scales_are_floats_of_at_most_32_bits() -> None:
    with pytest.raises(InputError, match="INT8: wanted FLOAT, FLOAT16 or BFLOAT16"):
        INT4.quantize(gaussian(1, 16), ir.DataType.INT8)
    with pytest.raises(InputError, match="DOUBLE: wanted FLOAT, FLOAT16 or BFLOAT16"):
        INT4.parts(1, 16, ir.DataType.DOUBLE, INT4.default_layout)
