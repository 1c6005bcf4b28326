"""What each solver gains: KL on SmolLM2-135M in two domains, one table by one command.

    python tests/benchmarks/quality.py --calibrate valid.txt --text test.txt [--offgrid] [--out F]

Linears (not the head) at 4 bits, group 64, asymmetric, float activations, head and embedding in
float. Calibration: 64 × 512 tokens; evaluation: 20 × 256 tokens, every position, full vocabulary,
of the text given and of docstrings of Python's standard library. Rows that calibrate on docstrings
use those of other modules. One process a row, so that each tells its own time and peak memory.
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

import docstrings
import onnxruntime as ort
import torch
from table_file import apart, keep, rows_of

import qgraph
from qgraph.models import smollm2

PAPER = {"solve.correct": "false"}
ROWS: dict[str, dict[str, Any]] = {
    "rounding": {},
    "int8 rounding": {"format": "int8:group=64"},
    "ONNX Runtime's HQQ": {"peer": True},
    "hqq": {"solver": "hqq"},
    "weighted": {"solver": "weighted", "calibration": "parallel"},
    "awq": {"solver": "awq", "options": PAPER},
    "gptq, no act order": {
        "solver": "gptq", "options": {**PAPER, "quantize_gptq.act_order": "off"},
    },
    "gptq, act order, parallel": {"solver": "gptq", "calibration": "parallel"},
    "gptq, act order": {"solver": "gptq", "options": PAPER},
    "gptq, act order, outputs corrected": {
        "solver": "gptq", "options": {"solve.residual": "false", "solve.relative": "false"},
    },
    "gptq, act order, sums corrected": {
        "solver": "gptq", "options": {"solve.relative": "false"},
    },
    "gptq (as shipped)": {"solver": "gptq"},
    "best": {"solver": "auto"},
    "best, both domains": {"solver": "auto", "data": "both"},
    "best, self": {"solver": "auto", "data": "self"},
    "weighted, self": {"solver": "weighted", "data": "self", "calibration": "parallel"},
}  # fmt: skip
TWO_DOMAINS = "both"


def peer(source: Path, output: Path) -> None:
    """ONNX Runtime's own HQQ on the same linears (the head excluded).

    It takes the export with `MatMul`s of constants, the default one: of linears behind a Transpose
    it quantizes none.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        HQQWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    model = onnx.load(source)
    heads = [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul" and model.graph.output[0].name in node.output
    ]
    quantizer = MatMulNBitsQuantizer(
        model,
        algo_config=HQQWeightOnlyQuantConfig(block_size=64, bits=4),
        nodes_to_exclude=heads,
    )
    quantizer.process()
    quantized = sum(node.op_type == "MatMulNBits" for node in quantizer.model.model.graph.node)
    if not quantized:
        raise SystemExit(f"{source}: ONNX Runtime's quantizer found nothing to quantize")
    quantizer.model.save_model_to_file(str(output), use_external_data_format=True)


def measure(source: Path, name: str, calibrate: Path, text: Path, folder: Path) -> dict[str, Any]:
    """KL in both domains, seconds and peak memory of one row; runs in a process of its own."""
    row = dict(ROWS[name])
    output = folder / "o.onnx"
    since = time.perf_counter()
    peak = 0.0
    if row.pop("peer", False):
        peer(source, output)
    else:
        options: dict[str, Any] = {"format": "uint4:group=64", **row}
        data = options.pop("data", None)
        solver = options.get("solver", "rtn")
        if solver not in ("rtn", "hqq"):
            options |= {"calibrate": calibrate, "tokenizer": smollm2.tokenizer()}
            if data == TWO_DOMAINS:
                options["calibrate"] = [calibrate, docstrings.write(folder / "docs.txt", 1)]
            elif data == "self":
                options |= {"calibrate": "self", "tokenizer": None}
        result = qgraph.optimize(
            source, output, embedding="float", exclude="role:head",
            accuracy_level=0, check=False, unfused="portable", **options,
        )  # fmt: skip
        peak = result.report.totals["peak_rss_bytes"] / 1e6
    found: dict[str, Any] = {"seconds": time.perf_counter() - since, "peak_mb": peak}
    texts = {"wikitext": text, "docstrings": docstrings.write(folder / "eval.txt", 0)}
    for domain, path in texts.items():
        divergence = qgraph.compare(
            source, output, text=path, tokenizer=smollm2.tokenizer(), sites=False
        ).divergence
        assert divergence is not None
        found[domain] = {"kl": divergence.mean, "median": divergence.median, "p99": divergence.p99}
    return found


def main() -> None:
    """Measure the rows asked for and print them; with --out add them to the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--offgrid", action="store_true")
    parser.add_argument("--variant", default="plain", help="which export of the model")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="measure this row here, and print it as JSON")
    arguments = parser.parse_args()
    source = smollm2.build(variant=arguments.variant, offgrid=arguments.offgrid)
    if arguments.one:
        if ROWS[arguments.one].get("peer"):
            source = smollm2.build(variant="default", offgrid=arguments.offgrid)
        with tempfile.TemporaryDirectory() as folder:
            row = measure(source, arguments.one, arguments.calibrate, arguments.text, Path(folder))
        print(json.dumps(row))
        return
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": source.stem,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "qgraph": qgraph.__version__,
            "onnxruntime": ort.__version__,
            "torch": torch.__version__,
        },
        "rows": rows_of(arguments.out),
    }
    for name in arguments.rows:
        row = result["rows"][name] = apart(name)
        keep(result, name, row, arguments.out)


if __name__ == "__main__":
    main()
