"""The executor on float SmolLM2 beside its eager module: agreement, and time once compiled.

python tests/benchmarks/torch_executor.py [--variants plain,default,past] [--rounds N] [--out FILE]

Prints JSON. Per variant of the ONNX file: the relative error of the logits, and the ratio of
medians of the compiled executor to the eager module at 32 tokens and at one (`past`: one token
after a cache of 32). Each side has a process of its own, both stay alive, and rounds alternate.
Needs a C++ compiler, as torch.compile does; `--no-compile` times the executor as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from peak import peak_mb

TOKENS, PAST = 32, 32
CACHE = "cache.npz"
VOCABULARY = 49152


def feeds(variant: str, length: int, folder: Path) -> list[Any]:
    """The same inputs on both sides, by position; the cache is what the eager side left there."""
    import torch

    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=draw)
    if variant != "past":
        return [ids]
    mask = torch.ones(1, PAST + length, dtype=torch.int64)
    places = torch.arange(PAST, PAST + length)[None]
    kept = np.load(folder / CACHE)
    return [ids, mask, places, *(torch.from_numpy(kept[name]) for name in kept.files)]


def eager_side(variant: str, folder: Path) -> Any:
    """The module, called with the graph's inputs; `past`: it leaves a cache of PAST tokens."""
    import torch

    from qgraph.models import smollm2

    module = smollm2.load()
    if variant == "past":
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (1, PAST), generator=draw)
        empty = torch.zeros(1, module.config.num_key_value_heads, 0, module.config.head_dim)
        layers = module.config.num_hidden_layers
        with torch.inference_mode():
            made = module(ids, past_key_values=[[empty, empty] for _ in range(layers)])
        # Numbered by position: load gives them back in this order.
        np.savez(folder / CACHE, *(part.numpy() for part in made[1:]))

    def call(ids: Any, mask: Any = None, places: Any = None, *cache: Any) -> Any:
        past = [list(cache[i : i + 2]) for i in range(0, len(cache), 2)] or None
        return module(ids, mask, places, past)

    return call


def executor_side(variant: str, compiled: bool) -> Any:
    """The executor's module of the ONNX file."""
    import torch

    from qgraph.capturing import capture
    from qgraph.models import smollm2
    from qgraph.runtimes.torch.executor import build

    path = smollm2.build(variant=variant)
    module = build(capture(path).model)
    return torch.compile(module, fullgraph=True, dynamic=True) if compiled else module


def serve(side: str, variant: str, threads: int, folder: Path) -> None:
    """Answer each line of standard input, a length, with the seconds of one call; the first call
    of a length also writes its logits.
    """
    import torch

    torch.set_num_threads(threads)
    since = time.perf_counter()
    call = (
        eager_side(variant, folder)
        if side == "eager"
        else executor_side(variant, side == "compiled")
    )
    print(json.dumps({"load_seconds": time.perf_counter() - since, "peak_mb": peak_mb()}))
    sys.stdout.flush()
    for line in sys.stdin:
        length, save = json.loads(line)
        given = feeds(variant, length, folder)
        with torch.inference_mode():
            since = time.perf_counter()
            logits = call(*given)[0]
            seconds = time.perf_counter() - since
        if save:
            np.save(folder / f"{side}-{length}.npy", logits.numpy())
        print(json.dumps(seconds))
        sys.stdout.flush()


class Side:
    """A process that serves."""

    def __init__(self, side: str, variant: str, threads: int, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", side, "--variants", variant]
        command += ["--threads", str(threads), "--folder", str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.name = side
        self.loaded = self._read()

    def run(self, length: int, save: bool = False) -> float:
        """Seconds of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([length, save]) + "\n")
        self.process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name} ended with {self.process.wait()}")
        return json.loads(line)


def measure(variant: str, rounds: int, threads: int, compiled: bool, folder: Path) -> Any:
    """One variant: agreement and times at each length."""
    theirs, ours = (  # in this order: the cache is the eager side's
        Side(side, variant, threads, folder)
        for side in ("eager", "compiled" if compiled else "executor")
    )
    result: dict[str, Any] = {"executor": ours.loaded, "eager": theirs.loaded}
    for length in (TOKENS, 1):
        first = ours.run(length, save=True)
        theirs.run(length, save=True)
        for side in (ours, theirs):
            side.run(length)
        times = [(ours.run(length), theirs.run(length)) for _ in range(rounds)]
        mine, other = (statistics.median(column) for column in zip(*times, strict=True))
        found, wanted = (np.load(folder / f"{s.name}-{length}.npy") for s in (ours, theirs))
        result[f"{length} tokens"] = {
            "relative_error": float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)),
            "largest_error": float(np.abs(found - wanted).max() / np.abs(wanted).max()),
            "first_call_seconds": first,
            "executor_ms": 1e3 * mine,
            "eager_ms": 1e3 * other,
            "ratio": mine / other,
            "ratio_of_best": min(t[0] for t in times) / min(t[1] for t in times),
        }
    ours.close()
    theirs.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default="plain,default,past")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve, chosen.variants, chosen.threads, chosen.folder)
        return
    import tempfile

    import torch

    found: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    found |= {"machine": platform.machine(), "torch": torch.__version__, "threads": chosen.threads}
    found["compiled"] = not chosen.no_compile
    with tempfile.TemporaryDirectory() as folder:
        for variant in chosen.variants.split(","):
            found[variant] = measure(
                variant, chosen.rounds, chosen.threads, not chosen.no_compile, Path(folder)
            )
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
