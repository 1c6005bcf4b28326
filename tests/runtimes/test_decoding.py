"""Which input of a decoder is what, in the spellings of exporters; a cache without copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from text_models import VOCABULARY, attention_decoder

from qgraph import registry
from qgraph.decoders import open_decoder
from qgraph.errors import InputError
from qgraph.runtimes.base import ValueSpec
from qgraph.runtimes.decoding import CachePair, Decoder, SessionDecoder, decoder_io
from qgraph.runtimes.ort_decoding import OrtDecoder

IDS = ValueSpec("input_ids", "int64", ("B", "T"))
LOGITS = ValueSpec("logits", "float32", ("B", "T", 96))


def cache(name: str, *shape: int | str) -> ValueSpec:
    return ValueSpec(name, "float32", shape or ("B", 2, "P", 16))


@pytest.mark.parametrize(
    "pasts, presents",
    [
        (["past_key_values.{}.key", "past_key_values.{}.value"],
         ["present.{}.key", "present.{}.value"]),
        (["past_key_{}", "past_value_{}"], ["present_key_{}", "present_value_{}"]),
        (["past_key_self_{}", "past_value_self_{}"],
         ["present_key_self_{}", "present_value_self_{}"]),
        (["past_{}"], ["present_{}"]),
        (["cache.k.{}", "cache.v.{}"], ["new_k_{}", "new_v_{}"]),
    ],
)  # fmt: skip
def test_pasts_find_their_presents_by_name(pasts: list[str], presents: list[str]) -> None:
    layers = range(11)
    wanted = {
        p.format(n): q.format(n) for p, q in zip(pasts, presents, strict=True) for n in layers
    }
    inputs = [IDS, *map(cache, wanted)]
    outputs = [LOGITS, *map(cache, sorted(wanted.values()))]  # 10 stands before 2
    io = decoder_io(inputs, outputs)
    assert {pair.past.name: pair.present for pair in io.cache} == wanted
    assert (io.tokens.name, io.logits, io.vocabulary) == ("input_ids", "logits", 96)


def test_unknown_names_are_paired_in_order() -> None:
    inputs = [IDS, cache("past.a"), cache("past.b")]
    io = decoder_io(inputs, [LOGITS, cache("x"), cache("y")])
    assert [pair.present for pair in io.cache] == ["x", "y"]


@pytest.mark.parametrize(
    "shape, wanted",
    [
        (("B", 2, "P", 16), (3, 2, 7, 16)),
        ((2, "B", 4, "P", 16), (2, 3, 4, 7, 16)),
        ((1, 2, "P", 16), (1, 2, 7, 16)),
    ],
)
def test_a_past_has_a_shape_for_rows_and_tokens(
    shape: tuple[int | str, ...], wanted: tuple[int, ...]
) -> None:
    assert CachePair(cache("past", *shape), "present").shape(3, 7) == wanted


def test_masks_positions_and_constants_are_known() -> None:
    inputs = [
        ValueSpec("attention_mask", "int64", ("B", "all")),
        ValueSpec("position_ids", "int64", ("B", "T")),
        ValueSpec("cache_position", "int64", ("T",)),
        ValueSpec("num_logits_to_keep", "int64", ()),
        IDS,
    ]
    io = decoder_io(inputs, [ValueSpec("hidden", "float32", ("B", "T")), LOGITS])
    assert io.mask is not None and io.positions is not None and io.places is not None
    assert (io.pads, io.rows) == (True, None)
    assert [spec.name for spec in io.constants] == ["num_logits_to_keep"]


@pytest.mark.parametrize(
    "inputs, outputs, message",
    [
        ([], [LOGITS], "takes no token ids .* its inputs are nothing"),
        ([ValueSpec("pixels", "float32", ("B", 3, 8, 8))], [LOGITS], "pixels float32"),
        ([ValueSpec("input_ids", "int64", ("B", 128))], [LOGITS], "always 128 tokens long"),
        ([IDS, ValueSpec("encoder_hidden_states", "float32", ("B", "S", 8))], [LOGITS],
         "also wants encoder_hidden_states"),
        ([IDS], [ValueSpec("pooled", "float32", ("B", 8))], "no output is logits"),
        ([IDS], [ValueSpec("last_hidden_state", "float32", ("B", "T", 64))], "no output is logits"),
        ([IDS, cache("past.0")], [LOGITS], "1 past .* and 0 outputs"),
        ([IDS, cache("past.0", "B", 2, "P", "D")], [LOGITS, cache("present.0")],
         "the last axis of past.0 is D"),
    ],
)  # fmt: skip
def test_other_models_are_refused(
    inputs: list[ValueSpec], outputs: list[ValueSpec], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        decoder_io(inputs, outputs)


@pytest.mark.parametrize("measures_past", [False, True])
def test_bound_and_copied_caches_give_the_same(tmp_path: Path, measures_past: bool) -> None:
    path = attention_decoder(tmp_path / "model.onnx", measures_past=measures_past)
    runtime = registry.load("target", "ort-cpu")
    bound = open_decoder(runtime, path).decoder
    assert bound.shared is not measures_past
    copied = SessionDecoder(runtime.open(path), bound.io)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 9))
    for decoder in (bound, copied):
        assert decoder.start(ids, room=5).shape == (2, VOCABULARY)
        assert decoder.length == 9
    for _ in range(5):
        token = copied.step(ids[:, 0])
        np.testing.assert_allclose(bound.step(ids[:, 0]), token, rtol=1e-4, atol=1e-4)
    assert bound.length == copied.length == 14


def test_the_shared_buffer_stays_where_it_is(tmp_path: Path) -> None:
    path = attention_decoder(tmp_path / "model.onnx")
    decoder = open_decoder(registry.load("target", "ort-cpu"), path).decoder
    decoder.start(np.array([[1, 2, 3]]), room=4)
    past = decoder._caches[0]  # type: ignore[attr-defined]
    before = past.numpy().copy()
    assert not before[:, :, 3:].any()
    decoder.step(np.array([4]))
    after = past.numpy()
    assert (before[:, :, :3] == after[:, :, :3]).all()
    assert after[:, :, 3].any() and not after[:, :, 4:].any()


def test_weights_that_caches_do_not_hold_are_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[Decoder] = []

    def settle(self: Decoder) -> int:
        settled.append(self)
        return 0

    monkeypatch.setattr(OrtDecoder, "settle", settle)
    path = attention_decoder(tmp_path / "model.onnx")
    runtime = registry.load("target", "ort-cpu")
    open_decoder(runtime, path)
    assert settled == []
    monkeypatch.setattr("qgraph.decoders.LARGE", 1000)
    decoder = open_decoder(runtime, path).decoder
    assert settled == [decoder]
