"""A generation while it runs, and what became of it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qgraph.sampling import Sampler, Sampling
from qgraph.text_stream import TextStream

if TYPE_CHECKING:
    from qgraph.runtimes.decoding import Decoder, Ids

SCHEMA = 1
END, STOP, LENGTH, POSITIONS = "end", "stop", "length", "positions"
"""Why a row ended: a token that ends a text, a stop text, `max_tokens`, or no position left."""
_PAD = 0
"""What is read of rows that have ended, or have not begun; nothing attends to it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of one prompt, and the text that became certain with it, which may be none."""

    row: int
    token: int
    text: str


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be generated.

    prompts: tokens of each. ends: tokens that end a row; positions: how many the model has.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    positions: int | None = None

    def room(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many."""
        left = self.max_tokens if self.positions is None else self.positions - prompt
        return min(self.max_tokens, left)


@dataclasses.dataclass
class Row:
    """One prompt's answer so far. stop: why it ended; "" while it goes on."""

    prompt: tuple[int, ...]
    room: int
    stream: TextStream
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    stop: str = ""


@dataclasses.dataclass
class Timings:
    """Seconds of reading prompts and of all steps after them, without the caller's own time.

    prompt_tokens: read in `prompt_seconds`. steps: tokens made in `step_seconds`, all rows'.
    first_seconds: from the call to the first token.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    first_seconds: float = 0.0

    @property
    def prompt_speed(self) -> float:
        """Tokens of prompts per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def speed(self) -> float:
        """Tokens made per second, those that come with the prompt not counted."""
        return self.steps / self.step_seconds if self.step_seconds else 0.0


class Generation:
    """Yields `Piece`s as they are made; iterate over it, once.

    rows: the answers so far. notes: what a user would not expect.
    """

    def __init__(
        self, decoder: Decoder, encoder: Any, request: Request, notes: Sequence[str] = ()
    ) -> None:
        self._decoder, self._request = decoder, request
        self.notes = list(notes)
        self.timings = Timings()
        self.rows = [
            Row(prompt, request.room(len(prompt)), TextStream(encoder, prompt, request.stops))
            for prompt in request.prompts
        ]
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        """The pieces that have not been taken yet."""
        return self._pieces

    @property
    def text(self) -> str:
        """The first prompt's answer so far."""
        return self.rows[0].text

    @property
    def texts(self) -> list[str]:
        """Every prompt's answer so far."""
        return [row.text for row in self.rows]

    def finish(self) -> Generation:
        """Generate what is left, and return this."""
        for _ in self._pieces:
            pass
        return self

    def to_json(self) -> dict[str, Any]:
        """Answers and speeds, as schema 1; seconds, and tokens per second."""
        times = self.timings
        return {
            "schema": SCHEMA,
            "rows": [
                {
                    "prompt_tokens": len(row.prompt),
                    "tokens": row.tokens,
                    "text": row.text,
                    "stop": row.stop,
                }
                for row in self.rows
            ],
            "prompt_seconds": times.prompt_seconds,
            "prompt_tokens_per_second": times.prompt_speed,
            "first_token_seconds": times.first_seconds,
            "decode_seconds": times.step_seconds,
            "decode_tokens_per_second": times.speed,
            "notes": self.notes,
        }

    def _run(self) -> Iterator[Piece]:
        lengths = {len(row.prompt) for row in self.rows}
        together = self._decoder.io.rows is None and (len(lengths) == 1 or self._decoder.io.pads)
        if together:
            yield from self._batch(range(len(self.rows)))
            return
        self.notes.append("the prompts are read one after another: the model cannot pad them")
        for at in range(len(self.rows)):
            yield from self._batch([at])

    def _batch(self, which: Sequence[int]) -> Iterator[Piece]:
        """All rows of a batch, step by step, until each has ended."""
        rows = {at: self.rows[at] for at in which}
        clock, times = time.perf_counter, self.timings
        since = clock()
        ids, mask = _padded([row.prompt for row in rows.values()])
        sampler = Sampler(self._request.sampling, list(rows))
        logits = self._decoder.start(ids, mask, max(row.room for row in rows.values()))
        times.prompt_seconds += clock() - since
        times.prompt_tokens += sum(len(row.prompt) for row in rows.values())
        for step in itertools.count():
            chosen = sampler.choose(logits)
            pieces = [
                self._add(at, row, int(token))
                for (at, row), token in zip(rows.items(), chosen, strict=True)
                if not row.stop
            ]
            spent = clock() - since
            if step:
                times.steps, times.step_seconds = (
                    times.steps + len(pieces),
                    times.step_seconds + spent,
                )
            else:
                times.first_seconds = times.first_seconds or spent
            yield from pieces
            if all(row.stop for row in rows.values()):
                return
            since = clock()
            logits = self._decoder.step(_going_on(rows, chosen))

    def _add(self, at: int, row: Row, token: int) -> Piece:
        row.tokens.append(token)
        text = "" if token in self._request.ends else row.stream.add(token)
        row.stop = self._stop(row, token)
        if row.stop:
            text += row.stream.finish()
        row.text += text
        return Piece(at, token, text)

    def _stop(self, row: Row, token: int) -> str:
        if token in self._request.ends:
            return END
        if row.stream.stopped:
            return STOP
        if len(row.tokens) < row.room:
            return ""
        return LENGTH if row.room == self._request.max_tokens else POSITIONS


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Ids, Ids | None]:
    """Ids `[B, T]` with padding on the left, and the mask `[B, T]`; None without padding."""
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), _PAD, np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for at, prompt in enumerate(prompts):
        ids[at, longest - len(prompt) :] = prompt
        mask[at, longest - len(prompt) :] = 1
    return ids, None if mask.all() else mask


def _going_on(rows: dict[int, Row], chosen: Ids) -> Ids:
    """The tokens to read next; padding for rows that have ended."""
    ended = np.array([bool(row.stop) for row in rows.values()])
    return np.where(ended, _PAD, chosen)
