"""What each step of the solvers gains: KL on SmolLM2-135M, one table by one command.

    python tests/benchmarks/quality.py --calibrate valid.txt --text test.txt [--offgrid] [--out F]

Linears (not the head) at 4 bits, group 64, asymmetric, float activations, head and embedding in
float. Calibration: 64 × 512 tokens; evaluation: 20 × 256 tokens, every position, full vocabulary.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch

import qgraph
from qgraph.models import smollm2

PAPER = {"quantize_gptq.correct": "false"}
REFINED = {"quantize_gptq.sweeps": "2", "quantize_gptq.refit": "true"}
ROWS: dict[str, dict[str, Any]] = {
    "rounding": {},
    "int8 rounding": {"format": "int8:group=64"},
    "gptq, no act order": {
        "solver": "gptq", "options": {**PAPER, "quantize_gptq.act_order": "false"},
    },
    "gptq, act order": {"solver": "gptq", "options": PAPER},
    "gptq, act order, corrected": {"solver": "gptq"},
    "gptq, corrected, refined": {"solver": "gptq", "options": REFINED},
}  # fmt: skip


def measure(source: Path, row: dict[str, Any], calibrate: Path, text: Path) -> dict[str, Any]:
    """KL, seconds and peak memory of one row of the table."""
    options = {"format": "uint4:group=64", **row}
    if "solver" in options:
        options |= {"calibrate": calibrate, "tokenizer": smollm2.tokenizer()}
    with tempfile.TemporaryDirectory() as folder:
        since = time.perf_counter()
        result = qgraph.optimize(
            source, Path(folder) / "o.onnx", embedding="float", exclude="role:head",
            accuracy_level=0, check=False, unfused="portable", **options,
        )  # fmt: skip
        seconds = time.perf_counter() - since
        found = qgraph.compare(
            source, result.files[0], text=text, tokenizer=smollm2.tokenizer(), sites=False
        ).divergence
    assert found is not None
    peak = result.report.totals["peak_rss_bytes"] / 1e6
    return {"kl": found.mean, "p99": found.p99, "seconds": seconds, "peak_mb": peak}


def main() -> None:
    """Measure the rows asked for and print them; with --out write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--offgrid", action="store_true")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    source = smollm2.build(offgrid=arguments.offgrid)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": source.stem,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "qgraph": qgraph.__version__,
            "onnxruntime": ort.__version__,
            "torch": torch.__version__,
        },
        "rows": {},
    }
    for name in arguments.rows:
        row = measure(source, ROWS[name], arguments.calibrate, arguments.text)
        result["rows"][name] = row
        print(json.dumps({name: row}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
