"""One suite for every registry entry with each of its options: bytes and bounds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import PARTS, Array, Format, QuantizedWeight, named, parse, variants
from qgraph.formats.grouping import ScaleOverflow
from qgraph.formats.output_bound import output_error_bound

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
FORMATS = [f for name in registry.names("format") for f in variants(registry.load("format", name))]
IDS = [f.spell() for f in FORMATS]
every = pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
scale_dtypes = pytest.mark.parametrize("dtype", [F32, F16])


def gaussian(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(0.05)


def as_bytes(parts: Mapping[Any, Array]) -> dict[Any, Array]:
    return {p: np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8) for p, a in parts.items()}


def assert_same(found: QuantizedWeight, wanted: QuantizedWeight) -> None:
    arrays = [(found.codes, wanted.codes), (found.scales, wanted.scales)]
    assert (found.zeros is None) == (wanted.zeros is None)
    if found.zeros is not None and wanted.zeros is not None:
        arrays.append((found.zeros, wanted.zeros))
    assert found.more.keys() == wanted.more.keys()
    arrays += [(found.more[name], wanted.more[name]) for name in wanted.more]
    for one, other in arrays:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# ------------------------------------------------------------------------------------- spelling


@every
def test_is_found_by_its_function(fmt: Format) -> None:
    assert parse(fmt.spell()) == fmt
    found = named(fmt.function_name)
    assert found is not None
    assert found.function_name == fmt.function_name
    assert (found.levels.tobytes(), found.numbers) == (fmt.levels.tobytes(), fmt.numbers)
    assert fmt.linear_name == fmt.function_name.replace("Dequantize", "Linear")


def test_no_two_kinds_of_number_share_a_function() -> None:
    kinds: dict[str, set[tuple[int, str]]] = {}
    for fmt in FORMATS:
        kinds.setdefault(fmt.function_name, set()).add((fmt.bits, fmt.numbers))
    assert all(len(kind) == 1 for kind in kinds.values())
    assert named("DequantizeInt5V1") is None


@every
def test_levels_are_those_of_the_codes(fmt: Format) -> None:
    """A weight of scale 1 and zero point 0 reads back as the levels."""
    low, high = fmt.code_range
    codes = np.arange(low, high + 1)[None]
    kind = np.int8 if low < 0 else np.uint8
    group = {"group": 0} if "group" in fmt.options else {}
    whole = dataclasses.replace(fmt, **group)
    nb = -(-codes.size // whole.group) if whole.group else 1
    ones = np.ones((1, nb), np.float32)
    zeros = None if fmt.symmetric else np.zeros((1, nb), np.uint8)
    weight = QuantizedWeight(codes.astype(kind), ones, zeros)
    np.testing.assert_array_equal(whole.dequantize(weight)[0], fmt.levels)
    assert len(fmt.levels) == 1 << fmt.bits


# ---------------------------------------------------------------------------------------- bytes


@every
@scale_dtypes
@pytest.mark.parametrize("n, k", [(1, 1), (3, 40), (130, 200), (300, 328)])
def test_packing_round_trip(fmt: Format, dtype: ir.DataType, n: int, k: int) -> None:
    """Ragged groups, blocks and bytes; what is stored is what was said to be stored."""
    weight = fmt.quantize(gaussian(n, k), dtype)
    parts = fmt.pack(weight, fmt.default_layout)
    specs = fmt.parts(n, k, dtype, fmt.default_layout)
    assert list(parts) == list(specs) == [part for part in PARTS if part in specs]
    assert len(specs) <= 3
    for part, spec in specs.items():
        assert (parts[part].shape, parts[part].dtype) == (spec.shape, spec.dtype.numpy())
    assert_same(fmt.unpack(as_bytes(parts), n, k, fmt.default_layout), weight)
    assert_same(fmt.unpack(parts, n, k, fmt.default_layout), weight)


@every
def test_blocks_of_rows_are_pieces_of_the_whole(fmt: Format) -> None:
    """Each block of rows fills its span of every part; the surveys of all make the format fit."""
    n, k = 1000, 72
    rows = gaussian(n, k)
    step = max(8, fmt.row_step(k))
    starts = range(0, n, step)
    surveys = [fmt.survey(rows[i : i + step]) for i in starts]
    fitted = fmt.fitted(surveys) if fmt.needs_survey else fmt
    whole = fmt.pack(fmt.quantize(rows, F32), fmt.default_layout)
    specs = fmt.parts(n, k, F32, fmt.default_layout)
    pieces = [fitted.quantize(rows[i : i + step], F32) for i in starts]
    assert_same(QuantizedWeight.joined(pieces), fmt.fitted_to(rows).quantize(rows, F32))
    for part, spec in specs.items():
        data = bytearray(whole[part].nbytes)
        for start, piece in zip(starts, pieces, strict=True):
            first, last = spec.span(start, min(start + step, n))
            packed = fmt.pack(piece, fmt.default_layout)[part].tobytes()
            assert len(packed) == last - first
            data[first:last] = packed
        assert bytes(data) == whole[part].tobytes()


@every
def test_rows_that_lie_column_by_column(fmt: Format) -> None:
    rows = gaussian(700, 333)
    weight = fmt.quantize(np.asfortranarray(rows), F32)
    assert weight.codes.flags.f_contiguous
    assert_same(weight, fmt.quantize(rows, F32))
    parts = fmt.pack(weight, fmt.default_layout)
    for part, array in fmt.pack(fmt.quantize(rows, F32), fmt.default_layout).items():
        np.testing.assert_array_equal(parts[part], array)


@every
def test_some_rows_of_a_weight(fmt: Format) -> None:
    weight = fmt.quantize(gaussian(40, 100), F32)
    some = weight.rows(slice(8, 24))
    np.testing.assert_array_equal(fmt.dequantize(some), fmt.dequantize(weight)[8:24])
    halves = [weight.rows(slice(0, 17)), weight.rows(slice(17, None))]
    assert_same(QuantizedWeight.joined(halves), weight)


@every
@scale_dtypes
def test_size_is_that_of_the_parts(fmt: Format, dtype: ir.DataType) -> None:
    k, n = 512, 1024
    specs = fmt.parts(n, k, dtype, fmt.default_layout).values()
    stored = 8 * sum(spec.nbytes for spec in specs) / (n * k)
    assert fmt.size_bits(k, dtype) == pytest.approx(stored, abs=1e-3)


# --------------------------------------------------------------------------------------- values


@every
@scale_dtypes
def test_zeros_stay_zeros(fmt: Format, dtype: ir.DataType) -> None:
    rows = gaussian(140, 160)
    rows[:, 64:128] = 0
    rows[130:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = fmt.quantize(rows, dtype)
        back = fmt.dequantize(weight)
    assert np.isfinite(weight.scales).all()
    assert (back[:, 64:128] == 0).all()
    assert (back[130:] == 0).all()
    assert (fmt.dequantize(fmt.quantize(np.zeros((3, 48), np.float32), dtype)) == 0).all()


def assert_within_bound(fmt: Format, rows: Array, dtype: ir.DataType) -> float:
    """The largest share of the bound that is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            weight = fmt.quantize(rows, dtype)
        except ScaleOverflow as error:
            row, group = error.row, error.group
            assert row < len(rows)
            assert group * (fmt.group or rows.shape[1]) < rows.shape[1]
            assert np.abs(rows).max() > (1e4 if dtype == F16 else 1e38)
            return 0.0
    bound = np.repeat(fmt.error_bound(weight), fmt.group or rows.shape[1], axis=1)
    error_ = np.abs(rows.astype(np.float64) - fmt.dequantize(weight))
    bound = bound[:, : rows.shape[1]].astype(np.float64)
    assert (error_ <= bound).all()
    return float((error_ / np.where(bound == 0, 1, bound)).max())


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
wide = st.builds(
    lambda m, e: float(np.float32(m * 2.0**e)), st.floats(-1, 1), st.integers(-149, 126)
)
close = st.floats(-1, 1, width=32)


