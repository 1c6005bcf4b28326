"""Integer groups: packing them into the layouts that kernels read, and back."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from integer_formats import (
    F16,
    F32,
    FORMATS,
    assert_same,
    gaussian,
    layouts,
    quick,
    scale_types,
    with_group,
)

from qgraph.errors import InputError
from qgraph.formats import grouping
from qgraph.formats.base import GROUPS, Array, Layout, Part, QuantizedWeight, parse
from qgraph.formats.integer_groups import IntegerGroups


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
