"""Float zero points as minimums: the layout "sums"."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.errors import InputError
from qgraph.formats.base import Layout, QuantizedWeight, parse
from qgraph.formats.minimums import MINIMUMS


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_minimums_by_hand(bits: int) -> None:
    """W = s·(q − z) is s·(q − h) + s·(h − z)."""
    fmt = parse(f"uint{bits}:group=16,zero=float")
    codes = (np.arange(16) % (1 << bits)).astype(np.uint8)[None]
    plain = QuantizedWeight(codes, np.array([[0.5]], np.float32), np.array([[-2.25]], np.float32))
    parts = fmt.pack(plain, Layout("sums", 16))
    half = 1 << (bits - 1)
    assert parts["minimums"] == np.float32(0.5 * (half + 2.25))
    back = fmt.unpack(parts, 1, 16, Layout("sums", 16))
    assert back.zeros == np.float32(-2.25)
    np.testing.assert_array_equal(fmt.dequantize(back), fmt.dequantize(plain))
    first, second = fmt.addends(back)
    np.testing.assert_array_equal(first, 0.5 * (codes - np.float32(half)))
    assert (second == parts["minimums"]).all()
    assert fmt.same(plain, back)
    assert not fmt.same(plain, dataclasses.replace(back, more={MINIMUMS: back.more[MINIMUMS] * 2}))


def test_minimums_that_are_given_are_stored_as_they_are() -> None:
    """A checkpoint's own minimum needs no zero point that holds it."""
    fmt = parse("uint4:group=32,zero=float")
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    found = fmt.quantize(rows, ir.DataType.FLOAT)
    own = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)
    parts = fmt.pack(dataclasses.replace(found, more={MINIMUMS: own}), Layout("sums", 16))
    np.testing.assert_array_equal(parts["minimums"], np.repeat(own, 2, axis=1))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("text", ["uint4:group=32,zero=float", "uint8:group=row,zero=float"])
def test_what_is_read_back_is_within_the_bound(text: str, dtype: ir.DataType) -> None:
    """Of rounding, which allows for one rounding of the minimum more."""
    fmt = parse(text)
    rows = np.random.default_rng(0).standard_normal((40, 200)).astype(np.float32)
    rows[:20] += 30
    weight = fmt.quantize(rows, dtype)
    layout = Layout("sums", 32)
    parts = fmt.pack(weight, layout)
    specs = fmt.parts(40, 200, dtype, layout)
    assert list(parts) == list(specs) == ["codes", "scales", "minimums"]
    assert all(parts[part].nbytes == spec.nbytes for part, spec in specs.items())
    back = fmt.unpack(parts, 40, 200, layout)
    bound = np.repeat(fmt.error_bound(back), fmt.group or 200, axis=1)[:, :200]
    assert (np.abs(rows - fmt.dequantize(back)) <= bound).all()
    np.testing.assert_allclose(fmt.dequantize(back), fmt.dequantize(weight), rtol=1e-4, atol=1e-5)
    blocks = fmt.pack(weight, Layout("blocks", 32))
    assert layout.of("codes") == layout.of("scales") == Layout("blocks", 32)
    for part in ("codes", "scales"):
        np.testing.assert_array_equal(parts[part], blocks[part])


@pytest.mark.parametrize("text", ["int4:group=32", "uint4:group=32"])
def test_only_float_zero_points_are_minimums(text: str) -> None:
    with pytest.raises(InputError, match="has no float zero points to be stored as minimums"):
        parse(text).parts(4, 64, ir.DataType.FLOAT, Layout("sums", 32))
