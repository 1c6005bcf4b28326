"""SmolLM2-135M as a decoder beside the int4 model of onnxruntime-genai's builder, one command.

    python tests/benchmarks/decode.py --genai-python ENV/bin/python --genai-model FOLDER \
        --text TEXT --out tests/benchmarks/results/decode.json

The folder is what `python -m onnxruntime_genai.models.builder -i HF -o FOLDER -p int4 -e cpu` made
of the same weights; ours is `optimize` on the plain export with past key values, at the builder's
format (int4, blocks of 32, head and embedding too). Each figure is a process of its own; sides
alternate, and the order turns from round to round; ratios of medians, with the range over the
rounds. `loop`: a bare loop around the graph with an argmax, the same for all sides (past and
present in one buffer; the float export, whose cache is concatenated, gets presents as pasts), with
the weights where ONNX Runtime put them; in `loop_large_pages` both sides' are moved to large pages,
as our decoder does. `generate`: `qgraph generate`'s own code, and onnxruntime-genai's generator,
with sampling. `quality`: KL at the same format, and what blocks differ by, with its standard error:
codes differ in ties alone, but activations that are rounded to int8 make noise of any difference.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import qgraph
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2
from qgraph.text import token_blocks

HERE = Path(__file__).parent
LOOP, LONG, AFTER = (64, 128), (256, 32), (512, 256)
"""Tokens of a prompt and after it: the loop, a longer prompt, and the memory of a long text."""
BLOCKS, LENGTH = 8, 256
FORMAT = "int4:group=32,scale=signed"
"""The builder's: symmetric, the largest of a block at code -8."""
Command = list[str]


def ran(command: Command) -> dict[str, Any]:
    """The last line that a process prints, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_turn(sides: dict[str, Command], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Every side in each round, in an order that turns."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    order = list(sides)
    for _ in range(rounds):
        for side in order:
            found[side].append(ran(sides[side]))
        order = [*order[1:], *order[:1]]
    return found


def summed(found: dict[str, list[dict[str, Any]]], key: str, better: int = 1) -> dict[str, Any]:
    """The median of each side, and ours over every other side: above 1 ours is faster."""
    rounds = {side: [each[key] for each in runs] for side, runs in found.items()}
    result: dict[str, Any] = {
        side: {"median": statistics.median(values), "rounds": values}
        for side, values in rounds.items()
    }
    for side, values in rounds.items():
        if side == "ours":
            continue
        ratios = [(a / b) ** better for a, b in zip(rounds["ours"], values, strict=True)]
        ratio = (statistics.median(rounds["ours"]) / statistics.median(values)) ** better
        result[f"ours over {side}"] = {"value": ratio, "low": min(ratios), "high": max(ratios)}
    return result


def loops(
    models: dict[str, Command], tokens: tuple[int, int], rounds: int, pages: str = "small"
) -> dict[str, Any]:
    """Bare loops: `models` are a path and `share` or `grow` each; pages: `small` or `large`."""
    loop = [sys.executable, str(HERE / "decode_loop.py")]
    sides = {
        side: [*loop, path, *map(str, tokens), how, "0", pages]
        for side, (path, how) in models.items()
    }
    found = in_turn(sides, rounds)
    return {
        "tokens": tokens,
        "decode_tokens_per_second": summed(found, "tokens_per_second"),
        "prompt_ms": summed(found, "prompt_ms", better=-1),
        "peak_mb": {side: runs[-1]["peak_mb"] for side, runs in found.items()},
        "large_pages_mb": {side: runs[-1]["large_pages_mb"] for side, runs in found.items()},
        "grown_mb": {
            side: runs[-1]["peak_mb"] - runs[-1]["prompt_peak_mb"] for side, runs in found.items()
        },
        "first_tokens": {side: runs[-1]["tokens"] for side, runs in found.items()},
    }


def generators(
    ours: Path, folder: Path, python: str, tokens: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """`qgraph generate` and onnxruntime-genai's generator, sampling and text included."""
    numbers = [str(each) for each in tokens]
    found = in_turn(
        {
            "ours": [
                sys.executable,
                str(HERE / "decode_ours.py"),
                str(ours),
                str(folder),
                *numbers,
            ],
            "genai": [python, str(HERE / "decode_genai.py"), str(folder), *numbers],
        },
        rounds,
    )
    return {
        "tokens": tokens,
        "decode_tokens_per_second": summed(found, "decode_tokens_per_second"),
        "prompt_tokens_per_second": summed(found, "prompt_tokens_per_second"),
        "peak_mb": {side: runs[-1]["peak_mb"] for side, runs in found.items()},
        "onnxruntime_genai": found["genai"][-1]["version"],
    }


