"""SmolLM2-135M on a prompt and on one token, by what it was made for.

    python tests/benchmarks/prefill.py --text TEST --calibrate TRAIN [--models FOLDER] \
        --out tests/benchmarks/results/prefill.json

A prompt of 256 tokens: `--for prefill` against float and against 4 bits (groups of 64). One token
without a cache: `--for both` against `--for decode`. Each figure is a process of its own, the sides
alternate, and the order turns; ratios with their spread over the rounds. Kernels are chosen by
times measured here (`--tune`), kept in the user's cache. With `--calibrate`, prefill models with
smoothed channels besides: with scales chosen activation by activation (`int8-auto`,
what `--for prefill` takes), also with float columns where they are far larger than others; and with
8 float columns everywhere and a scale for each row; and the first of these beside float from the
other export, the exporter's defaults. With `--models` the models stay in a folder, and are taken
from it the next time: make them with `--rounds 0`, and time them when the machine is idle. With
`--text`, what each loses (KL to float, nats a token, blocks of 256 tokens).
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

import onnxruntime as ort

import qgraph
from qgraph.machine import cpu_name, usable_cores
from qgraph.models import smollm2

HERE = Path(__file__).parent
PROMPT, TOKEN = 256, 1
OUTLIERS = 8
THRESHOLD = "4.5"
"""In float stay columns whose largest input is this many times that of the median one."""


def asked(calibrate: Path | None, samples: int) -> dict[str, dict[str, Any]]:
    """Options of each model, by side; `default` is from the exporter's default graph."""
    found: dict[str, dict[str, Any]] = {
        "int4": {"group": 64},
        **{name: {"purpose": name, "tune": True} for name in ("decode", "prefill", "both")},
    }
    if calibrate is not None:
        smoothed = {
            "purpose": "prefill", "tune": True, "solver": "smoothquant+rtn",
            "calibrate": str(calibrate), "samples": samples,
            "tokenizer": str(smollm2.tokenizer()),
        }  # fmt: skip
        columns = {**smoothed, "outliers": OUTLIERS}
        found["prefill_auto"] = smoothed
        few = {"lower_w8a8.threshold": THRESHOLD}
        found["prefill_auto_columns"] = {**columns, "options": few}
        found["prefill_smoothed"] = {**columns, "activations": "int8-row"}
        found["prefill_auto_default"] = smoothed
    return found


def source_of(side: str) -> Path:
    """The float model of a side."""
    return smollm2.build(variant="default" if side.endswith("_default") else "plain")


def made(folder: Path, calibrate: Path | None, samples: int) -> dict[str, Any]:
    """The models, by side, with what `optimize` says of each; those in `folder` as they are."""
    notes = folder / "made.json"
    found = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    for side, options in asked(calibrate, samples).items():
        if side in found:
            continue
        result = qgraph.optimize(source_of(side), folder / f"{side}.onnx", force=True, **options)
        totals = result.report.totals
        second = [item.many for item in result.plan.decisions if item.many is not None]
        found[side] = {
            "mb": totals["bytes_after"] / 1e6,
            "kernels": totals["kernels"],
            "second_weights": len(second),
            "from_rows": second[0].from_rows if second else None,
            "times": [str(each) for each in result.times],
        }
        notes.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    return found


def run(model: Path, rows: int, seconds: float) -> float:
    """Milliseconds of one run in a process of its own."""
    command = [sys.executable, str(HERE / "one_session.py"), str(model), str(rows), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}\n{done.stderr}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["ms"])


def alternated(
    models: dict[str, Path], rows: int, base: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Times of all sides, and how many times as long as `base` each takes.

    ratio: of medians. of_least: of the least times. pairs: the median of the rounds' own ratios,
    with their quartiles and range.
    """
    times: dict[str, list[float]] = {side: [] for side in models}
    order = list(models)
    for _ in range(rounds):
        for side in order:
            times[side].append(run(models[side], rows, seconds))
        order = [*order[1:], *order[:1]]
    result: dict[str, Any] = {"rows": rows, "of": base, "rounds": rounds, "sides": {}}
    for side, taken in times.items():
        ratios = sorted(a / b for a, b in zip(taken, times[base], strict=True))
        result["sides"][side] = {
            "ms": statistics.median(taken),
            "least_ms": min(taken),
            "ratio": statistics.median(taken) / statistics.median(times[base]),
            "of_least": min(taken) / min(times[base]),
            "pairs": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "range": [ratios[0], ratios[-1]],
        }
    return result


def losses(models: dict[str, Path], text: Path, samples: int) -> dict[str, float]:
    """KL to float by side; a model for both runs its second weights on blocks of 256 tokens."""
    found = {}
    for side, model in models.items():
        compared = qgraph.compare(
            source_of(side), model, text=text, tokenizer=smollm2.tokenizer(), samples=samples,
            sequence=PROMPT, sites=False,
        )  # fmt: skip
        assert compared.divergence is not None
        found[side] = compared.divergence.mean
    return found


def main() -> None:
    """Run every part and print the result; with --out write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--calibration-samples", type=int, default=16)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--token-rounds", type=int, help="of one token; twice --rounds by default")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--models", type=Path, help="keep the models here")
    arguments = parser.parse_args()
    if arguments.models is not None:
        arguments.models.mkdir(parents=True, exist_ok=True)
        measured(arguments.models, arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measured(Path(folder), arguments)


def measured(folder: Path, arguments: argparse.Namespace) -> None:
    """See `main`."""
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{usable_cores()} cores, {cpu_name()}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
    }
    result["models"] = made(folder, arguments.calibrate, arguments.calibration_samples)
    models = {side: folder / f"{side}.onnx" for side in result["models"]}
    if arguments.rounds:
        default = {k: v for k, v in models.items() if k.endswith("_default")}
        sides = {k: v for k, v in models.items() if k not in (*default, "decode")}
        timing = (arguments.rounds, arguments.seconds)
        prompt = {"float": source_of("float"), **sides}
        base = "prefill_auto" if "prefill_auto" in models else "prefill"
        result["prompt"] = alternated(prompt, PROMPT, base, *timing)
        if default:
            other = {"float": source_of("_default"), **default}
            result["prompt_default"] = alternated(other, PROMPT, "prefill_auto_default", *timing)
    # Runs this short are noisier, and cheap.
    if token_rounds := arguments.token_rounds or 2 * arguments.rounds:
        token = {"float": source_of("float")}
        token |= {k: v for k, v in models.items() if "prefill" not in k}
        result["token"] = alternated(token, TOKEN, "decode", token_rounds, arguments.seconds / 2)
    if arguments.text is not None:
        result["kl"] = losses(models, arguments.text, arguments.samples)
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
