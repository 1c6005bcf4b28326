"""What each weight format costs and gains on SmolLM2-135M: one table by one command.

    python tests/benchmarks/format_table.py --text test.txt --calibrate valid.txt [--offgrid]
        [--rows NAME …] [--out FILE.json]

Linears (not the head) in the format, head and embedding in float. KL and perplexity of 20 × 256
tokens with float activations; bits are those of the linears' packed parts; decode speed is that of
the shipped file (int8 activations where the kernel has them): one token without a cache, the median
of runs that alternate with the float model's, as a ratio to it. One process a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from table_file import apart, keep, rows_of

import qgraph
from qgraph.models import smollm2

BEST = "auto"
ROWS: dict[str, dict[str, Any]] = {
    "int8-row": {"format": "int8-row"},
    "int8 g64": {"format": "int8:group=64"},
    **{
        f"fp8-{kind}, a scale for each {scale}": {"format": f"fp8-{kind}:scale={scale}"}
        for kind in ("e4m3", "e5m2")
        for scale in ("tensor", "row", "block")
    },
    **{f"uint4 g{g}": {"format": f"uint4:group={g}"} for g in (32, 64, 128)},
    **{f"int4 g{g}": {"format": f"int4:group={g}"} for g in (32, 64, 128)},
    **{
        f"uint4 g{g}, best solver": {"format": f"uint4:group={g}", "solver": BEST}
        for g in (32, 64, 128)
    },
    "nf4": {"format": "nf4"},
    "nf4, double quantization": {"format": "nf4:double=true"},
    "fp4": {"format": "fp4"},
    "mxfp4": {"format": "mxfp4"},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
}
TIMED = 15
"""Runs of each side behind a decode speed."""


def speed(reference: Path, candidate: Path) -> float:
    """How many times faster `candidate` makes one token, both sides in turns."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    sessions = [
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for path in (reference, candidate)
    ]
    feeds = {"input_ids": np.array([[17]], np.int64)}
    times: tuple[list[float], list[float]] = ([], [])
    for at in range(TIMED + 2):
        for session, seconds in zip(sessions, times, strict=True):
            since = time.perf_counter()
            session.run(["logits"], feeds)
            if at >= 2:
                seconds.append(time.perf_counter() - since)
    return statistics.median(times[0]) / statistics.median(times[1])


def at_level_4(model: Path) -> list[Path]:
    """A copy of a model whose fused products take int8 activations; both read one data file."""
    proto = onnx.load(model, load_external_data=False)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 4
    path = model.with_name("level4.onnx")
    onnx.save(proto, path)
    data = {
        entry.value for tensor in proto.graph.initializer for entry in tensor.external_data
        if entry.key == "location"
    }  # fmt: skip
    return [path, *(model.parent / name for name in sorted(data))]


def measure(source: Path, name: str, text: Path, calibrate: Path, folder: Path) -> dict[str, Any]:
    """One row."""
    options: dict[str, Any] = {
        "embedding": "float", "exclude": "role:head", "unfused": "portable", **ROWS[name]
    }  # fmt: skip
    if "solver" in options:
        options |= {"calibrate": calibrate, "tokenizer": smollm2.tokenizer()}
    plain = qgraph.optimize(
        source, folder / "plain.onnx", check=False, accuracy_level=0, **options
    )  # fmt: skip
    if "solver" in options:  # solved once: the two files differ in the level alone
        shipped, kernels = at_level_4(plain.files[0]), plain
    else:
        kernels = qgraph.optimize(source, folder / "shipped.onnx", check=False, **options)
        shipped = kernels.files
    linears = [item for item in kernels.plan.decisions if item.quantized]
    found = qgraph.compare(
        source, plain.files[0], text=text, tokenizer=smollm2.tokenizer(), sites=False
    )
    assert found.divergence is not None
    return {
        "bits_per_weight": 8 * sum(item.packed_bytes for item in linears)
        / sum(item.n * item.k for item in linears),
        "file_mb": sum(path.stat().st_size for path in shipped) / 1e6,
        "kl": found.divergence.mean,
        "perplexity": found.divergence.candidate_perplexity,
        "decode_speed": speed(source, shipped[0]),
        "kernels": sorted({str(item.kernel).split(" level")[0] for item in linears}),
    }  # fmt: skip


def main() -> None:
    """Measure the rows asked for and print them; with --out add them to the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--offgrid", action="store_true")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="measure this row here, and print it as JSON")
    arguments = parser.parse_args()
    source = smollm2.build(offgrid=arguments.offgrid)
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(source, arguments.one, arguments.text, arguments.calibrate, Path(folder))
        print(json.dumps(row))
        return
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": source.stem,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "rows": rows_of(arguments.out),
    }
    for name in arguments.rows:
        row = result["rows"][name] = apart(name)
        keep(result, name, row, arguments.out)


if __name__ == "__main__":
    main()
