"""What a quantized cache costs SmolLM2-135M, and what it saves.

    python tests/benchmarks/kv_cache.py --text TEST --calibrate TRAIN \
        --out tests/benchmarks/results/kv_cache.json

For two kinds of weights (8 bits beside float activations, 4 bits beside rounded ones) the KL
divergence in nats a token between the model with a float cache and the same with a quantized one,
on text that was not calibrated on: in blocks of 256 tokens, and at the far half of blocks that are
longer than the samples of the calibration. "alone" is what ranges of each channel by itself would
cost in place of those of rotary pairs. "floor" is what a change of all that attention reads by a
millionth costs, the cache in floats: with rounded activations it moves roundings everywhere, and
nothing that is done to a cache costs less. Speeds are of decoding after a prompt, the sides turn by
turn in one process: the ratio of medians to the float cache's tokens a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import qgraph
from qgraph.decode_bench import bench_decode
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2
from qgraph.passes import quantize_cache
from qgraph.passes.cache_noise import move
from qgraph.text import token_blocks

WEIGHTS: dict[str, dict[str, Any]] = {
    "int8, float activations": {"format": "int8", "group": 64, "accuracy_level": 0},
    "uint4, rounded activations": {"group": 64},
}
CACHES = ("int8", "int8:scale=tensor", "int4")
SHORT, LONG = 256, 1024


@contextmanager
def channels_alone() -> Iterator[None]:
    """Keys' ranges as they are without regard to what a rotary embedding turns together."""
    known = quantize_cache.cached

    def without_pairs(node: Any) -> Any:
        return dataclasses.replace(known(node), pairs=np.empty((0, 2), np.int64))

    quantize_cache.cached = without_pairs
    try:
        yield
    finally:
        quantize_cache.cached = known


def moved(base: Path, output: Path) -> Path:
    """`base`, all that attention reads changed by a millionth; `output` shares its folder."""
    model = ir.load(base.absolute())
    move(model)
    output.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    return output


def made(
    base: Path, output: Path, cache: str, calibrate: Path, samples: int, sequence: int
) -> dict[str, Any]:
    """What the run says of a cache; `base` has its weights packed already."""
    result = qgraph.optimize(
        base, output, kv_cache=cache, calibrate=str(calibrate), samples=samples, sequence=sequence,
        tokenizer=str(smollm2.tokenizer()), check=False, force=True,
    )  # fmt: skip
    return dict(result.report.totals["kv_cache"])


def loss(base: Path, candidate: Path, text: Path, samples: int) -> dict[str, float]:
    """KL(float cache ‖ quantized), by block: all of short ones, the far half of long ones."""
    found = {}
    for name, sequence, far in (("short", SHORT, False), ("far", LONG, True)):
        ids = token_blocks(
            text, smollm2.tokenizer(), sequence=sequence, samples=max(1, samples * SHORT // LONG)
            if far else samples,
        ).ids  # fmt: skip
        compared = qgraph.compare(base, candidate, ids, sites=False, llama_cpp=far)
        assert compared.divergence is not None
        found[name] = compared.divergence.mean
        found[f"{name}_top1"] = compared.divergence.top1
    return found


def table(
    folder: Path, arguments: argparse.Namespace, source: Path, save: Any
) -> dict[str, dict[str, Any]]:
    """All rows; `save` is given them as they come."""
    rows: dict[str, dict[str, Any]] = {}
    for weights, options in WEIGHTS.items():
        name = weights.split(",")[0]
        base = folder / f"{name}.onnx"
        qgraph.optimize(source, base, check=False, force=True, **options)
        other = moved(base, folder / f"{name}-moved.onnx")
        rows[f"{weights}: floor"] = loss(base, other, arguments.text, arguments.blocks)
        save(rows)
        given = (arguments.calibrate, arguments.samples, arguments.sequence)
        for cache in CACHES:
            output = folder / f"{name}-{cache.replace(':', '-')}.onnx"
            row = rows[f"{weights}: {cache}"] = made(base, output, cache, *given)
            row |= loss(base, output, arguments.text, arguments.blocks)
            save(rows)
        output = folder / f"{name}-alone.onnx"
        with channels_alone():
            row = rows[f"{weights}: int8, alone"] = made(base, output, "int8", *given)
        row |= loss(base, output, arguments.text, arguments.blocks)
        save(rows)
    return rows


def speeds(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second beside those of the float cache, after prompts of two lengths."""
    models = [
        folder / "uint4.onnx",
        *(folder / f"uint4-{c.replace(':', '-')}.onnx" for c in CACHES),
    ]
    found: dict[str, dict[str, float]] = {}
    for prompt in (SHORT, LONG):
        result = bench_decode(
            models[0], models[1:], prompt_tokens=prompt, new_tokens=32, rounds=rounds
        )
        base = result.sides[0]
        for cache, side in zip(("float", *CACHES), result.sides, strict=True):
            found[f"{cache}, after {prompt}"] = {
                "tokens_per_second": 1 / side.step.median,
                "decode_ratio": base.step.median / side.step.median,
                "prompt_ratio": base.prompt.median / side.prompt.median,
            }
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=17, help="of calibration, one is held out")
    parser.add_argument("--sequence", type=int, default=512, help="tokens in each of them")
    parser.add_argument("--blocks", type=int, default=8, help="of 256 tokens that are compared")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", type=Path, help="keep the models here")
    parser.add_argument("--only", choices=("make", "time"), help="one half, with --models")
    arguments = parser.parse_args()
    if arguments.only and arguments.models is None:
        parser.error("--only needs --models")
    content: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{usable_cores()} cores, {cpu_name()}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "blocks": {"short": SHORT, "long": LONG, "calibration": arguments.sequence},
    }

    def save(rows: dict[str, Any]) -> None:
        content["rows"] = rows
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        name, row = list(rows.items())[-1]
        print(f"{name}: {row}", flush=True)

    if arguments.only == "time":
        content = {**json.loads(arguments.out.read_text(encoding="utf-8")), **content}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.only != "time":
            content["rows"] = table(folder, arguments, smollm2.build(variant="past"), save)
        if arguments.only != "make":
            content["speeds"] = speeds(folder, arguments.rounds)
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
