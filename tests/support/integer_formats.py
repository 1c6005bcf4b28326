"""What the tests of integer groups share: the formats, weights, layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
from hypothesis import settings
from hypothesis import strategies as st

from qgraph.formats.base import Array, Layout, QuantizedWeight
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
