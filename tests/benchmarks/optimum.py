"""SmolLM2-135M as Optimum exports it beside the project's own export, one command.

    python tests/benchmarks/optimum.py --optimum FOLDER --out tests/benchmarks/results/optimum.json

The folder is what `optimum-cli export onnx --model HF --task text-generation-with-past FOLDER`
made of the same weights (package optimum-onnx, in an environment of its own: it needs an older
transformers, which reads `rope_theta` from config.json: where that has `rope_parameters` alone,
write it beside). Both exports go through the same `optimize`, at the format of `decode.py`, with
int8 activations and without; then both decode the same prompt in one process, step by step in turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from decode import FORMAT, megabytes, scores
from decode_loop import Loop

import qgraph
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2

SIDES = ("export", "optimum")
PROMPT, HEAD_SIZE = 64, 64


def optimized(sources: dict[str, Path], folder: Path, level: str) -> dict[str, Path]:
    """Both sides, by one recipe; files that are there are taken."""
    made = {}
    for side, source in sources.items():
        made[side] = folder / f"{side}-{level}.onnx"
        options = {"format": FORMAT, "embedding": FORMAT, "accuracy_level": level}
        if not made[side].exists():
            qgraph.optimize(source, made[side], **options)
    return made


def operators(model: Path) -> dict[str, int]:
    """How many of each operator of ONNX Runtime's own there are, and of all nodes."""
    nodes = list(ir.load(model.absolute()).graph)
    fused = Counter(
        node.op_type for node in nodes if node.domain or "LayerNormalization" in node.op_type
    )
    return {**dict(sorted(fused.items())), "nodes": len(nodes)}


def in_turn(models: dict[str, Path], new: int, rounds: int) -> dict[str, Any]:
    """Greedy text after one prompt, a step of each side at a time."""
    loops = {side: Loop(str(path), PROMPT + new, True, 0) for side, path in models.items()}
    ids = np.random.default_rng(0).integers(3, 1000, (1, PROMPT))
    steps: dict[str, list[float]] = {side: [] for side in loops}
    texts: dict[str, list[int]] = {}
    medians: dict[str, list[float]] = {side: [] for side in loops}
    for _ in range(rounds):
        for side, loop in loops.items():
            loop.clear()
            texts[side] = [loop.step(ids)]
        for at in range(new):
            for side in SIDES if at % 2 else SIDES[::-1]:
                since = time.perf_counter()
                texts[side].append(loops[side].step(np.array([[texts[side][-1]]])))
                steps[side].append(1e3 * (time.perf_counter() - since))
        for side, values in steps.items():
            medians[side].append(statistics.median(values[-new:]))
    ratios = [a / b for a, b in zip(*(medians[side] for side in SIDES), strict=True)]
    ours, theirs = (statistics.median(steps[side]) for side in SIDES)
    ours, theirs = (statistics.median(steps[side]) for side in SIDES)
    equal = sum(a == b for a, b in zip(*(texts[side] for side in SIDES), strict=True))
    return {
        "step_ms": {"export": ours, "optimum": theirs},
        "optimum_speed_over_export": {
            "value": ours / theirs, "low": min(ratios), "high": max(ratios),
        },
        "equal_greedy_tokens": [equal, new + 1],
    }  # fmt: skip


def differing(models: dict[str, Path]) -> float:
    """The largest difference of a logit of one text, relative to the largest logit."""
    ids = np.random.default_rng(1).integers(3, 1000, (1, 2 * PROMPT))
    first, second = (scores(str(models[side]), ids, HEAD_SIZE) for side in SIDES)
    return float(np.abs(first - second).max() / np.abs(first).max())


def main() -> None:
    """Optimize both, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimum", required=True, type=Path, help="the folder of its export")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens of a round")
    parser.add_argument(
        "--keep", type=Path, help="a folder for what is optimized, to measure again"
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sources = {
        "export": smollm2.build(variant="past"),
        "optimum": asked.optimum / "model.onnx",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = asked.keep or Path(name)
        exact, fast = (optimized(sources, folder, level) for level in ("0", "auto"))
        found = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "onnxruntime": ort.__version__,
            "file_mb": {side: megabytes(path) for side, path in fast.items()},
            "operators": {side: operators(path) for side, path in fast.items()},
            "logits_differ_at_level_0": differing(exact),
            "decode": in_turn(fast, asked.new, asked.rounds),
        }
    text = json.dumps(found, indent=2) + "\n"
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