def scores(model: str, ids: np.ndarray, head: int) -> np.ndarray:
    """Logits [T, V] of a text, read at once with an empty past."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    length = ids.shape[1]
    known = {
        "input_ids": ids,
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
    }
    feeds = {}
    for each in session.get_inputs():
        empty = np.zeros((1, each.shape[1], 0, head), np.float32) if len(each.shape) == 4 else None
        feeds[each.name] = known[each.name] if empty is None else empty
    return np.asarray(session.run(["logits"], feeds)[0])


def quality(models: dict[str, str], text: Path, tokenizer: Path) -> dict[str, Any]:
    """KL to the float export in nats a token, over blocks of a text, every position."""
    ids, _ = token_blocks(text, tokenizer, sequence=LENGTH, samples=BLOCKS)
    found: dict[str, list[float]] = {side: [] for side in models if side != "float"}
    for block in ids:
        wanted = scores(models["float"], block[None], 64)[0]
        for side in found:
            given = scores(models[side], block[None], 64)[0]
            found[side].append(float(qgraph.kl_divergence(wanted, given).mean()))
    apart = np.subtract(found["ours"], found["genai"])
    return {
        "blocks": [len(ids), LENGTH],
        "kl": {side: float(np.mean(values)) for side, values in found.items()},
        "ours less genai": {
            "mean": float(apart.mean()),
            "standard_error": float(apart.std(ddof=1) / len(apart) ** 0.5),
        },
    }


def megabytes(model: Path) -> float:
    """MB of a model with its data files, which begin with its name."""
    files = [model, *model.parent.glob(f"{model.stem}*data")]
    files += list(model.parent.glob(f"{model.name}.data"))
    return sum(path.stat().st_size for path in set(files)) / 1e6


def main() -> None:
    """Build ours, measure all sides, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--genai-python", required=True, help="the peer's environment's python")
    parser.add_argument("--genai-model", required=True, type=Path, help="the peer's folder")
    parser.add_argument("--ours", type=Path, help="a model that is there, instead of building it")
    parser.add_argument("--solved", type=Path, help="one that a solver made, for its KL")
    parser.add_argument("--text", type=Path, help="for the KL; left out without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, one round")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(asked, Path(folder))
    text = json.dumps(found, indent=2) + "\n"
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    source, ours = smollm2.build(variant="past"), asked.ours
    if ours is None:
        ours = folder / "ours.onnx"
        qgraph.optimize(source, ours, format=FORMAT, embedding=FORMAT)
    peer = asked.genai_model.absolute() / "model.onnx"
    rounds = 1 if asked.quick else asked.rounds
    sizes = [
        (max(4, a // 10), max(4, b // 10)) if asked.quick else (a, b)
        for a, b in (LOOP, LONG, AFTER)
    ]
    both = {"ours": [str(ours), "share"], "genai": [str(peer), "share"]}
    models = {"ours": str(ours), "genai": str(peer), "float": str(source)}
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "onnxruntime": ort.__version__,
        "file_mb": {"ours": megabytes(ours), "genai": megabytes(peer)},
        "loop": loops({**both, "float": [str(source), "grow"]}, sizes[0], rounds),
        "loop_large_pages": loops(both, sizes[0], rounds, "large"),
        "loop_long_prompt": loops(both, sizes[1], rounds),
        "generate": generators(ours, peer.parent, asked.genai_python, sizes[0], rounds),
        "generate_long_prompt": generators(ours, peer.parent, asked.genai_python, sizes[1], rounds),
        "memory": loops(both, sizes[2], 1)["grown_mb"],
    }
    cache = 30 * 2 * 3 * 64 * 4 * sum(sizes[2])  # layers, key and value, heads, size, float32
    found["memory"]["cache_mb"] = cache / 1e6
    if asked.solved is not None:
        models["ours, solved"] = str(asked.solved)
    if asked.text is not None:
        found["quality"] = quality(models, asked.text, smollm2.tokenizer())
    return found


if __name__ == "__main__":
    main()
