"""Bytes against ONNX's own packing and hand-made words."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph.formats.packing import (
    is_turned,
    pack_bits,
    packed_bytes,
    padded,
    row_major,
    unpack_bits,
)


def test_low_bits_first() -> None:
    assert pack_bits(np.array([1, 2, 3, 15], np.uint8), 4).tolist() == [0x21, 0xF3]
    assert pack_bits(np.array([1, 2, 3, 0], np.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack_bits(np.array([1, 0, 0, 1, 0, 0, 0, 1], np.uint8), 1).tolist() == [0b10001001]
    assert pack_bits(np.array([7, 255], np.uint8), 8).tolist() == [7, 255]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_byte_comes_back(bits: int) -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = unpack_bits(packed, bits)
    assert codes.shape == (2, 128 * 8 // bits)
    assert codes.max() == (1 << bits) - 1
    np.testing.assert_array_equal(pack_bits(codes, bits), packed)


@pytest.mark.parametrize("dtype", [ir.DataType.UINT4, ir.DataType.UINT2])
def test_agrees_with_onnx(dtype: ir.DataType) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << dtype.bitwidth, (5, 8), dtype=np.uint8)
    packed = pack_bits(codes, dtype.bitwidth)
    tensor = onnx.TensorProto(data_type=dtype.value, dims=codes.shape, raw_data=packed.tobytes())
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.uint8), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_that_lie_column_by_column(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (67, 136), dtype=np.uint8)
    wanted = pack_bits(codes, bits)
    found = pack_bits(np.asfortranarray(codes), bits)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, wanted)
    for order in (codes, np.asfortranarray(codes)):
        out = np.zeros_like(wanted)
        assert pack_bits(order, bits, out) is out
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (70, 1), (5, 200), (200, 5)])
def test_row_major(dtype: type[np.generic], shape: tuple[int, int]) -> None:
    rows = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    assert row_major(rows) is rows
    for array in (np.asfortranarray(rows), np.repeat(rows.T, 2, axis=1).T[::2], rows[:, ::-1]):
        found = row_major(array)
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, array)
        out = np.zeros_like(rows)
        assert row_major(array, out) is out
        np.testing.assert_array_equal(out, array)


def test_turned_is_what_lies_column_by_column() -> None:
    rows = np.zeros((3, 4, 5), np.float32)
    assert [is_turned(a) for a in (rows, rows[0], rows[0, 0])] == [False] * 3
    assert is_turned(rows[0].T)
    assert is_turned(rows.transpose(2, 0, 1))


def test_padded_fills_each_row() -> None:
    array = np.array([[1, 2], [3, 4]], np.uint8)
    assert padded(array, 2) is array
    np.testing.assert_array_equal(padded(array, 3, 9), [[1, 2, 9], [3, 4, 9]])
    np.testing.assert_array_equal(
        padded(array, 4, np.array([[7], [8]])), [[1, 2, 7, 7], [3, 4, 8, 8]]
    )
    assert is_turned(padded(np.asfortranarray(array), 4))


def test_packed_bytes_round_up() -> None:
    assert [packed_bytes(n, 4) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [packed_bytes(n, 2) for n in (1, 4, 5)] == [1, 1, 2]
