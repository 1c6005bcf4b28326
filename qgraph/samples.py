"""Where samples come from: a text and its tokenizer, files of arrays or tokens, Python."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.feeding import as_samples
from qgraph.text import Sample, read_samples, token_blocks
from qgraph.wording import counted

Data = str | os.PathLike[str] | NDArray[Any] | Iterable[Any]


@dataclasses.dataclass(frozen=True)
class Given:
    """Samples, how many there are (where known), and the tokenizer's vocabulary (0: none)."""

    samples: Iterable[Sample]
    expected: int | None = None
    vocabulary: int = 0


def given_samples(
    data: Data | None,
    text: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
    samples: int,
    sequence: int,
) -> Given:
    """Samples from a text with its tokenizer, or from data: one of the two.

    Raises:
        InputError: neither or both, or something that cannot be read.
        MissingExtra: text without the package tokenizers.
    """
    if (data is None) == (text is None):
        raise InputError("wanted either a text with its tokenizer, or data: one of the two")
    if samples < 1 or sequence < 2:
        raise InputError(
            f"{counted(samples, 'sample')} of {counted(sequence, 'token')}: wanted at least 1 "
            "sample of 2 tokens"
        )
    if text is not None:
        if tokenizer is None:
            raise InputError("a text needs its tokenizer: name the model's tokenizer.json")
        ids, known = token_blocks(Path(text), Path(tokenizer), sequence=sequence, samples=samples)
        return Given(as_samples(ids), len(ids), known)
    if tokenizer is not None:
        raise InputError("data is not tokenized: a tokenizer goes with a text")
    if isinstance(data, str | os.PathLike):
        return Given(read_samples(Path(data), samples))
    return Given(as_samples(data))
