"""What `--tune` chooses, timed again: is it the fastest, and if not, by how much?

    python tests/benchmarks/tune.py [--rounds 15] [--out tests/benchmarks/results/tune.json]

A model of linears of several sizes is planned twice, each time in a process and with a cache of its
own: once as a user does, `--tune` with its usual rounds; and once with more of them, which is what
the choice is judged by. For each size and purpose: the candidate chosen, the fastest one of the
second measurement at the rows that matter, and how many times as long the chosen one takes there.
A choice within 5 % of the fastest counts; prompts take 8 bits where they are within 10 % of the
fastest, and so does one weight for both cases: those are told apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

import qgraph
from qgraph import tuning
from qgraph.machine import cpu_name, usable_cores
from qgraph.one_op import float_linear
from qgraph.plan import Decision
from qgraph.purposes import FEW, PROMPT, timed_as
from qgraph.recipe import Recipe
from qgraph.tune_table import Candidate

SIZES = (
    (192, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576), (2048, 2048), (8192, 2048),
)  # fmt: skip
"""N and K: those of SmolLM2-135M, and two of a model of a billion weights."""
PURPOSES = {"decode": (FEW,), "prefill": (PROMPT,), "both": (FEW, PROMPT)}
WITHIN = 1.05


def model() -> ir.Model:
    """One linear of each size, none of them a head."""
    inputs, outputs, nodes, constants = [], [], [], []
    for at, (n, k) in enumerate(SIZES):
        one = float_linear(n, k, ir.DataType.FLOAT).graph
        (weight,), (node,), (x,) = one.initializers.values(), list(one), one.inputs
        one.remove(node)
        x.name, weight.name, node.name = f"x{at}", f"w{at}", f"linear_{n}_{k}"
        end = ir.Node("", "Neg", [node.outputs[0]], name=f"end{at}")
        node.outputs[0].name, end.outputs[0].name = f"y{at}", f"z{at}"
        end.outputs[0].type, end.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        inputs.append(ir.Value(name=x.name, shape=x.shape, type=x.type))
        constant = ir.Value(
            name=weight.name, shape=weight.shape, type=weight.type, const_value=weight.const_value
        )
        node.replace_input_with(0, inputs[-1])
        node.replace_input_with(1, constant)
        constants.append(constant)
        nodes += [node, end]
        outputs.append(end.outputs[0])
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=constants, opset_imports={"": 21}, name="linears"
    )
    return ir.Model(graph, ir_version=10)


def chosen(item: Decision, rows: int) -> str:
    """The candidate that a decision runs at a number of rows, by its name in the table."""
    which = item if item.many is None or rows < item.many.from_rows else item.many
    assert which.format is not None
    if which.activations is None:
        return which.format
    return Candidate(which.format, timed_as(Recipe(purpose="prefill"))).name


def measure(rounds: int) -> dict[str, Any]:
    """The decisions of each purpose, and all times, of this process and its cache."""
    tuning.ROUNDS = rounds or tuning.ROUNDS
    found: dict[str, Any] = {"choices": {}}
    for purpose, rows in PURPOSES.items():
        plan = qgraph.optimize(model(), dry_run=True, purpose=purpose, tune=True).plan
        found["choices"][purpose] = {
            f"{item.n}×{item.k}": {str(count): chosen(item, count) for count in rows}
            for item in plan.decisions
        }
    (file,) = (Path(os.environ["QGRAPH_CACHE"]) / "tune").glob("*.json")
    measured = json.loads(file.read_text(encoding="utf-8"))["measured"]
    found["seconds"] = {
        f"{row['n']}×{row['k']} {row['rows']} {row['candidate']}": row["seconds"]
        for row in measured
        if row["rows"] in (FEW, PROMPT) and row["seconds"] is not None
    }
    return found


def apart(rounds: int) -> dict[str, Any]:
    """`measure` in a process and with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", "--rounds", str(rounds)],
            env={**os.environ, "QGRAPH_CACHE": cache}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@dataclasses.dataclass(frozen=True)
class Judged:
    """One choice: seconds of the chosen candidate over those of the fastest, measured again."""

    purpose: str
    size: str
    rows: int
    chosen: str
    fastest: str
    ratio: float


def could_be(name: str, purpose: str, k: int) -> bool:
    """Whether `--for` may choose a candidate: see `purposes`.

    Floats and one scale for all rows are measured to compare with; groups divide the row.
    """
    if "×" in name:
        return purpose != "decode" and "× int8-row" in name
    fmt, _, group = name.partition(":group=")
    fits = bool(group) and k % int(group) == 0
    return fits and (fmt == "uint4" or (fmt == "int8" and purpose == "both"))


def judge(choices: dict[str, Any], seconds: dict[str, float]) -> list[Judged]:
    """Every choice by the second times."""
    found = []
    for purpose, sizes in choices.items():
        for size, by_rows in sizes.items():
            for rows, name in by_rows.items():
                start = f"{size} {rows} "
                mine = [key for key in seconds if key.startswith(start)]
                times = {key.removeprefix(start): seconds[key] for key in mine}
                width = int(size.partition("×")[2])
                times = {k: v for k, v in times.items() if could_be(k, purpose, width)}
                fastest = min(times, key=lambda each: times[each])
                ratio = times[name] / times[fastest]
                found.append(Judged(purpose, size, int(rows), name, fastest, ratio))
    return found


def main() -> None:
    """Measure twice, judge, print; with --out write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15, help="of the second measurement")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure here, and print JSON")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.rounds)))
        return
    first, second = apart(0), apart(arguments.rounds)
    judged = judge(first["choices"], second["seconds"])
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{usable_cores()} cores, {cpu_name()}",
        "versions": {"qgraph": qgraph.__version__, "onnxruntime": ort.__version__},
        "rounds": arguments.rounds,
        "within_5_percent": sum(each.ratio <= WITHIN for each in judged),
        "worst": max(each.ratio for each in judged),
        "choices": [dataclasses.asdict(each) for each in judged],
        "milliseconds": {key: 1e3 * value for key, value in second["seconds"].items()},
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if arguments.out is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
