"""Bytes against ONNX's own packing and hand-made words."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph.formats.packing import pack_bits, packed_bytes, padded, unpack_bits


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


def test_padded_fills_each_row() -> None:
    array = np.array([[1, 2], [3, 4]], np.uint8)
    assert padded(array, 2) is array
    np.testing.assert_array_equal(padded(array, 3, 9), [[1, 2, 9], [3, 4, 9]])
    np.testing.assert_array_equal(
        padded(array, 4, np.array([[7], [8]])), [[1, 2, 7, 7], [3, 4, 8, 8]]
    )


def test_packed_bytes_round_up() -> None:
    assert [packed_bytes(n, 4) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [packed_bytes(n, 2) for n in (1, 4, 5)] == [1, 1, 2]
