"""Encoders: MiniLM, and a vision transformer of random weights, one command.

    python tests/benchmarks/encoders.py --out tests/benchmarks/results/encoders.json

Sides: `onnxruntime`, the plain export with all optimizations of a session; `optimizer`, the same
through ONNX Runtime's own offline optimizer of transformers first, where it can be imported; and
ours, all opened the same way: `float` (`--format float`: fused, weights as they are), `int8`
(`--for prefill`) and `int4`; the notes hold what their runs say of fusing. All sessions are open in
one process, and take turns run by run in an order that turns; ratios of medians, with the range
over the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import qgraph
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import minilm

Feeds = dict[str, np.ndarray]
HEADS, LAYERS, HIDDEN, IMAGE, PATCH = 6, 6, 384, 224, 16
OURS: dict[str, dict[str, Any]] = {
    "float": {"format": "float"},
    "int8": {"purpose": "prefill"},
    "int4": {"format": "auto", "group": 64},
}


def vision(path: Path) -> Path:
    """A vision transformer of 197 tokens, exported to opset 17 by TorchScript's exporter."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN, image_size=IMAGE, patch_size=PATCH,
    )  # fmt: skip
    inner = transformers.ViTModel(config, add_pooling_layer=False).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, pixel_values: Any) -> Any:
            return self.inner(pixel_values=pixel_values).last_hidden_state

    torch.onnx.export(
        Encoder(), (torch.zeros(1, 3, IMAGE, IMAGE),), str(path), dynamo=False, opset_version=17,
        input_names=["pixel_values"], output_names=["last_hidden_state"],
        dynamic_axes={"pixel_values": {0: "batch"}, "last_hidden_state": {0: "batch"}},
    )  # fmt: skip
    return path


def texts(rows: int, tokens: int) -> Feeds:
    """Token ids without padding."""
    ids = np.random.default_rng(0).integers(1000, 20000, (rows, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def images(rows: int) -> Feeds:
    """Pixels."""
    shape = (rows, 3, IMAGE, IMAGE)
    return {"pixel_values": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def by_optimizer(source: Path, target: Path, kind: str) -> Path | str:
    """What ONNX Runtime's offline optimizer makes of a model; in words, why there is none."""
    try:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        made = optimize_model(
            str(source), kind, HEADS if kind == "vit" else 12, HIDDEN,
            optimization_options=FusionOptions(kind), opt_level=0,
        )  # fmt: skip
        made.save_model_to_file(str(target))
    except Exception as error:  # whatever a peer raises
        return f"{type(error).__name__}: {error}"
    return target


def operators(model: Path) -> dict[str, int]:
    """All nodes, and those of ONNX Runtime's own and of norms by operator."""
    nodes = list(ir.load(model.absolute()).graph)
    fused = Counter(n.op_type for n in nodes if n.domain or "LayerNormalization" in n.op_type)
    return {"nodes": len(nodes), **dict(sorted(fused.items()))}


def in_turn(sides: Mapping[str, Path], feeds: Feeds, rounds: int, runs: int) -> dict[str, Any]:
    """Milliseconds of each side, and how many times as fast as `onnxruntime` it is."""
    sessions = {
        side: ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        for side, path in sides.items()
    }
    results = {side: session.run(None, feeds)[0] for side, session in sessions.items()}
    wanted = results["onnxruntime"]
    medians: dict[str, list[float]] = {side: [] for side in sessions}
    order = list(sessions)
    for _ in range(rounds):
        taken: dict[str, list[float]] = {side: [] for side in sessions}
        for _ in range(runs):
            for side in order:
                since = time.perf_counter()
                sessions[side].run(None, feeds)
                taken[side].append(1e3 * (time.perf_counter() - since))
            order = [*order[1:], *order[:1]]
        for side, values in taken.items():
            medians[side].append(statistics.median(values))
    found = {}
    for side, values in medians.items():
        ratios = [a / b for a, b in zip(medians["onnxruntime"], values, strict=True)]
        found[side] = {
            "ms": statistics.median(values),
            "times_as_fast": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "differs": float(np.linalg.norm(results[side] - wanted) / np.linalg.norm(wanted)),
        }
    return found


def measured(
    source: Path, kind: str, shapes: Mapping[str, Feeds], folder: Path, asked: argparse.Namespace
) -> dict[str, Any]:
    """Build the sides of one model and measure them at each shape."""
    sides, notes = {"onnxruntime": source}, {}
    kept = folder / "optimizer.onnx"
    peer = kept if kept.exists() else by_optimizer(source, kept, kind)
    if isinstance(peer, Path):
        sides["optimizer"] = peer
    else:
        notes["optimizer"] = peer
    for side, options in OURS.items():
        sides[side] = folder / f"{side}.onnx"
        if not sides[side].exists():
            made = qgraph.optimize(source, sides[side], **options)
            notes[side] = "; ".join(each for each in made.report.notes if "fusing" in each)
    return {
        "operators": {side: operators(path) for side, path in sides.items()},
        "notes": notes,
        **{name: in_turn(sides, feeds, asked.rounds, asked.runs) for name, feeds in shapes.items()},
    }


def main() -> None:
    """Measure both models, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10, help="of each side in a round")
    parser.add_argument("--keep", type=Path, help="a folder for the models, to measure again")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = {"1 × 16": texts(1, 16), "1 × 128": texts(1, 128), "8 × 64": texts(8, 64)}
    with tempfile.TemporaryDirectory() as name:
        folders = [(asked.keep or Path(name)) / each for each in ("minilm", "vit")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        pixels = folders[1] / "plain.onnx"
        if not pixels.exists():
            vision(pixels)
        found = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "onnxruntime": ort.__version__,
            "minilm": measured(minilm.build(), "bert", lines, folders[0], asked),
            "vit": measured(
                pixels, "vit", {"1 × 197": images(1), "4 × 197": images(4)}, folders[1], asked
            ),
        }
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
