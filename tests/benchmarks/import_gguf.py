"""The SmolLM2-135M GGUF file (Q4_1 linears, Q8_0 tied embedding) imported onto its ONNX graph.

    python tests/benchmarks/import_gguf.py --text wikitext2-test.txt \
        --out tests/benchmarks/results/import_gguf.json

Parts: time, memory and size of the command, at accuracy levels 0 and 4; ops, block sums and blobs
of the files; the GGUF file that `export --like` makes of the imported one, beside the first; KL
divergence from the float model that the file dequantizes to; and the time of one token beside the
file that `optimize --int4-groups 64` makes, one process per side and round, the sides alternating.
`met` says which of the figures that the import is to reach it reached; the exit status is 1 where
one was not.
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

import gguf
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
    sums = {n.output[0] for n in graph.node if n.op_type == "ReduceSum" and "/sums_" in n.name}
    added = [n for n in graph.node if n.op_type == "MatMul" and n.input[0] in sums]
    return {
        "ops": dict(Counter(node.op_type for node in graph.node).most_common(8)),
        "matmulnbits": len(fused),
        "with_zero_points": zeros,
        "block_sums": len(sums),
        "products_of_block_sums": len(added),
        "blobs_of_the_table": sum(int(np.prod(item.dims)) == table for item in graph.initializer),
    }


def written(imported: Path, source: Path, folder: Path) -> dict[str, Any]:
    """The imported graph as a GGUF file again, and how many tensors and fields are the first's."""
    out = folder / "again.gguf"
    words = ["export", imported, "--layout", "gguf", "--like", source, "-o", out, "--quiet"]
    since = time.perf_counter()
    subprocess.run([sys.executable, "-m", "qgraph", *map(str, words)], check=True)
    seconds = time.perf_counter() - since
    first, second = gguf.GGUFReader(source), gguf.GGUFReader(out)
    pairs = zip(first.tensors, second.tensors, strict=True)
    same = [a.name == b.name and np.array_equal(a.data, b.data) for a, b in pairs]
    fields = [
        name in second.fields and second.fields[name].contents() == field.contents()
        for name, field in first.fields.items()
    ]
    return {
        "seconds": round(seconds, 2),
        "file_mb": round(out.stat().st_size / 1e6, 2),
        "equal_tensors": [sum(same), len(same)],
        "equal_fields": [sum(fields), len(fields)],
    }


def met(found: dict[str, Any]) -> dict[str, bool]:
    """Which of the figures that the import is to reach it reached."""
    ships, level0 = found["commands"]["level4"], found["files"]["level0"]
    kept = ("matmulnbits", "with_zero_points", "products_of_block_sums", "blobs_of_the_table")
    same, tensors = found["written"]["equal_tensors"]
    return {
        "211 of 211 linears on MatMulNBits, 210 with block sums, one blob of the table": all(
            [file[name] for name in kept] == [211, 0, 210, 1]
            for file in (level0, found["files"]["level4"])
        ),
        "block sums shared": level0["block_sums"] < level0["products_of_block_sums"],
        "KL at level 0 at most 1e-5": abs(found["kl"]["level0"]["mean"]) <= 1e-5,
        "peak below 500 MB": ships["peak_mb"] < 500,
        "below 20 s": ships["seconds"] < 20,
        "written again to the byte": same == tensors,
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
        again = written(files["level4"], source, Path(folder))
        sides = {name: files[name] for name in ("level0", "level4", "int4")}
        return {
            "date": datetime.date.today().isoformat(),
            "machine": {"cpus": os.cpu_count(), "processor": platform.processor()},
            "onnxruntime": ort.__version__,
            "commands": runs,
            "written": again,
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
    if given.text is None:
        parser.error("--text FILE is what the divergence is measured on")
    found = measure(given)
    found["met"] = met(found)
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    if not all(found["met"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
