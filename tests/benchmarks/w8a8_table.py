"""What rounded activations cost and gain on SmolLM2-135M: one table by one command.

    python tests/benchmarks/w8a8_table.py --text test.txt --calibrate valid.txt [--blocks N]
        [--rows NAME …] [--out tests/benchmarks/results/w8a8_table.json]

Linears (not the head) with 8-bit weights and rounded activations, head and embedding in float. KL
and perplexity of `--blocks` × 256 tokens. Speed is how many times as fast as float the whole model
runs, one token and a prompt of 256, both without a cache: the sides alternate in one process, the
ratio is that of medians, with the least and the largest of any round. FP8 has no kernels on a CPU:
its rows compute what a GPU would, in floats between QuantizeLinear and DequantizeLinear, and their
speed is that of the simulation. One process a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort

import qgraph
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2

TOKEN, PROMPT = 1, 256
SMOOTH = "smoothquant"
COLUMNS = 8
"""Input columns that stay in float."""
ROWS: dict[str, dict[str, Any]] = {
    "int8, a scale for each tensor": {"activations": "int8"},
    "int8, a scale for each row": {"activations": "int8-row"},
    "int8, static": {"activations": "int8-static"},
    "int8, a scale for each tensor, smoothquant": {"activations": "int8", "solver": SMOOTH},
    "int8, a scale for each row, smoothquant": {"activations": "int8-row", "solver": SMOOTH},
    "int8, static, smoothquant": {"activations": "int8-static", "solver": SMOOTH},
    "int8, a scale for each tensor, float columns": {"activations": "int8", "outliers": COLUMNS},
    "int8, a scale for each row, float columns": {"activations": "int8-row", "outliers": COLUMNS},
    "int8, static, float columns": {"activations": "int8-static", "outliers": COLUMNS},
    "int8, a scale for each row, smoothquant, float columns": {
        "activations": "int8-row", "solver": SMOOTH, "outliers": COLUMNS,
    },
    "int8, static, smoothquant, float columns": {
        "activations": "int8-static", "solver": SMOOTH, "outliers": COLUMNS,
    },
    "int8, a scale for each row where it matters": {"activations": "int8-auto"},
    "int8, a scale for each row where it matters, smoothquant": {
        "activations": "int8-auto", "solver": SMOOTH,
    },
    "int8, a scale for each row where it matters, smoothquant, float columns where they do": {
        "activations": "int8-auto", "solver": SMOOTH, "outliers": COLUMNS,
        "options": {"lower_w8a8.threshold": "4.5"},
    },
    "fp8, static": {"activations": "fp8"},
    "fp8, a scale for each token": {"activations": "fp8-token"},
}  # fmt: skip
_NEED_DATA = ("int8-static", "int8-auto", "fp8")


def measure(source: Path, name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row."""
    options = ROWS[name]
    if options["activations"] in _NEED_DATA or len(options) > 1:
        options = {
            **options, "calibrate": arguments.calibrate, "tokenizer": smollm2.tokenizer(),
            "samples": arguments.samples, "sequence": arguments.sequence,
        }  # fmt: skip
    since = time.perf_counter()
    made = qgraph.optimize(
        source, folder / "o.onnx", embedding="float", exclude="role:head", check=False, **options
    )
    seconds = time.perf_counter() - since
    divergence = qgraph.compare(
        source, made.files[0], text=arguments.text, tokenizer=smollm2.tokenizer(),
        samples=arguments.blocks, sequence=PROMPT, sites=False,
    ).divergence  # fmt: skip
    assert divergence is not None
    linears = [item for item in made.plan.decisions if item.quantized]
    return {
        "kl": divergence.mean,
        "perplexity": divergence.candidate_perplexity,
        "tokens": arguments.blocks * PROMPT,
        "speed": speeds(source, made.files[0], arguments.rounds),
        "kernels": made.report.totals["kernels"],
        "outliers": sum(item.outliers for item in linears) / len(linears),
        "file_mb": sum(path.stat().st_size for path in made.files) / 1e6,
        "seconds": seconds,
    }


def speeds(source: Path, model: Path, rounds: int) -> dict[str, dict[str, float]]:
    """By number of tokens, how many times as fast as `source` a model is, and milliseconds."""
    found = qgraph.bench(model, source, rows=(TOKEN, PROMPT), sites=False, rounds=rounds)
    result = {}
    for row in found.whole:
        mine, reference = row.sides
        ratio = row.ratio(reference)
        result[str(row.rows)] = {
            "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
            "ms": 1e3 * mine.timing.median, "float_ms": 1e3 * reference.timing.median,
        }  # fmt: skip
    return result


def main() -> None:
    """Measure the rows asked for and print them; with --out add them to the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=16, help="of calibration")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of each")
    parser.add_argument("--blocks", type=int, default=20, help="of 256 tokens, for the KL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(ROWS), help="measure this row here, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(smollm2.build(), arguments.one, arguments, Path(folder))
        print(json.dumps(row))
        return
    result: dict[str, Any] = {"rows": {}}
    if arguments.out is not None and arguments.out.exists():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    result |= {
        "date": datetime.date.today().isoformat(),
        "model": smollm2.build().stem,
        "machine": f"{usable_cores()} cores, {cpu_name()}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "calibration": f"{arguments.samples} × {arguments.sequence} tokens",
    }
    for name in arguments.rows:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        result["rows"][name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(json.dumps({name: result["rows"][name]}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
