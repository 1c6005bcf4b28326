"""Codes, scales, bytes and bounds of integer groups: hand examples and properties."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qgraph.errors import InputError
from qgraph.formats import grouping
from qgraph.formats.base import GROUPS, Array, Layout, Part, QuantizedWeight, parse
from qgraph.formats.integer_groups import INT2, INT4, INT8, UINT2, UINT4, UINT8, IntegerGroups

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
FORMATS = (INT4, UINT4, INT8, UINT8, INT2, UINT2)
SIGNED = tuple(dataclasses.replace(f, scale="signed") for f in (INT4, INT8, INT2))
quick = settings(deadline=None, max_examples=40)
scale_types = st.sampled_from([F32, F16])


def with_group(format_: IntegerGroups, group: int) -> IntegerGroups:
    return dataclasses.replace(format_, group=group)


def gaussian(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def layouts(group: int) -> list[Layout]:
    blocks = [b for b in (16, 32, 64, 128, 256) if not group or group % b == 0]
    return [Layout("qdq"), *(Layout("blocks", b) for b in ([] if group else [0]) + blocks)]


def assert_same(found: QuantizedWeight, wanted: QuantizedWeight) -> None:
    assert not found.more
    for part in ("codes", "scales", "zeros"):
        a, b = getattr(found, part), getattr(wanted, part)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


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
    with pytest.raises(OverflowError) as caught:
        parse("int4:group=32").quantize(rows, F16)
    assert caught.value.args[1] == (1100, 34)


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


# ------------------------------------------------------------------------------- error bound

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
wide = st.builds(  # all magnitudes, subnormal to huge, are equally likely
    lambda m, e: float(np.float32(m * 2.0**e)), st.floats(-1, 1), st.integers(-149, 126)
)
close = st.floats(-1, 1, width=32)
half_range = st.floats(-65504, 65504, width=16)


def within_bound(format_: IntegerGroups, rows: Array, scale_dtype: ir.DataType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            weight = format_.quantize(rows, scale_dtype)
        except OverflowError as error:
            row, group = error.args[1]
            g = format_.group or rows.shape[1]
            reach = np.abs(rows[row, group * g : (group + 1) * g].astype(np.float64)).max()
            levels = 2 ** (format_.bits - 1) - 1
            assert reach > (65000 * levels if scale_dtype == F16 else 1.7e38)
            return
    stored = np.abs(weight.scales)
    assert ((stored == 0) | (stored >= np.finfo(stored.dtype).smallest_normal)).all()
    bound = np.repeat(format_.error_bound(weight), format_.group or rows.shape[1], axis=1)
    error_ = np.abs(rows.astype(np.float64) - format_.dequantize(weight))
    assert (error_ <= bound[:, : rows.shape[1]]).all()


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@quick
@given(data=st.data())
def test_error_bound_holds_elementwise(format_: IntegerGroups, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)))
    elements = data.draw(st.sampled_from([finite, wide, close, half_range]))
    rows = data.draw(hnp.arrays(np.float32, shape, elements=elements))
    group = data.draw(st.sampled_from([1, 2, 16, 32, 0]))
    within_bound(with_group(format_, group), rows, data.draw(scale_types))


@pytest.mark.parametrize("format_", FORMATS + SIGNED)
@pytest.mark.parametrize("scale_dtype", [F32, F16])
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-7, 6e-5, 1e-3, 1.0, 1e4])
def test_error_bound_holds_on_many(
    format_: IntegerGroups, scale_dtype: ir.DataType, magnitude: float
) -> None:
    rows = (gaussian(512, 200, seed=1).astype(np.float64) * magnitude).astype(np.float32)
    within_bound(with_group(format_, 16), rows, scale_dtype)


@pytest.mark.parametrize("format_", FORMATS)
def test_error_bound_is_no_more_than_half_a_step_and_slack(format_: IntegerGroups) -> None:
    weight = with_group(format_, 64).quantize(gaussian(64, 256), F32)
    ratio = with_group(format_, 64).error_bound(weight) / weight.scales
    assert ratio.min() > 0.5
    assert ratio.max() < 0.501


def test_signed_bound_is_a_step_only_where_codes_may_be_clipped() -> None:
    format_ = dataclasses.replace(INT4, group=4, scale="signed")
    weight = format_.quantize(np.array([[-4, 4, 0, 0, -4, 3, 0, 0]], np.float32), F32)
    assert format_.error_bound(weight).tolist() == [pytest.approx([0.5, 0.25], rel=1e-4)]


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
    with pytest.raises(OverflowError, match=r"row 590, group 2: .* float16") as error:
        with_group(format_, 16).quantize(rows, F16)
    assert error.value.args[1] == (590, 2)
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
            with pytest.raises(OverflowError) as error:
                IntegerGroups.quantize(*inputs)
            assert error.value.args[1] == (2, 0)
        else:
            codes = IntegerGroups.quantize(*inputs).codes
            clean = with_group(format_, 32).quantize(gaussian(4, 64), F16).codes
            np.testing.assert_array_equal(codes[[0, 1, 3]], clean[[0, 1, 3]])


def test_scales_are_floats_of_at_most_32_bits() -> None:
    with pytest.raises(InputError, match="INT8: wanted FLOAT, FLOAT16 or BFLOAT16"):
        INT4.quantize(gaussian(1, 16), ir.DataType.INT8)
    with pytest.raises(InputError, match="DOUBLE: wanted FLOAT, FLOAT16 or BFLOAT16"):
        INT4.parts(1, 16, ir.DataType.DOUBLE, INT4.default_layout)


# ----------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format_", FORMATS)
@quick
@given(n=st.integers(1, 5), k=st.integers(1, 700), scale_dtype=scale_types, seed=st.integers(0, 9))
@example(n=3, k=5, scale_dtype=F16, seed=0)  # "qdq" ends inside a byte
@example(n=2, k=576, scale_dtype=F32, seed=0)
def test_pack_then_unpack(
    format_: IntegerGroups, group: int, n: int, k: int, scale_dtype: ir.DataType, seed: int
) -> None:
    format_ = with_group(format_, group)
    weight = format_.quantize(gaussian(n, k, seed), scale_dtype)
    for layout in layouts(group):
        parts = format_.pack(weight, layout)
        specs = format_.parts(n, k, scale_dtype, layout)
        assert list(parts) == list(specs)
        assert {p: a.nbytes for p, a in parts.items()} == {p: s.nbytes for p, s in specs.items()}
        assert_same(format_.unpack(parts, n, k, layout), weight)
        raw = {p: np.frombuffer(a.tobytes(), np.uint8) for p, a in parts.items()}
        assert_same(format_.unpack(raw, n, k, layout), weight)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("layout", [Layout("qdq"), Layout("blocks", 16), Layout("blocks", 32)])
def test_blocks_of_rows_concatenate(format_: IntegerGroups, layout: Layout) -> None:
    format_ = with_group(format_, 32)
    weight = format_.quantize(gaussian(10, 77), F16)
    whole = format_.pack(weight, layout)
    pieces = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        zeros = None if weight.zeros is None else weight.zeros[rows]
        piece = QuantizedWeight(weight.codes[rows], weight.scales[rows], zeros)
        pieces.append(format_.pack(piece, layout))
    for part, array in whole.items():
        assert b"".join(p[part].tobytes() for p in pieces) == array.tobytes()


@pytest.mark.parametrize("format_", FORMATS)
def test_packing_more_than_one_tile(
    format_: IntegerGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    format_ = with_group(format_, 16)
    weight = format_.quantize(gaussian(9, 51), F32)
    for layout in layouts(16):
        wanted = {p: a.tobytes() for p, a in format_.pack(weight, layout).items()}
        with monkeypatch.context() as patch:
            patch.setattr(grouping, "TILE", 64)
            parts = format_.pack(weight, layout)
            assert {p: a.tobytes() for p, a in parts.items()} == wanted
            assert_same(format_.unpack(parts, 9, 51, layout), weight)
            assert_same(format_.quantize(gaussian(9, 51), F32), weight)


@pytest.mark.parametrize("format_", FORMATS)
def test_padding_dequantizes_to_zero(format_: IntegerGroups) -> None:
    format_ = with_group(format_, 32)
    weight = format_.quantize(gaussian(3, 40) + np.float32(0.3), F32)
    parts = format_.pack(weight, Layout("blocks", 32))
    wide = format_.dequantize(format_.unpack(parts, 3, 64, Layout("blocks", 32)))
    np.testing.assert_array_equal(wide[:, :40], format_.dequantize(weight))
    assert (wide[:, 40:] == 0).all()


@pytest.mark.parametrize("format_", FORMATS)
def test_smaller_blocks_repeat_their_groups_scales(format_: IntegerGroups) -> None:
    format_ = with_group(format_, 64)
    weight = format_.quantize(gaussian(2, 100), F32)  # groups of 64 and 36, 7 blocks of 16
    parts = format_.pack(weight, Layout("blocks", 16))
    first, second = weight.scales.T
    np.testing.assert_array_equal(parts["scales"].T, [first] * 4 + [second] * 3)
    assert parts["codes"].shape == (2, 7, 2 * format_.bits)


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
@pytest.mark.parametrize("k, group", [(7, 4), (6, 0), (9, 3)])
def test_qdq_bytes_are_onnx_tensors(name: str, k: int, group: int) -> None:
    """onnx_ir packs what ml_dtypes holds into the same bytes, and unpack reads both."""
    format_ = dataclasses.replace(parse(name), group=group)
    weight = format_.quantize(gaussian(3, k), F32)
    parts = format_.pack(weight, Layout("qdq"))
    specs = format_.parts(3, k, F32, Layout("qdq"))
    typed: dict[Part, Array] = {"scales": parts["scales"]}
    values_of: dict[Part, Array | None] = {"codes": weight.codes, "zeros": weight.zeros}
    for part, values in values_of.items():
        if values is None:
            continue
        spec = specs[part]
        assert spec.dtype.name == name.upper()
        typed[part] = values.reshape(spec.shape).astype(spec.dtype.numpy())
        assert ir.tensor(typed[part], dtype=spec.dtype).tobytes() == parts[part].tobytes()
    assert parts["scales"].shape == ((3,) if group == 0 else (3, -(-k // group)))
    assert_same(format_.unpack(typed, 3, k, Layout("qdq")), weight)


@pytest.mark.parametrize(
    "text, block", [("int4:group=64", 0), ("int4:group=64", 128), ("int2:group=row", 3)]
)
def test_blocks_that_do_not_fit(text: str, block: int) -> None:
    with pytest.raises(InputError, match=f"cannot lie in blocks of {block}: wanted"):
        parse(text).parts(4, 64, F32, Layout("blocks", block))


@pytest.mark.parametrize(
    "text, scale_dtype, k, bits",
    [
        ("int4:group=64", F16, 4096, Fraction(4 * 64 + 16, 64)),
        ("uint4:group=64", F16, 4096, Fraction(4 * 64 + 20, 64)),
        ("int8:group=row", F32, 512, Fraction(8 * 512 + 32, 512)),
        ("int2:group=32", F16, 1024, Fraction(2 * 32 + 16, 32)),
        ("uint4:group=128", F16, 576, Fraction(640 * 4 + 5 * 16 + 3 * 8, 576)),  # padding counts
    ],
)
def test_size(text: str, scale_dtype: ir.DataType, k: int, bits: Fraction) -> None:
    assert parse(text).size_bits(k, scale_dtype) == pytest.approx(float(bits))
