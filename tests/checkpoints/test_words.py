"""Codes in 32-bit words: as one long number, low bits first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qgraph.checkpoints.words import pack_words, unpack_words, words_of


@given(st.data(), st.integers(1, 8), st.integers(1, 90), st.integers(1, 3))
def test_words_are_one_long_number(data: st.DataObject, bits: int, count: int, n: int) -> None:
    seed = data.draw(st.integers(0, 99))
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, count)).astype(np.uint8)
    words = pack_words(codes, bits)
    assert words.dtype == np.int32 and words.shape == (n, words_of(count, bits))
    for row, packed in zip(codes, words, strict=True):
        number = sum(int(code) << (bits * at) for at, code in enumerate(row))
        assert int.from_bytes(packed.astype("<i4").tobytes(), "little") == number
    np.testing.assert_array_equal(unpack_words(words, bits, count), codes)


def test_three_bit_codes_straddle_words() -> None:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 10] = 0b101  # bits 30 and 31 of the first word, and bit 0 of the second
    assert pack_words(codes, 3).tolist() == [[0b01 << 30, 1, 0]]
