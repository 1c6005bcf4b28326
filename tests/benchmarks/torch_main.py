"""SmolLM2-135M from its torch module: captured, quantized, run by torch and by ONNX Runtime.

    python tests/benchmarks/torch_main.py --out tests/benchmarks/results/torch_main.json

int4 groups of 64, float activations. Says how far the logits of both runtimes are apart, whether
the greedy texts of 32 tokens are equal, and whether the plan made from the module is the one made
from the ONNX file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

import qgraph
from qgraph.models import smollm2

PROMPT = "The capital of France is"
NEW_TOKENS = 32
QUANTIZED: dict[str, Any] = {"format": "uint4:group=64", "accuracy_level": 0}


def greedy(session: Any, ids: list[int]) -> list[int]:
    """The tokens that are most probable, one after the other, without a cache."""
    for _ in range(NEW_TOKENS):
        logits = first(session.run({"input_ids": np.array([ids], np.int64)}))
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids


def first(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logits: the module gives them no name."""
    return next(iter(outputs.values()))


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def plan_of(model: Any) -> list[tuple[str, ...]]:
    """What a plan says of each site: names, role, format, kernel."""
    plan = qgraph.optimize(model, dry_run=True, target="torch-cpu", **QUANTIZED).plan
    return [(d.site, d.weight, d.role, str(d.format), str(d.kernel)) for d in plan.decisions]


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    import tokenizers

    module = smollm2.load()
    ids = torch.arange(14).reshape(2, 7)
    axes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}}
    captured = qgraph.capture(module, kwargs={"input_ids": ids}, dynamic_shapes=axes)
    mine, files = plan_of(captured), plan_of(smollm2.build(variant="plain"))
    output = folder / "o.onnx"
    result = qgraph.optimize(captured, output, target="torch-cpu", **QUANTIZED)
    sessions = {target: qgraph.open(output, target) for target in ("torch-cpu", "ort-cpu")}
    encoder: Any = tokenizers.Tokenizer.from_file(str(smollm2.tokenizer()))
    prompt = encoder.encode(PROMPT, add_special_tokens=False).ids
    feeds = {"input_ids": np.array([prompt], np.int64)}
    logits = {name: first(each.run(feeds)) for name, each in sessions.items()}
    texts = {name: encoder.decode(greedy(each, prompt)) for name, each in sessions.items()}
    with torch.no_grad():
        eager = module(torch.tensor([prompt]))[0].numpy()
    floats = qgraph.open(captured, "torch-cpu").run(feeds)
    return {
        "summary": result.summary,
        "plans_equal": sorted(mine) == sorted(files),
        "sites": len(mine),
        "logits_apart": apart(logits["torch-cpu"], logits["ort-cpu"]),
        "texts_equal": texts["torch-cpu"] == texts["ort-cpu"],
        "text": texts["torch-cpu"],
        "float_executor_against_eager": apart(first(floats), eager),
    }


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "qgraph": qgraph.__version__,
            "onnxruntime": ort.__version__,
            "torch": torch.__version__,
        },
        **found,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
