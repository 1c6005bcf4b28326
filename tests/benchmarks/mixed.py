"""What a bit budget gains: KL on SmolLM2-135M at equal bits, and how well it is predicted.

    python tests/benchmarks/mixed.py --calibrate valid.txt --text test.txt [--solver S] [--out F]

Linears (not the head) with float activations, head and embedding in float, off the grid that the
published weights lie on; rows named "whole" quantize all of it as `optimize` does by default.
Calibration: 64 × 512 tokens, 8 samples of which are held out by a budget; evaluation: 20 × 256
tokens of the text given, every position, full vocabulary. One process a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort
from table_file import apart, keep, rows_of

import qgraph
from qgraph.models import smollm2

LINEARS = {"embedding": "float", "exclude": "role:head", "accuracy_level": 0}
ROWS: dict[str, dict[str, Any]] = {
    "int4, groups of 64": {**LINEARS, "format": "int4:group=64"},
    "int4 scale=signed, groups of 64": {**LINEARS, "format": "int4:group=64,scale=signed"},
    "uint4, groups of 64": {**LINEARS, "format": "uint4:group=64"},
    "4.5 bits": {**LINEARS, "target_bits": 4.5},
    "5 bits": {**LINEARS, "target_bits": 5.0},
    "KL 0.05": {**LINEARS, "mixed": True, "max_kl": 0.05},
    "whole, uint4, groups of 64": {"format": "uint4:group=64", "embedding": "uint4"},
    "whole, 4.5 bits": {"target_bits": 4.5},
    "whole, KL 0.05": {"mixed": True, "max_kl": 0.05},
}


def bits(result: qgraph.Result) -> float:
    """Bits a weight of what was quantized, scales included."""
    packed = [item for item in result.plan.decisions if item.quantized and not item.shared_with]
    return 8 * sum(i.packed_bytes for i in packed) / sum(i.n * i.k for i in packed)


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """KL, size, seconds and peak memory of one row; runs in a process of its own."""
    source = smollm2.build(variant="plain", offgrid=True)
    options = dict(ROWS[name])
    budgeted = any(key in options for key in ("target_bits", "mixed"))
    if budgeted or arguments.solver != "rtn":
        options |= {"calibrate": arguments.calibrate, "tokenizer": smollm2.tokenizer()}
    since = time.perf_counter()
    result = qgraph.optimize(
        source, folder / "o.onnx", solver=arguments.solver, check=False,
        samples=arguments.samples, sequence=arguments.sequence, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - since
    divergence = qgraph.compare(
        source, result.files[0], text=arguments.text, tokenizer=smollm2.tokenizer(), sites=False
    ).divergence
    assert divergence is not None
    budget = result.report.totals.get("budget") or {}
    formats: dict[str, int] = {}
    for item in result.plan.decisions:
        formats[item.format or "float"] = formats.get(item.format or "float", 0) + 1
    return {
        "kl": divergence.mean,
        "bits": bits(result),
        "bytes": result.report.totals["bytes_after"],
        "predicted": budget.get("loss"),
        "measured": budget.get("measured"),
        "trials": budget.get("trials"),
        "gap": budget.get("gap"),
        "formats": formats,
        "seconds": seconds,
        "peak_mb": result.report.totals["peak_rss_bytes"] / 1e6,
    }


def main() -> None:
    """Measure the rows asked for and print them; with --out add them to the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--solver", default="rtn")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="measure this row here, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(arguments.one, arguments, Path(folder))))
        return
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": "smollm2-plain-offgrid",
        "machine": f"{platform.machine()}, {os.cpu_count()} threads",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "calibration": f"{arguments.samples} × {arguments.sequence} tokens",
        "rows": rows_of(arguments.out),
    }
    for name in arguments.rows:
        key = name if arguments.solver == "rtn" else f"{name}, by {arguments.solver}"
        row = result["rows"][key] = apart(name)
        keep(result, key, row, arguments.out)


if __name__ == "__main__":
    main()
