"""A `DecodeBench`: how fast decoders are at a prompt and after it, as `bench --decode` measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from qgraph._version import __version__
from qgraph.timing import Timing

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peaks of a process of its own in MB: loaded, after the prompt, and at the end."""

    loaded: float
    prompt: float
    end: float


@dataclasses.dataclass(frozen=True)
class DecodeSide:
    """One model.

    prompt: seconds from the prompt to its first token. step: seconds of each token after it, the
    median of a round's. cached: false where every token reads the whole text again.
    shared: past and present are one buffer. memory: None where it was not measured, and for a
    graph in memory.
    """

    name: str
    prompt: Timing
    step: Timing
    cached: bool
    shared: bool
    memory: Memory | None


@dataclasses.dataclass(frozen=True)
class DecodeBench:
    """What `bench --decode` found; the model itself is the first side.

    prompt_tokens, new_tokens: how many were read, and made after it.
    memory: whether it was to be measured.
    """

    target: str
    runtime: str
    cpu: str
    threads: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    sides: tuple[DecodeSide, ...]
    memory: bool = True

    def to_json(self) -> dict[str, Any]:
        """All of it, as schema 1; ratios are of times, over the first side's."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "sides"
        }
        sides = [self._side(side) for side in self.sides]
        return {"schema": SCHEMA, "version": __version__, **fields, "sides": sides}

    def _side(self, side: DecodeSide) -> dict[str, Any]:
        first = self.sides[0]
        return {
            "name": side.name,
            "prompt_tokens_per_second": self.prompt_tokens / side.prompt.median,
            "decode_tokens_per_second": 1 / side.step.median,
            "first_token_ms": 1e3 * side.prompt.median,
            "token_ms": 1e3 * side.step.median,
            "rounds_first_token_ms": [1e3 * each for each in side.prompt.rounds],
            "rounds_token_ms": [1e3 * each for each in side.step.rounds],
            "prompt_ratio": dataclasses.asdict(side.prompt.over(first.prompt)),
            "decode_ratio": dataclasses.asdict(side.step.over(first.step)),
            "cached": side.cached,
            "shared": side.shared,
            "peak_mb": None if side.memory is None else dataclasses.asdict(side.memory),
        }
