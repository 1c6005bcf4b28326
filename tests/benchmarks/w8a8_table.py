"""What rounded activations cost and gain on SmolLM2-135M: one table by one command.

    python tests/benchmarks/w8a8_table.py --text test.txt --calibrate valid.txt [--blocks N]
        [--rows NAME …] [--models FOLDER] [--out tests/benchmarks/results/w8a8_table.json]

Linears (not the head) with 8-bit weights and rounded activations, head and embedding in float. KL
and perplexity of `--blocks` × 256 tokens. Speed is how many times as fast as float the whole model
runs, one token and a prompt of 256, both without a cache: the sides alternate in one process, the
ratio is that of medians, with the least and the largest of any round. FP8 has no kernels on a CPU:
its rows compute what a GPU would, in floats between QuantizeLinear and DequantizeLinear, and their
speed is that of the simulation. One process a row. All models are made first, then timed: with
--models they stay, and `--only make` and `--only time` run one half, the latter on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort
from table_file import apart, keep, rows_of

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


def model(folder: Path, name: str) -> Path:
    """Where a row's model lies."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', name)}.onnx"


def measure(source: Path, name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row but for its speed; the model stays in `folder`."""
    options = ROWS[name]
    if options["activations"] in _NEED_DATA or len(options) > 1:
        options = {
            **options, "calibrate": arguments.calibrate, "tokenizer": smollm2.tokenizer(),
            "samples": arguments.samples, "sequence": arguments.sequence,
        }  # fmt: skip
    since = time.perf_counter()
    made = qgraph.optimize(
        source, model(folder, name), embedding="float", exclude="role:head", check=False,
        force=True, **options
    )  # fmt: skip
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


def one(arguments: argparse.Namespace) -> Any:
    """A half of one row."""
    if arguments.only == "make":
        return measure(smollm2.build(), arguments.one, arguments, arguments.models)
    return speeds(smollm2.build(), model(arguments.models, arguments.one), arguments.rounds)


def table(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every row asked for, added to those of the result file."""
    result: dict[str, Any] = {
        "rows": rows_of(arguments.out),
        "date": datetime.date.today().isoformat(),
        "model": smollm2.build().stem,
        "machine": f"{usable_cores()} cores, {cpu_name()}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "calibration": f"{arguments.samples} × {arguments.sequence} tokens",
    }
    for only in [arguments.only] if arguments.only else ["make", "time"]:
        for name in arguments.rows:
            found = apart(name, "--only", only, "--models", str(folder))
            row = result["rows"].setdefault(name, {})
            row |= found if only == "make" else {"speed": found}
            keep(result, name, found, arguments.out)
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
    parser.add_argument("--models", type=Path, help="keep the models here")
    parser.add_argument("--only", choices=("make", "time"), help="one half, with --models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(ROWS), help="measure a half of this row, as JSON")
    arguments = parser.parse_args()
    if arguments.only and arguments.models is None:
        parser.error("--only needs --models")
    if arguments.one:
        print(json.dumps(one(arguments)))
    elif arguments.models is not None:
        arguments.models.mkdir(parents=True, exist_ok=True)
        table(arguments, arguments.models)
    else:
        with tempfile.TemporaryDirectory() as folder:
            table(arguments, Path(folder))


if __name__ == "__main__":
    main()
