from __future__ import annotations

import numpy as np
import pytest

from qgraph.errors import InputError
from qgraph.runtimes.base import ValueSpec
from qgraph.runtimes.feeds import IDS, synthesize_feeds

DECODER = [
    ValueSpec("input_ids", "int64", ("batch", "sequence")),
    ValueSpec("attention_mask", "int64", ("batch", "total_sequence")),
    ValueSpec("position_ids", "int64", ("batch", "sequence")),
    ValueSpec("past_key_values.0.key", "float16", ("batch", 3, "past", 64)),
    ValueSpec("past_key_values.0.value", "float16", ("batch", 3, "past", 64)),
]


def test_a_decoder_starts_with_an_empty_cache() -> None:
    feeds = synthesize_feeds(DECODER, batch=2, sequence=5)
    assert list(feeds) == [spec.name for spec in DECODER]
    assert feeds["past_key_values.0.key"].shape == (2, 3, 0, 64)
    assert feeds["past_key_values.0.key"].dtype == np.float16
    np.testing.assert_array_equal(feeds["attention_mask"], np.ones((2, 5)))
    np.testing.assert_array_equal(feeds["position_ids"], [[0, 1, 2, 3, 4]] * 2)
    ids = feeds["input_ids"]
    assert (ids.shape, ids.dtype) == ((2, 5), np.int64)
    assert 0 <= ids.min() < ids.max() < IDS


def test_an_encoder_pads_nothing() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    feeds = synthesize_feeds([ValueSpec(name, "int32", ("s77", "s78")) for name in names])
    assert {array.shape for array in feeds.values()} == {(1, 16)}
    assert {array.dtype for array in feeds.values()} == {np.dtype(np.int32)}
    assert feeds["attention_mask"].all()
    assert not feeds["token_type_ids"].any()


def test_one_symbol_has_one_size() -> None:
    specs = [
        ValueSpec("mask", "bool", ("n", "past_len")),
        ValueSpec("past.0", "float32", (2, "n", 4, "past_len", 8)),
        ValueSpec("x", "float32", ("n", "t", "t")),
    ]
    feeds = synthesize_feeds(specs, batch=3, sequence=7)
    assert feeds["past.0"].shape == (2, 3, 4, 0, 8)
    assert feeds["mask"].shape == (3, 0)
    assert feeds["x"].shape == (3, 7, 7)


def test_counts_of_generative_models() -> None:
    specs = [
        ValueSpec("seqlens_k", "int32", ("batch_size",)),
        ValueSpec("total_sequence_length", "int32", ()),
        ValueSpec("past_sequence_length", "int64", (1,)),
        ValueSpec("cache_position", "int64", ("sequence_length",)),
        ValueSpec("num_logits_to_keep", "int64", ()),
        ValueSpec("use_cache_branch", "bool", (1,)),
    ]
    feeds = synthesize_feeds(specs, sequence=6)
    assert {name: array.tolist() for name, array in feeds.items()} == {
        "seqlens_k": [5],
        "total_sequence_length": 6,
        "past_sequence_length": [0],
        "cache_position": [0, 1, 2, 3, 4, 5],
        "num_logits_to_keep": 1,
        "use_cache_branch": [False],
    }


def test_floats_are_gaussian_and_the_same_each_time() -> None:
    specs = [ValueSpec("x", "float32", (None, 1000)), ValueSpec("z", "bfloat16", (2,))]
    one, two = synthesize_feeds(specs), synthesize_feeds(specs)
    assert one["x"].shape == (1, 1000)
    assert 0.9 < one["x"].std() < 1.1
    np.testing.assert_array_equal(one["x"], two["x"])
    assert one["z"].dtype.name == "bfloat16"


def test_inputs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="input text is of type string"):
        synthesize_feeds([ValueSpec("text", "string", (1,))])
