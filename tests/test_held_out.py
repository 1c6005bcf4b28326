"""Samples that are held out, and fewer tokens of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qgraph.calibration import collect
from qgraph.errors import InputError
from qgraph.held_out import fewer, samples_of, split


def data(*shapes: tuple[int, int]) -> Any:
    """Batches of tokens, numbered through."""
    batches, at = [], 0
    for rows, length in shapes:
        ids = np.arange(at, at + rows * length).reshape(rows, length)
        batches.append({"input_ids": ids, "position_ids": ids + 1})
        at += rows * length
    return collect(batches, lambda model, feeds: feeds)


def ids(found: Any) -> list[list[int]]:
    return [row.tolist() for batch in found.batches for row in batch["input_ids"]]


def test_the_last_samples_are_held_out() -> None:
    given = data((4, 3), (4, 3), (4, 3), (4, 3))
    kept, held = split(given)
    assert ids(held) == ids(given)[-2:]
    assert ids(kept) == ids(given)[:-2]
    assert [len(batch["input_ids"]) for batch in kept.batches] == [4, 4, 4, 2]
    assert held.batches[0]["position_ids"].tolist() == [[43, 44, 45], [46, 47, 48]]


@pytest.mark.parametrize("samples,wanted", [(2, 1), (15, 1), (16, 2), (64, 8), (200, 8)])
def test_how_many_are_held_out(samples: int, wanted: int) -> None:
    kept, held = split(data(*[(1, 2)] * samples))
    assert (len(ids(kept)), len(ids(held))) == (samples - wanted, wanted)


def test_one_sample_is_refused() -> None:
    with pytest.raises(InputError, match=r"holds 1 sample.*give at least 2"):
        split(data((1, 8)))


def test_fewer_tokens() -> None:
    given = data((4, 6), (2, 6))
    assert ids(fewer(given, 10, cut=True)) == [[0, 1, 2, 3, 4, 5], [24, 25, 26, 27]]
    assert ids(fewer(given, 6, cut=True)) == [[0, 1, 2, 3, 4, 5]]
    assert ids(fewer(given, 4, cut=True)) == [[0, 1, 2, 3]]
    assert ids(fewer(given, 4, cut=False)) == [[0, 1, 2, 3, 4, 5]]
    assert ids(fewer(given, 1000, cut=True)) == ids(given)
    assert fewer(given, 4, cut=True).batches[0]["position_ids"].tolist() == [[1, 2, 3, 4]]


def test_padding_goes_with_its_sample() -> None:
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    batch = {"input_ids": np.arange(6).reshape(2, 3), "attention_mask": mask}
    given = collect([batch, batch], lambda model, feeds: feeds)
    first, second, *_ = samples_of(given)
    assert first["attention_mask"].tolist() == [[1, 1, 0]]
    assert second["input_ids"].tolist() == [[3, 4, 5]]
    kept, held = split(given)
    assert (kept.tokens, held.tokens) == (7, 3)