@every
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_error_bound_holds_elementwise(fmt: Format, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)))
    elements = data.draw(st.sampled_from([finite, wide, close]))
    rows = data.draw(hnp.arrays(np.float32, shape, elements=elements))
    assert_within_bound(fmt, rows, data.draw(st.sampled_from([F32, F16])))


@every
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1e-3, 1.0, 1e4])
def test_error_bound_is_used(fmt: Format, magnitude: float) -> None:
    rows = (gaussian(256, 320, seed=1).astype(np.float64) * 20 * magnitude).astype(np.float32)
    used = [assert_within_bound(fmt, rows, dtype) for dtype in (F32, F16)]
    assert magnitude != 1.0 or min(used) > 0.05


@every
@scale_dtypes
def test_nearest_level(fmt: Format, dtype: ir.DataType) -> None:
    """No other code of the same scale and zero point is nearer."""
    rows = gaussian(140, 100)
    weight = fmt.quantize(rows, dtype)
    group = fmt.group or 100
    scales = np.repeat(weight.scales.astype(np.float64), group, axis=1)[:, :100, None]
    zeros = 0.0
    if weight.zeros is not None:
        zeros = np.repeat(weight.zeros.astype(np.float64), group, axis=1)[:, :100, None]
    levels = fmt.levels[np.isfinite(fmt.levels)].astype(np.float64)
    least = np.abs((levels - zeros) * scales - rows[..., None].astype(np.float64)).min(-1)
    found = np.abs(fmt.dequantize(weight).astype(np.float64) - rows)
    # An integer zero point is rounded apart from the weight: together by half a step each.
    noise = 1e-3 + fmt.reach * 2.0**-22
    slack = np.abs(scales[..., 0]) * (0.51 if fmt.numbers == "uint" else noise)
    assert (found <= least + slack).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every
