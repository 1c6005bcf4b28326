"""The SmolLM2-135M GGUF file (Q4_1 linears, Q8_0 tied embedding) imported onto its ONNX graph.

    python tests/benchmarks/import_gguf.py --text wikitext2-test.txt \
        --out tests/benchmarks/results/import_gguf.json

Parts: time, memory and size of the command, at accuracy levels 0 and 4; ops and blobs of the
files; KL divergence from the float model that the file dequantizes to; and the time of one token
beside the file that `optimize --int4-groups 64` makes, one process per side and round, the sides
alternating.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import qgraph
from qgraph.models import smollm2

VOCABULARY, WIDTH = 49152, 576


def command(*arguments: object) -> dict[str, Any]:
    """Run `qgraph ARGUMENTS --report …`: seconds, peak MB, bytes of the files."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        words = [str(word) for word in (*arguments, "--report", report.name, "--quiet", "--force")]
        since = time.perf_counter()
        subprocess.run([sys.executable, "-m", "qgraph", *words], check=True)
        seconds = time.perf_counter() - since
        totals = json.loads(Path(report.name).read_text())["totals"]
    return {
        "seconds": round(seconds, 2),
        "peak_mb": round(totals["peak_rss_bytes"] / 1e6, 1),
        "file_mb": round(sum(file["bytes"] for file in totals["files"]) / 1e6, 2),
        "linears": [totals["linears_quantized"], totals["linears"]],
    }


def contents(path: Path) -> dict[str, Any]:
    """Ops of a file; which of its MatMulNBits have zero points; blobs of the table's size."""
    graph = onnx.load(path, load_external_data=False).graph
    fused = [node for node in graph.node if node.op_type == "MatMulNBits"]
    zeros = sum(len(node.input) > 3 and bool(node.input[3]) for node in fused)
    table = VOCABULARY * WIDTH
    return {
        "ops": dict(Counter(node.op_type for node in graph.node).most_common(8)),
        "matmulnbits": len(fused),
        "with_zero_points": zeros,
        "blobs_of_the_table": sum(int(np.prod(item.dims)) == table for item in graph.initializer),
    }


def divergence(reference: Path, candidate: Path, given: argparse.Namespace) -> dict[str, float]:
    """KL from the float model, in nats a token."""
    found = qgraph.compare(
        reference,
        candidate,
        text=given.text,
        tokenizer=smollm2.tokenizer(),
        samples=given.samples,
        sequence=given.sequence,
        sites=False,
    ).divergence
    assert found is not None
    return {"mean": found.mean, "p99": found.p99, "maximum": found.maximum, "top1": found.top1}


def one_token(path: Path, runs: int) -> None:
    """Print the median milliseconds of a run on one token."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    times = []
    for index in range(runs + 5):
        feeds = {"input_ids": np.array([[index]], np.int64)}
        since = time.perf_counter()
        session.run(None, feeds)
        times.append(1e3 * (time.perf_counter() - since))
    print(json.dumps(statistics.median(times[5:])))


def decoding(sides: dict[str, Path], rounds: int, runs: int) -> dict[str, Any]:
    """Milliseconds of one token, median and range over the rounds."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            words = [sys.executable, __file__, "--one-token", str(sides[name]), "--runs", str(runs)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[name].append(float(done.stdout))
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {
        name: {
            "ms": round(medians[name], 3),
            "range": [round(min(times), 3), round(max(times), 3)],
            "tokens_per_second_of_int4": round(medians["int4"] / medians[name], 3),
        }
        for name, times in found.items()
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    source, model = smollm2.source(), smollm2.build(variant="plain")
    with tempfile.TemporaryDirectory() as folder:
        names = ("level0", "level4", "int4", "default")
        files = {name: Path(folder, f"{name}.onnx") for name in names}
        runs = {
            "level0": command("import", source, model, "-o", files["level0"],
                              "--accuracy-level", 0),
            "level4": command("import", source, model, "-o", files["level4"]),
            "default export": command("import", source, smollm2.build(), "-o", files["default"]),
            "int4": command("optimize", model, "-o", files["int4"], "--int4-groups", 64),
        }  # fmt: skip
        sides = {name: files[name] for name in ("level0", "level4", "int4")}
        return {
            "date": datetime.date.today().isoformat(),
            "machine": {"cpus": os.cpu_count(), "processor": platform.processor()},
            "onnxruntime": ort.__version__,
            "commands": runs,
            "files": {name: contents(files[name]) for name in ("level0", "level4", "default")},
            "kl": {name: divergence(model, path, given) for name, path in sides.items()},
            "one_token": decoding({"float": model, **sides}, given.rounds, given.runs),
        }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--one-token", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one_token is not None:
        one_token(given.one_token, given.runs)
        return
    found = json.dumps(measure(given), indent=1)
    print(found)
    if given.out is not None:
        given.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
