"""Every quantized type of GGUF against the gguf package, on random blocks and by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gguf_files import HALVES, TYPES, blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.gguf_entries import moved
from qgraph.formats.base import Array, QuantizedWeight, parse
from qgraph.formats.minimums import MINIMUMS


def theirs(kind: BlockType, data: Array) -> Array:
    gguf = pytest.importorskip("gguf")
    with np.errstate(over="ignore"):
        return gguf.dequantize(data, gguf.GGMLQuantizationType(kind.number))


@pytest.mark.parametrize("name", TYPES)
def test_numbers_and_sizes_are_the_packages(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind, number = TYPES[name], gguf.GGMLQuantizationType[name]
    assert kind.number == number
    assert (kind.size, kind.nbytes) == gguf.GGML_QUANT_SIZES[number]
    assert set(TYPES) == set(HALVES)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_values_are_the_packages(name: str, data: st.DataObject) -> None:
    """Bytes of any value, scales finite."""
    kind = TYPES[name]
    given_blocks = blocks(kind, 3, data.draw(st.integers(0, 1 << 30)), spread=7)
    for at in HALVES[name]:
        finite = st.floats(-65504, 65504, width=16)
        numbers = np.array(data.draw(st.tuples(finite, finite, finite)), np.float16)
        given_blocks[:, at : at + 2] = numbers.reshape(3, 1).view(np.uint8)
    if name == "MXFP4":
        given_blocks[:, 0] = data.draw(st.lists(st.integers(0, 254), min_size=3, max_size=3))
    np.testing.assert_array_equal(kind.dequantized(given_blocks), theirs(kind, given_blocks))


@pytest.mark.parametrize("spread", [0, 6])
@pytest.mark.parametrize("name", TYPES)
def test_formats_hold_them_exactly(name: str, spread: float) -> None:
    """Codes, scales and minimums in a format of ours read back to the very same numbers."""
    kind = TYPES[name]
    data = blocks(kind, 256, 1, spread)
    found, fmt = kind.decode(data), parse(kind.format)
    low, high = fmt.code_range
    assert (found.codes.min() >= low) and (found.codes.max() <= high)
    if "group" in fmt.options:
        fmt = dataclasses.replace(fmt, group=kind.group)
    weight = QuantizedWeight(found.codes, found.scales)
    if found.minimums is not None:
        weight = moved(found.codes, found.scales, found.minimums, fmt, kind.bits)
    np.testing.assert_array_equal(fmt.dequantize(weight), theirs(kind, data))


@pytest.mark.parametrize(
    "name, first, last",
    [("Q4_1", 0, 15), ("Q4_K", 0, 15), ("Q2_K", 6, 9), ("Q5_1", 112, 143), ("Q5_K", 112, 143)],
)
def test_codes_lie_around_the_middle(name: str, first: int, last: int) -> None:
    """Kernels multiply code − middle: narrow codes at the low end would be large numbers."""
    kind = TYPES[name]
    found, fmt = kind.decode(blocks(kind, 64)), parse(kind.format)
    assert found.minimums is not None
    fmt = dataclasses.replace(fmt, group=kind.group)
    weight = moved(found.codes, found.scales, found.minimums, fmt, kind.bits)
    assert (weight.codes.min(), weight.codes.max()) == (first, last)


def test_a_group_without_a_scale_is_its_minimum() -> None:
    """Float zero points can say it too: a code of 1, the minimum for a scale, zero point 0."""
    fmt = parse("uint4:zero=float,group=32")
    codes = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    scales, least = np.array([[0.0, 0.5]], np.float32), np.array([[-0.75, -1.0]], np.float32)
    weight = moved(codes, scales, least, fmt, 4)
    wanted = [-0.75] * 32 + [0.5 * code - 1 for code in codes[0, 32:]]
    assert fmt.dequantize(weight)[0].tolist() == wanted
    plain = QuantizedWeight(weight.codes, weight.scales, weight.zeros)
    assert fmt.dequantize(plain)[0].tolist() == wanted


def test_minimums_that_float32_would_round_are_kept_wider() -> None:
    fmt = parse("uint4:zero=float,group=32")
    codes = np.full((1, 32), 3, np.uint8)
    near = moved(codes, np.float32([[2.0**-4]]), np.float32([[-1.0]]), fmt, 4)
    far = moved(codes, np.float32([[2.0**-23]]), np.float32([[-1.5]]), fmt, 4)
    farther = moved(codes, np.float32([[2.0**-30]]), np.float32([[-1.5]]), fmt, 4)
    types = [weight.more[MINIMUMS].dtype for weight in (near, far, farther)]
    assert types == [np.float32, np.float32, np.float64]
    assert fmt.dequantize(farther)[0, 0] == np.float32(-1.5)
