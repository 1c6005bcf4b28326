"""`bench --decode`: how fast models read a prompt and go on from it, side by side in one run."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qgraph import registry
from qgraph.benching import LEAST_ROUNDS, side_names
from qgraph.capturing import Source, runnable
from qgraph.decode_result import DecodeBench, DecodeSide, Memory
from qgraph.decoders import open_decoder
from qgraph.errors import InputError
from qgraph.language_model import ANY
from qgraph.machine import STATUS, cpu_name, peak_rss
from qgraph.progress import Progress, Silent
from qgraph.timing import Timing
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime
    from qgraph.runtimes.decoding import Decoder, Ids

PROMPT, TOKENS = 256, 64


def bench_decode(
    model: Source,
    against: Sequence[Source] = (),
    *,
    prompt_tokens: int = PROMPT,
    new_tokens: int = TOKENS,
    rounds: int = 5,
    threads: int = 0,
    memory: bool = True,
    target: str = "ort-cpu",
    progress: Progress | None = None,
) -> DecodeBench:
    """Measure how fast decoders read a prompt and make tokens after it, greedily.

    All sides run in this process, turn by turn, each on the same prompt of random tokens; each
    has a round to warm up. Peak memory is that of a process of its own, for a model in a file;
    without `memory` these do not run.

    Raises:
        InputError: no decoder, or a number that makes no sense.
        MissingExtra: the runtime is not installed.
    """
    if prompt_tokens < 1 or new_tokens < 1:
        raise InputError(
            f"{counted(prompt_tokens, 'token')} of a prompt, {new_tokens} after it: wanted 1 or "
            "more of each"
        )
    if rounds < LEAST_ROUNDS or threads < 0:
        raise InputError(
            f"{counted(rounds, 'round')} on {counted(threads, 'thread')}: wanted {LEAST_ROUNDS} "
            "rounds or more, and threads of 1 and more, or 0 for the runtime's own choice"
        )
    runtime: Runtime = registry.load("target", target)
    steps = progress or Silent()
    steps.stage("loading the models")
    sources = [runnable(each) for each in (model, *against)]
    opened = [open_decoder(runtime, source, threads) for source in sources]
    vocabulary = min((each.vocabulary or ANY for each in opened), default=ANY)
    for name, each in zip(names := side_names([model, *against]), opened, strict=True):
        if each.positions is not None and prompt_tokens + new_tokens > each.positions:
            raise InputError(
                f"{name} has {counted(each.positions, 'position')}, and {prompt_tokens} + "
                f"{new_tokens} tokens need more: measure fewer"
            )
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, prompt_tokens))
    steps.stage("measuring", total=rounds + 1)
    taken: list[list[_Turn]] = [[] for _ in opened]
    order = list(range(len(opened)))
    for at in range(rounds + 1):
        for side in order:
            turn = _turn(opened[side].decoder, ids, new_tokens)
            taken[side] += [turn] if at else []
        order = [*order[1:], *order[:1]]
        steps.advance(at + 1)
    peaks: list[Memory | None] = [None] * len(sources)
    if memory:
        steps.stage("measuring memory (--no-memory leaves it out)", total=len(sources))
        for at, source in enumerate(sources):
            peaks[at] = _memory(source, prompt_tokens, new_tokens, target, threads)
            steps.advance(at + 1)
    steps.finish()
    sides = tuple(
        DecodeSide(
            name,
            Timing(tuple(turn.prompt for turn in turns)),
            Timing(tuple(turn.step for turn in turns)),
            bool(each.decoder.io.cache),
            each.decoder.shared,
            peak,
        )
        for name, turns, each, peak in zip(names, taken, opened, peaks, strict=True)
    )
    return DecodeBench(
        target, runtime.capabilities().runtime, cpu_name(), threads, rounds, prompt_tokens,
        new_tokens, sides, memory,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Seconds of a prompt and its first token, and the median of those of each token after."""

    prompt: float
    step: float


def _turn(decoder: Decoder, ids: Ids, new_tokens: int) -> _Turn:
    clock = time.perf_counter
    since = clock()
    token = decoder.start(ids, room=new_tokens).argmax(-1)
    prompt = clock() - since
    taken = []
    for _ in range(new_tokens):
        since = clock()
        token = decoder.step(token).argmax(-1)
        taken.append(clock() - since)
    return _Turn(prompt, statistics.median(taken))


def _memory(
    source: object, prompt_tokens: int, new_tokens: int, target: str, threads: int
) -> Memory | None:
    """The peaks of a process that does the same once; None where they cannot be had."""
    if not isinstance(source, Path) or not STATUS.is_file():
        return None
    numbers = map(str, (prompt_tokens, new_tokens, threads))
    command = [sys.executable, "-m", "qgraph.decode_bench", os.path.abspath(source), target]
    done = subprocess.run([*command, *numbers], capture_output=True, text=True, check=False)
    return Memory(**json.loads(done.stdout)) if done.returncode == 0 else None


def _main(model: str, target: str, prompt: str, new: str, threads: str) -> None:
    """Load, read a prompt, decode; print the peaks, in MB, as JSON."""
    runtime: Runtime = registry.load("target", target)
    opened = open_decoder(runtime, Path(model), int(threads))
    peaks = [peak_rss()]
    ids = np.random.default_rng(0).integers(0, opened.vocabulary or ANY, (1, int(prompt)))
    token = opened.decoder.start(ids, room=int(new)).argmax(-1)
    peaks.append(peak_rss())
    for _ in range(int(new)):
        token = opened.decoder.step(token).argmax(-1)
    peaks.append(peak_rss())
    names = [field.name for field in dataclasses.fields(Memory)]
    sys.stdout.write(json.dumps({name: n / 1e6 for name, n in zip(names, peaks, strict=True)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
