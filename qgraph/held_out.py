"""Calibration data in parts: some samples are held out, to judge what was made with the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from qgraph.calibration import Arrays, Calibration
from qgraph.errors import InputError
from qgraph.feeding import Feeder, shortened
from qgraph.text import IDS, MASK, Sample

SHARE = 8
"""One sample of so many is held out, at least one and at most as many as this."""


def split(data: Calibration) -> tuple[Calibration, Calibration]:
    """What is calibrated on, and the last samples, which are held out.

    Raises:
        InputError: there is only one sample.
    """
    rows = [(at, row) for at, batch in enumerate(data.batches) for row in range(rows_in(batch))]
    if len(rows) < 2:
        raise InputError(
            "the calibration data holds 1 sample, and the KL divergence is measured on samples "
            "that are held out: give at least 2 (--samples, or a shorter --sequence)"
        )
    held = rows[-max(1, min(SHARE, len(rows) // SHARE)) :]
    return _picked(data, rows[: -len(held)]), _picked(data, held)


def rows_in(batch: Arrays) -> int:
    """How many samples a batch holds; one where its inputs do not say."""
    sizes = {array.shape[0] if array.ndim else 1 for array in batch.values()}
    return sizes.pop() if len(sizes) == 1 else 1


def _picked(data: Calibration, rows: Sequence[tuple[int, int]]) -> Calibration:
    """The samples `rows`, as (batch, row), in batches as before."""
    batches, masks = [], []
    for at, batch in enumerate(data.batches):
        wanted = [row for number, row in rows if number == at]
        if not wanted:
            continue
        whole = len(wanted) == rows_in(batch)
        mask = data.masks[at]
        batches.append(batch if whole else {name: array[wanted] for name, array in batch.items()})
        masks.append(mask if whole or mask is None else mask[wanted])
    return dataclasses.replace(data, batches=tuple(batches), masks=tuple(masks))


def fewer(data: Calibration, tokens: int, *, cut: bool) -> Calibration:
    """The first samples, up to `tokens` tokens (rows, where the model takes no tokens).

    cut: whether samples may be made shorter.
    """
    batches, masks, left = [], [], tokens
    for batch, mask in zip(data.batches, data.masks, strict=True):
        length = _length(batch)
        share = min(length, max(left, 2)) if cut else length
        rows = min(rows_in(batch), max(1, left // share))
        batches.append({name: _short(array, rows, length, share) for name, array in batch.items()})
        masks.append(None if mask is None else mask[:rows, :share])
        left -= rows * share
        if left <= 0:
            break
    return dataclasses.replace(data, batches=tuple(batches), masks=tuple(masks))


def _length(batch: Arrays) -> int:
    """Tokens in a sample; 1 where there are none."""
    ids = batch.get(IDS)
    if ids is None:
        ids = next((a for a in batch.values() if a.ndim == 2 and a.dtype.kind in "iu"), None)
    return ids.shape[1] if ids is not None and ids.ndim == 2 else 1


def _short(array: np.ndarray, rows: int, length: int, share: int) -> np.ndarray:
    if not array.ndim:
        return array
    tokens = array.ndim == 2 and array.shape[1] == length
    return array[:rows, :share] if tokens else array[:rows]


def beginnings(sample: Sample, feeder: Feeder) -> Iterator[Sample]:
    """A sample of tokens `[1, T]` cut at several lengths: each has a last token of its own.

    Those that would end in padding are left out.
    """
    ids = feeder.ids(sample)
    length = 1 if ids is None else ids.shape[1]
    for end in dict.fromkeys(-(-length * part // SHARE) for part in range(1, SHARE + 1)):
        cut = shortened(sample, feeder, end)
        if MASK not in cut or cut[MASK][:, -1].all():
            yield cut


def samples_of(data: Calibration) -> Iterator[Sample]:
    """Every sample by itself, with a mask where some of its tokens are padding."""
    for batch, mask in zip(data.batches, data.masks, strict=True):
        for row in range(rows_in(batch)):
            sample = {
                name: array[row : row + 1] if array.ndim else array for name, array in batch.items()
            }
            if mask is not None:
                sample[MASK] = mask[row : row + 1].astype(np.int64)
            yield sample
