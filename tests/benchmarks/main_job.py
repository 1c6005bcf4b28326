"""The main job on SmolLM2-135M beside ONNX Runtime's own quantizer, both in one run.

    python tests/benchmarks/main_job.py --out tests/benchmarks/results/main_job.json

Each measurement is one process per side, the sides alternating, on an otherwise idle machine.
Times are ratios of medians with the range over the rounds. Parts: coverage and greedy text of
three exports, file size, time of the linears alone, time and memory of the whole command, memory
on a synthetic 4 GB model, the profile, and MiniLM's cosine similarity.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docstrings
import numpy as np
import onnxruntime as ort

import qgraph
from qgraph.models import minilm, smollm2

HERE = Path(__file__).parent
PROMPT = "The capital of France is"


def fresh(output: Path) -> Path:
    """`output`, with what an earlier round wrote there removed: both sides write new files."""
    for path in output.parent.glob(f"{output.stem}*"):
        path.unlink()
    return output


def run(command: list[str]) -> dict[str, Any]:
    """Wall seconds of one process, and its last line of output, where that is JSON."""
    since = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - since
    output = done.stdout
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}\n{output}{done.stderr}")
    found: dict[str, Any] = {"seconds": seconds}
    last = output.strip().splitlines()[-1:]
    if last and last[0].startswith("{"):
        found |= json.loads(last[0])
    return found


def compare(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, key: str
) -> dict[str, Any]:
    """The ratio of `key`, ours to theirs, over alternating rounds."""
    pairs = []
    for index in range(rounds):
        order = (ours, theirs) if index % 2 == 0 else (theirs, ours)
        first, second = order[0](), order[1]()
        pairs.append((first, second) if index % 2 == 0 else (second, first))
    mine, peers = [p[0][key] for p in pairs], [p[1][key] for p in pairs]
    ratios = [a / b for a, b in zip(mine, peers, strict=True)]
    return {
        "ours": statistics.median(mine),
        "onnxruntime": statistics.median(peers),
        "ratio": statistics.median(mine) / statistics.median(peers),
        "range": [min(ratios), max(ratios)],
        "peak_mb": [max(p[0]["peak_mb"] for p in pairs), max(p[1]["peak_mb"] for p in pairs)],
    }


def peer(source: Path, output: Path, group: int) -> list[str]:
    """ONNX Runtime's own quantizer as a process of its own."""
    script = str(HERE / "peer_onnxruntime.py")
    return [sys.executable, script, str(source), str(fresh(output)), str(group)]


def command(source: Path, output: Path, group: int, *more: str) -> dict[str, Any]:
    """The whole `qgraph optimize` command: its seconds and peak resident MB."""
    report = fresh(output).with_suffix(".json")
    options = ["--int4-groups", str(group), "-o", str(output), "--force", "--quiet", *more]
    found = run(
        [sys.executable, "-m", "qgraph", "optimize", str(source), *options, "--report", str(report)]
    )
    totals = json.loads(report.read_text(encoding="utf-8"))["totals"]
    return {**found, "peak_mb": totals["peak_rss_bytes"] / 1e6, "stages": totals["seconds"]}


def linears_alone(source: Path, folder: Path, group: int, rounds: int) -> dict[str, Any]:
    """The same 210 linears on both sides, imports and reading the model excluded."""
    script = [sys.executable, str(HERE / "linears_alone.py"), str(source)]
    return compare(
        lambda: run([*script, str(fresh(folder / "ours.onnx")), str(group)]),
        lambda: run(peer(source, folder / "theirs.onnx", group)),
        rounds,
        "work_seconds",
    )


def coverage(group: int, folder: Path) -> list[dict[str, Any]]:
    """Every export: sites fused, size, and greedy text."""
    rows = []
    for variant in ("default", "plain", "past"):
        output = folder / f"{variant}.onnx"
        result = qgraph.optimize(smollm2.build(variant=variant), output, group=group, force=True)
        explanation = qgraph.explain(output)
        row = {
            "export": variant,
            "group": group,
            "fused": explanation.totals["linears_fused"],
            "linears": explanation.totals["linears"],
            "share": result.plan.coverage.share,
            "mb": result.report.totals["bytes_after"] / 1e6,
        }
        if variant != "past":
            row["text"] = greedy(output)
        rows.append(row)
    return rows