def test_what_is_not_finite_shows(fmt: Format, bad: float) -> None:
    """Either an OverflowError, or a scale that is not finite: callers look for both."""
    rows = gaussian(3, 64)
    rows[1, 33] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = fmt.fitted_to(rows).quantize(rows, F32)
        except OverflowError:
            return
    assert not np.isfinite(found.scales).all()


@every
def test_refuses_nothing_to_quantize(fmt: Format) -> None:
    with pytest.raises(InputError, match=r"found \[0, 4\]"):
        fmt.validate(0, 4)
    fmt.validate(1, 1)


@every
def test_refuses_other_scale_types(fmt: Format) -> None:
    """Where scales are floats; bytes do not care what the activation is."""
    rows = gaussian(2, 32)
    specs = fmt.parts(1, 32, F32, fmt.default_layout)
    if specs["scales"].dtype != F32:
        assert fmt.quantize(rows, ir.DataType.DOUBLE).scales.dtype == np.float32
        return
    with pytest.raises(InputError, match="scales in DOUBLE: wanted FLOAT, FLOAT16 or BFLOAT16"):
        fmt.quantize(rows, ir.DataType.DOUBLE)


# ---------------------------------------------------------------------------- output error bound


@every
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), n=st.integers(1, 20), k=st.integers(1, 200))
def test_output_error_bound_holds(fmt: Format, seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((n, k)) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
    x = rng.standard_normal((4, k)).astype(np.float32)
    bound = output_error_bound(rows, fmt, x)
    weight = fmt.fitted_to(rows).quantize(rows, F32)
    y = x.astype(np.float64) @ rows.T.astype(np.float64)
    assert (np.abs(x @ fmt.dequantize(weight).T - y) <= bound).all()


@every
def test_output_error_bound_is_used(fmt: Format) -> None:
    """To more than 1 %: it is no bound on anything else."""
    rows, x = gaussian(64, 256), gaussian(16, 256, seed=2)
    weight = fmt.fitted_to(rows).quantize(rows, F32)
    y = x.astype(np.float64) @ rows.T.astype(np.float64)
    error = np.abs(x @ fmt.dequantize(weight).T - y)
    assert (error / output_error_bound(rows, fmt, x)).max() > 0.01


def test_output_error_bound_refuses_what_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"activations \[2, 9\] do not fit a weight \[3, 8\]"):
        output_error_bound(gaussian(3, 8), FORMATS[0], gaussian(2, 9))
    with pytest.raises(InputError, match="K = 2048 is too long"):
        output_error_bound(gaussian(1, 2048), FORMATS[0], gaussian(1, 2048), unit_roundoff=2.0**-11)
