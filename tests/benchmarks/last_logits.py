"""What a prompt of SmolLM2-135M gains where its head gives the last token's logits alone.

    python tests/benchmarks/last_logits.py --out tests/benchmarks/results/last_logits.json

Both files are `optimize --int4-groups 64` of the export with past_key_values, one with
`--last-logits`, and run as any user of ONNX Runtime runs them: `InferenceSession.run` on the whole
prompt, its cache empty. One process, the sides turn by turn; ratios of medians, with the range over
the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import qgraph
from qgraph.feeding import Feeder
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2
from qgraph.runtimes.ort import CPU


def made(folder: Path) -> dict[str, Path]:
    """The two files."""
    source = smollm2.build(variant="past")
    found = {"all": folder / "all.onnx", "last": folder / "last.onnx"}
    for name, path in found.items():
        qgraph.optimize(source, path, group=64, last_logits=name == "last")
    return found


def measured(models: dict[str, Path], tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Median seconds of each, and how many times as long as the last logits all of them take."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = {name: ort.InferenceSession(path, options) for name, path in models.items()}
    ids = np.random.default_rng(0).integers(0, 49152, (1, tokens))
    path = models["all"]
    feeds = Feeder(CPU, path, CPU.inputs(path)).feeds({"input_ids": ids})
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for at in range(rounds + 1):  # the first warms up
        for name in (*sessions,) if at % 2 else (*reversed(sessions),):
            start = time.perf_counter()
            sessions[name].run(None, feeds)
            if at:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["all"], seconds["last"], strict=True)]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = [medians["all"] / medians["last"], min(ratios), max(ratios)]
    return {"tokens": tokens, "seconds": medians, "all_over_last": ratio}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(made(Path(folder)), given.tokens, given.rounds, given.threads)
    content = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "onnxruntime": ort.__version__,
        "rounds": given.rounds,
        "threads": given.threads,
        **found,
    }
    text = json.dumps(content, indent=1) + "\n"
    print(text, end="")
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