def greedy(model: Path, count: int = 8) -> str:
    """Greedy continuation of the prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer()))
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    for _ in range(count):
        logits = session.run(["logits"], {"input_ids": np.array([ids], np.int64)})[0]
        ids.append(int(logits[0, -1].argmax()))
    return str(tokenizer.decode(ids))


def profile(model: Path) -> dict[str, Any]:
    """What `explain --profile` says really ran."""
    explanation = qgraph.explain(model, profile=True)
    ran = [row for row in explanation.profile if row.op.endswith("MatMulNBits")]
    return {
        "matmul_nbits_that_ran": len(ran),
        "providers": sorted({row.provider for row in ran}),
        "level_proofs": explanation.to_json()["level_proofs"],
    }


def encoder(folder: Path) -> list[dict[str, Any]]:
    """MiniLM: coverage and the least cosine similarity of 20 sentence embeddings to float."""
    source = minilm.build()
    feeds = minilm.encode(minilm.tokenizer(), minilm.sentences())

    def embed(model: Path) -> np.ndarray:
        session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        hidden = session.run(None, feeds)[0]
        mask = feeds["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)

    expected = embed(source)
    rows = []
    texts = docstrings.sentences(512)  # none of the sentences that are measured
    data = [minilm.encode(minilm.tokenizer(), texts[at : at + 32]) for at in range(0, 512, 32)]
    asked: tuple[dict[str, Any], ...] = (
        {"format": "int8", "group": 64},
        {"format": "auto", "group": 32},
        {"format": "auto", "group": 32, "solver": "gptq"},
    )
    for options in asked:
        output = folder / "encoder.onnx"
        calibrate = data if "solver" in options else None
        result = qgraph.optimize(source, output, force=True, calibrate=calibrate, **options)
        cosine = (expected * embed(output)).sum(-1)
        counted = result.plan.coverage
        rows.append(
            {
                **options,
                "linears": f"{counted.linears_quantized}/{counted.linears}",
                "least_cosine": float(cosine.min()),
                "mean_cosine": float(cosine.mean()),
            }
        )
    return rows


def large(folder: Path, gigabytes: float = 4.0) -> dict[str, Any]:
    """Peak memory on a synthetic float32 model of 4 GB."""
    source = folder / "large.onnx"
    run([sys.executable, str(HERE / "synthetic.py"), str(source), str(gigabytes)])
    size = sum(path.stat().st_size for path in folder.glob("large.onnx*"))
    found = command(source, folder / "large.int4.onnx", 128)
    for path in folder.glob("large*"):
        path.unlink()
    return {"model_mb": size / 1e6, "peak_mb": found["peak_mb"], "seconds": found["seconds"]}


def main() -> None:
    """Run every part and print the result; with --out write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="coverage,linears,whole,profile,encoder,large")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    source = smollm2.build()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_cpu()}",
        "versions": {
            "qgraph": qgraph.__version__,
            "onnxruntime": ort.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "coverage" in parts:
            result["coverage"] = [row for g in (128, 64) for row in coverage(g, folder)]
        if "linears" in parts:
            result["linears_alone"] = linears_alone(source, folder, 128, arguments.rounds)
        for label, more in (("whole", ()), ("whole_no_check", ("--no-check",))):
            if "whole" in parts:
                result[label] = compare(
                    lambda more=more: command(source, folder / "ours.onnx", 128, *more),
                    lambda: run(peer(source, folder / "theirs.onnx", 128)),
                    arguments.rounds,
                    "seconds",
                )
        if "profile" in parts:
            output = folder / "profiled.onnx"
            qgraph.optimize(source, output, group=128)
            result["profile"] = profile(output)
        if "encoder" in parts:
            result["encoder"] = encoder(folder)
        if "large" in parts:
            result["large"] = large(folder)
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    extensions = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags]
    return f"{named[0] if named else 'unknown'} ({', '.join(extensions)})"


if __name__ == "__main__":
    main()
