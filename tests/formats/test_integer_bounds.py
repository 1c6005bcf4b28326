"""Integer groups: how far a weight may be off, element by element."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from integer_formats import (
    F16,
    F32,
    FORMATS,
    SIGNED,
    gaussian,
    quick,
    scale_types,
    with_group,
)

from qgraph.formats.base import Array
from qgraph.formats.grouping import ScaleOverflow
from qgraph.formats.integer_groups import INT4, IntegerGroups

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
        except ScaleOverflow as error:
            row, group = error.row, error.group
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
