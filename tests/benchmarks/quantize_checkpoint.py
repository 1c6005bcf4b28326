"""Quantize a synthetic sharded checkpoint of 6 GB: peak memory and time, by layout.

    python tests/benchmarks/quantize_checkpoint.py [--gigabytes 6] [--layout gptq …]

The input's zeros take no disk; the output takes a quarter of its size, once a layout.
Writes results/quantize_checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from sparse_checkpoint import sparse_checkpoint  # noqa: E402

N, K = 14336, 4096
LAYOUTS = ("compressed-tensors", "gptq")
RUN = """
import resource, sys, time
from qgraph.quantizing import quantize_checkpoint
since = time.perf_counter()
done = quantize_checkpoint(sys.argv[1], sys.argv[2], layout=sys.argv[3])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(time.perf_counter() - since, peak, len(done.entries))
"""


def measure(place: Path, layout: str) -> dict[str, float]:
    """One run in a process of its own: seconds, and its peak resident set in MB."""
    out = place.with_name("out")
    found = subprocess.run(
        [sys.executable, "-c", RUN, str(place), str(out), layout],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    written = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    return {
        "seconds": round(float(found[0]), 1),
        "peak_mb": round(int(found[1]) / 1e6),
        "weights": int(found[2]),
        "written_mb": round(written / 1e6),
    }


def main() -> None:
    """Measure every layout, print and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--layout", action="append")
    asked = parser.parse_args()
    layers = max(1, round(asked.gigabytes * 1e9 / (2 * N * K)))
    with tempfile.TemporaryDirectory() as folder:
        place = sparse_checkpoint(Path(folder) / "in", layers=layers, n=N, k=K, shards=4)
        read = sum(path.stat().st_size for path in place.glob("*.safetensors"))
        results = {name: measure(place, name) for name in asked.layout or LAYOUTS}
    report = {"date": date.today().isoformat(), "read_mb": round(read / 1e6), "layouts": results}
    print(json.dumps(report, indent=2))
    (HERE / "results" / "quantize_checkpoint.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
