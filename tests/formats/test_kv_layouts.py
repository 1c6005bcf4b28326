"""Layouts of a growing cache: beside torch's casts, hand examples, and the bounds of rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qgraph.errors import InputError
from qgraph.formats.kv_layouts import CacheLayout, ChannelKeys, HeadFp8, TokenValues

LAYOUTS: tuple[CacheLayout, ...] = (
    HeadFp8(margin=1.0),
    ChannelKeys(bits=4, group=4),
    ChannelKeys(bits=8, group=3),
    TokenValues(bits=4),
    TokenValues(bits=2, group=4),
)


def keys(tokens: int = 11, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 3, tokens, 8)).astype(np.float32)


def test_fp8_is_torchs_cast_of_a_head_scaled_to_448() -> None:
    x = torch.from_numpy(keys())
    scale = x.abs().amax((2, 3), keepdim=True) / 448
    stored = HeadFp8(margin=1.0).quantize(x)
    assert stored.codes.dtype == torch.float8_e4m3fn
    cast = (x / stored.scale).to(torch.float8_e4m3fn)
    assert torch.equal(stored.codes.float(), cast.float())
    torch.testing.assert_close(stored.scale, scale)
    torch.testing.assert_close(HeadFp8(margin=1.0).dequantize(stored), stored.codes.float() * scale)


def test_later_tokens_saturate_at_the_scale_of_the_first() -> None:
    layout = HeadFp8(margin=1.0)
    first = np.full((1, 1, 2, 4), 2.0, np.float32)
    stored = layout.append(layout.quantize(first), 10 * first)
    np.testing.assert_allclose(layout.dequantize(stored), 2.0)
    wide = HeadFp8(margin=10.0)
    stored = wide.append(wide.quantize(first), 10 * first)
    np.testing.assert_allclose(wide.dequantize(stored)[:, :, 2:], 20.0)


def test_a_group_of_keys_has_a_scale_and_a_low_end_for_each_channel() -> None:
    """By hand: channel 0 goes 0, 1, 2, 3 and channel 1 goes 10, 40, 20, 30, in two bits."""
    x = np.array([[0, 10, 0, 0], [1, 40, 0, 0], [2, 20, 0, 0], [3, 30, 0, 0]], np.float32)
    layout = ChannelKeys(bits=2, group=4)
    stored = layout.quantize(x[None, None])
    assert stored.codes.tolist() == [[[[0b0000], [0b1101], [0b0110], [0b1011]]]]
    assert stored.low is not None
    np.testing.assert_array_equal(stored.low[0, 0], [[0, 10, 0, 0]])
    np.testing.assert_array_equal(stored.scale[0, 0], [[1, 10, 1, 1]])
    np.testing.assert_array_equal(layout.dequantize(stored), x[None, None])


def test_what_fills_no_group_of_keys_stays_in_float() -> None:
    layout, x = ChannelKeys(bits=2, group=4), keys(7)
    stored = layout.quantize(x)
    assert (stored.codes.shape, stored.tokens) == ((2, 3, 4, 2), 7)
    np.testing.assert_array_equal(layout.dequantize(stored)[:, :, 4:], x[:, :, 4:])
    more = layout.append(stored, x[:, :, :1])
    assert more.codes.shape[2] == 8 and more.rest is not None and not more.rest.size
    np.testing.assert_array_equal(more.codes[:, :, :4], stored.codes)


def test_values_round_each_token_by_itself() -> None:
    x = keys()
    x[:, :, 3] *= 1000  # no other token is any worse for it
    found = TokenValues(bits=8).dequantize(TokenValues(bits=8).quantize(x))
    spread = x.max(-1, keepdims=True) - x.min(-1, keepdims=True)
    assert (np.abs(found - x) <= spread / 255 * 0.5001).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torch_and_numpy_store_the_same(layout: CacheLayout) -> None:
    x = keys()
    one, two = layout.quantize(x[:, :, :6]), layout.quantize(torch.from_numpy(x[:, :, :6]))
    one, two = layout.append(one, x[:, :, 6:]), layout.append(two, torch.from_numpy(x[:, :, 6:]))
    assert (one.nbytes, one.tokens) == (two.nbytes, 11) and two.nbytes < x.nbytes
    np.testing.assert_array_equal(layout.dequantize(one), layout.dequantize(two).numpy())


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_tokens_one_by_one_are_stored_as_all_at_once(layout: CacheLayout) -> None:
    x = keys()
    whole = layout.quantize(x)
    stored = layout.quantize(x[:, :, :1])
    for at in range(1, x.shape[2]):
        stored = layout.append(stored, x[:, :, at : at + 1])
    np.testing.assert_array_equal(stored.codes, whole.codes)
    np.testing.assert_array_equal(layout.dequantize(stored), layout.dequantize(whole))


TINY = float(np.finfo(np.float32).tiny)
"""Steps below the smallest normal number are not told apart."""
finite = st.floats(-1e4, 1e4, width=32)
shapes = st.tuples(st.just(1), st.integers(1, 2), st.integers(1, 9), st.just(8))


@given(arrays.arrays(np.float32, shapes, elements=finite), st.sampled_from((2, 4, 8)))
@settings(max_examples=40, deadline=None)
def test_no_value_is_off_by_more_than_half_a_step(x: np.ndarray, bits: int) -> None:
    steps = (1 << bits) - 1
    for layout, axis in ((TokenValues(bits), 3), (ChannelKeys(bits, x.shape[2]), 2)):
        found = layout.dequantize(layout.quantize(x))
        half = (x.max(axis, keepdims=True) - x.min(axis, keepdims=True)) / steps / 2
        assert (np.abs(found - x) <= half * 1.001 + np.abs(x).max() * 1e-6 + TINY).all()
    fp8 = HeadFp8(margin=1.0).dequantize(HeadFp8(margin=1.0).quantize(x))
    largest = np.abs(x).max((2, 3), keepdims=True)
    assert (
        np.abs(fp8 - x) <= np.maximum(np.abs(x) / 16, largest / 448 * 2.0**-9) * 1.001 + TINY
    ).all()


@pytest.mark.parametrize(
    "make", [lambda: ChannelKeys(bits=3), lambda: TokenValues(bits=5), lambda: ChannelKeys(group=0)]
)
def test_other_widths_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"wanted 2, 4, 8 bits, and groups of 1 or more"):
        make()


def test_groups_and_bytes_must_be_filled() -> None:
    with pytest.raises(InputError, match="values in groups of 3 channels: heads have 8"):
        TokenValues(group=3).quantize(keys())
    with pytest.raises(InputError, match="heads of 3 channels of 4 bits fill no whole bytes"):
        TokenValues(bits=4).quantize(keys()[..., :3])
