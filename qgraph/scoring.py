"""Scores of two models over samples: of their logits where they give them, else of all outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgraph.comparison import Comparison, OutputRow
from qgraph.divergence import Divergences
from qgraph.errors import InputError
from qgraph.output_error import OutputError
from qgraph.paired import FLOATS, Pair, logits_output
from qgraph.progress import Progress
from qgraph.text import Sample
from qgraph.tokenizer_fit import check_token, check_tokenizer, small_tokenizer, vocabulary_of

KEPT = 4
"""Samples that are handed back, for a second look at the sites."""
_OWNERS = "the models'"


class Scoring:
    """Scores of all samples: of logits where both models give them, else of every output."""

    def __init__(self, pair: Pair, llama_cpp: bool) -> None:
        self.pair, self.second_half = pair, llama_cpp
        self.logits = self._find_logits()
        self.vocabulary = self._common_vocabulary()
        tables = (vocabulary_of(side.model, side.feeder.tokens) for side in pair.sides)
        self.known = min((size for size in (self.vocabulary, *tables) if size), default=0)
        self.scores = Divergences(llama_cpp)
        self.outputs = {} if self.logits else self._shared_outputs()
        self.samples, self.tokens = 0, 0
        self.of_last = False

    def _find_logits(self) -> tuple[str, str] | None:
        found = [logits_output(side) for side in self.pair.sides]
        if None in found:
            if any(found):
                which = self.pair.sides[found.index(None)]
                raise InputError(f"{which.title} gives no logits of a vocabulary, the other does")
            return None
        first, second = found
        assert first is not None and second is not None
        return first, second

    def _common_vocabulary(self) -> int:
        """The vocabulary's size where a model states it, else 0."""
        if self.logits is None:
            return 0
        sizes = [
            next(spec.shape[-1] for spec in side.outputs if spec.name == name)
            for side, name in zip(self.pair.sides, self.logits, strict=True)
        ]
        stated = [size for size in sizes if isinstance(size, int)]
        if len(set(stated)) > 1:
            raise _vocabularies_differ(stated[0], stated[1])
        return stated[0] if stated else 0

    def _shared_outputs(self) -> dict[str, OutputError]:
        names = [
            [spec.name for spec in side.outputs if spec.dtype in FLOATS] for side in self.pair.sides
        ]
        shared = [name for name in names[0] if name in names[1]]
        if not shared:
            raise InputError(
                "the two models share no float output: the reference gives "
                f"{', '.join(names[0]) or 'none'}, the candidate {', '.join(names[1]) or 'none'}"
            )
        return {name: OutputError() for name in shared}

    def check_tokenizer(self, known: int) -> tuple[str, ...]:
        """Refuse a tokenizer that knows more tokens than the models; a note on a small one."""
        check_tokenizer(known, self.known, _OWNERS)
        return small_tokenizer(known, self.known, _OWNERS)

    def all(self, samples: Iterable[Sample], steps: Progress) -> list[Sample]:
        """Score every sample; the first few are handed back."""
        first: list[Sample] = []
        for sample in samples:
            self._add(sample)
            if len(first) < KEPT:
                first.append(sample)
            steps.advance(self.samples)
        if not self.samples:
            raise InputError("the data holds no samples")
        return first

    def _add(self, sample: Sample) -> None:
        self.pair.reference.feeder.check_names(sample)
        ids, mask = self.pair.ids_and_mask(sample)
        self.samples += 1 if ids is None else len(ids)
        self.tokens += 0 if ids is None else ids.size
        if self.logits is None:
            if ids is not None and ids.size and ids.min() >= 0:  # what is below, feeders refuse
                check_token(int(ids.max()), self.known, _OWNERS)
            found = [side.run(sample) for side in self.pair.sides]
            for name, error in self.outputs.items():
                _add_output(error, name, found[0][name], found[1][name], mask)
            return
        if ids is None:
            raise InputError("a sample has no token ids [rows, tokens]")
        self._check_ids(ids)
        logits = [
            side.run(sample)[name] for side, name in zip(self.pair.sides, self.logits, strict=True)
        ]
        logits, ids, mask = self._of_tokens(logits, ids, mask)
        for row in range(len(ids)):
            kept = None if mask is None else mask[row]
            self.scores.add(logits[0][row], logits[1][row], ids[row], kept)

    def _check_ids(self, ids: NDArray[np.int64]) -> None:
        if not ids.size:
            raise InputError("a sample is empty")
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        check_token(worst, self.known or self.vocabulary, _OWNERS)

    def _of_tokens(
        self, logits: list[NDArray[Any]], ids: NDArray[np.int64], mask: NDArray[np.bool_] | None
    ) -> tuple[list[NDArray[Any]], NDArray[np.int64], NDArray[np.bool_] | None]:
        """Logits of the same tokens `[rows, T]` of both, these tokens, and which are no padding.

        Where a side gives those of the last token alone, they are the last ones of the other.
        """
        last = [array.shape[:-1] == (len(ids), 1) != ids.shape for array in logits]
        if any(last):
            self._check_last(self.pair.sides[last.index(True)].title, mask)
            ids, mask = ids[:, -1:], None
            logits = [
                array if is_last else array[:, -1:]
                for array, is_last in zip(logits, last, strict=True)
            ]
        self._check_logits(logits, ids)
        return logits, ids, mask

    def _check_last(self, title: str, mask: NDArray[np.bool_] | None) -> None:
        if self.second_half:
            raise InputError(
                f"{title} gives the logits of the last token alone, and llama.cpp's scores are of "
                "predictions of the tokens that follow: leave --llama-cpp out"
            )
        if mask is not None and not mask[:, -1].all():
            raise InputError(
                f"{title} gives the logits of the last token alone, which is padding in a sample: "
                "put the padding in front of the tokens"
            )
        self.of_last = True

    def _check_logits(self, logits: Sequence[NDArray[Any]], ids: NDArray[np.int64]) -> None:
        for side, array in zip(self.pair.sides, logits, strict=True):
            if array.shape[:-1] != ids.shape:
                raise InputError(
                    f"{side.title} gives logits {list(array.shape)} for tokens {list(ids.shape)}: "
                    "wanted one distribution a token"
                )
        if logits[0].shape != logits[1].shape:
            raise _vocabularies_differ(logits[0].shape[-1], logits[1].shape[-1])
        self.vocabulary = logits[0].shape[-1]
        if ids.max() >= self.vocabulary:
            self._check_ids(ids)

    def result(self, target: str) -> Comparison:
        """What was found."""
        divergence = self.scores.result() if self.logits is not None else None
        notes = []
        if divergence is not None and self.of_last:
            notes.append(
                "the logits are of the last token of each sample alone: one position a sample is "
                "scored, and none is predicted; more of them (--samples) say more"
            )
        if divergence is not None and not math.isfinite(divergence.mean):
            notes.append(
                "the divergence is not finite: logits are NaN, or the candidate excludes tokens "
                "that the reference does not"
            )
        return Comparison(
            reference=self.pair.reference.title,
            candidate=self.pair.candidate.title,
            target=target,
            samples=self.samples,
            tokens=self.tokens,
            second_half=self.second_half,
            divergence=divergence,
            outputs=tuple(
                OutputRow(name, each.error, each.cosine, each.worst_cosine)
                for name, each in self.outputs.items()
            ),
            notes=tuple(notes),
        )


def _vocabularies_differ(first: int, second: int) -> InputError:
    return InputError(
        f"the reference has a vocabulary of {first}, the candidate one of {second}: "
        "compare models of one kind"
    )


def _add_output(
    error: OutputError, name: str, first: NDArray[Any], second: NDArray[Any], mask: Any
) -> None:
    try:
        error.add(first, second, mask)
    except InputError as differing:
        raise InputError(f"output {name}: {differing}") from None
