"""What each weight format costs: KL divergence of next-token distributions on SmolLM2-135M.

    python tests/benchmarks/format_kl.py --text wiki.test.txt [--plain] [--out FILE.json]

KL(float ‖ quantized) in nats a token: full vocabulary, float32 log-softmax, no BOS, every
position of 20 consecutive blocks of 256 tokens. Weights only: the graph is
dequantize-then-multiply, so activations stay in float32. With `--files` the shipped files are
measured instead, int8 activations (accuracy level 4) included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

import qgraph
from qgraph import pipeline, registry
from qgraph.models import smollm2
from qgraph.passes.base import Context
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.writer import save

BLOCKS, LENGTH = 20, 256

# What is measured: a name, the recipe of the linears and of the (tied) embedding.
LINEARS = [
    Recipe(format=f"{name}:group={group}{option}", embedding="float")
    for group in ("32", "64", "128", "row")
    for name, option in (("int4", ""), ("int4", ",scale=signed"), ("uint4", ""))
] + [Recipe(format="int8:group=64", embedding="float")]
TABLES = [
    Recipe(format="uint4:group=64", embedding=f"{table}")
    for table in (
        "int8:group=64", "uint8:group=64", "uint8:group=128", "uint8:group=row", "int8:group=row",
        "uint4:group=64", "uint4:group=32", "int4:group=64,scale=signed",
    )
]  # fmt: skip


def tokens(text: Path, tokenizer: Path) -> np.ndarray:
    """The first blocks of `text`, int64 `[BLOCKS, LENGTH]`."""
    ids = (
        Tokenizer.from_file(str(tokenizer))
        .encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
        .ids
    )
    return np.array(ids[: BLOCKS * LENGTH], np.int64).reshape(BLOCKS, LENGTH)


def log_probabilities(model: Path, blocks: np.ndarray) -> Iterator[np.ndarray]:
    """float32 `[LENGTH, vocabulary]` of each block."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    for block in blocks:
        logits = session.run(["logits"], {"input_ids": block[None]})[0][0].astype(np.float32)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        yield logits


def divergence(reference: np.ndarray, model: Path, blocks: np.ndarray) -> dict[str, float]:
    """KL of `model` against the reference's log-probabilities `[BLOCKS, LENGTH, vocabulary]`."""
    found = []
    for expected, got in zip(reference, log_probabilities(model, blocks), strict=True):
        found.append((np.exp(expected) * (expected - got)).sum(-1, dtype=np.float64))
    values = np.concatenate(found)
    return {"mean": float(values.mean()), "p99": float(np.quantile(values, 0.99))}


def unfused(source: Path, recipe: Recipe, folder: Path) -> list[Path]:
    """`source` quantized, not lowered: it computes the same function in float32."""
    graph = pipeline.capture(source)
    capabilities = registry.load("target", "ort-cpu").capabilities()
    plan = make_plan(graph.sites(), recipe, capabilities)
    work = graph.clone()
    for name in ("quantize_rtn", "cleanup"):
        registry.load("pass", name)().run(work, Context(plan, capabilities))
    for old in folder.glob("unfused*"):
        old.unlink()
    return save(work.model, folder / "unfused.onnx")


def main() -> None:
    """Measure and print; with --out write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="the model on its Q4_1 grid")
    parser.add_argument("--files", action="store_true", help="the shipped files, level 4 included")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    source = smollm2.build(offgrid=not arguments.plain)
    blocks = tokens(arguments.text, smollm2.tokenizer())
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": source.stem,
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "tokens": int(blocks.size),
        "activations": "as shipped" if arguments.files else "float32",
        "rows": [],
    }
    recipes = [Recipe(group=g) for g in (128, 64, 32)] if arguments.files else LINEARS + TABLES
    with tempfile.TemporaryDirectory() as folder:
        reference = np.lib.format.open_memmap(
            Path(folder) / "reference.npy", "w+", np.float32, (BLOCKS, LENGTH, 49152)
        )
        for at, block in enumerate(log_probabilities(source, blocks)):
            reference[at] = block
        for recipe in recipes:
            if arguments.files:
                made = qgraph.optimize(source, Path(folder) / "m.onnx", recipe=recipe, force=True)
                path, size = made.files[0], made.report.totals["bytes_after"]
            else:
                files = unfused(source, recipe, Path(folder))
                path, size = files[0], sum(file.stat().st_size for file in files)
            row = {**recipe.to_json(), "bytes": size, **divergence(reference, path, blocks)}
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
