"""Which ONNX Runtime loads what is written here, and computes it right: one op, one build each.

    python tests/benchmarks/old_runtimes.py BUILDS [--out FILE.json] [--only GLOB]

BUILDS is a folder of folders `VERSION`, each an onnxruntime as `pip install --no-deps --target`
leaves it; the installed one is tried too. Every case is a model of one op, whose results numpy
knows (`old_runtimes_cases`). Written is for each case and build "right", "refused" or how wrong it
is, and what the newest that refuses says.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from old_runtimes_cases import Case, cases

_CHILD = """
import json, sys
folder, build = sys.argv[1:3]
if build:
    sys.path.insert(0, build)
import numpy as np
import onnxruntime as ort
ort.set_default_logger_severity(4)
found = {}
for name, limit in json.load(open(folder + "/cases.json")):
    file = folder + "/" + name
    given = np.load(file + ".npz")
    try:
        session = ort.InferenceSession(file + ".onnx", providers=["CPUExecutionProvider"])
        feeds = {each.name: given["in." + each.name] for each in session.get_inputs()}
        worst = 0.0
        for output, y in zip(session.get_outputs(), session.run(None, feeds)):
            wanted = given["out." + output.name]
            if y.shape != wanted.shape:
                raise ValueError(f"{output.name} is {y.shape}, not {wanted.shape}")
            known = np.isfinite(wanted.astype(np.float64))
            apart = np.abs(y.astype(np.float64) - wanted.astype(np.float64))[known].max()
            worst = max(worst, float(apart / (np.abs(wanted.astype(np.float64)[known]).max() or 1)))
        found[name] = "right" if worst <= limit else f"wrong by {worst:.2g}"
    except Exception as error:
        words = " ".join(str(error).replace(file + ".onnx", "the model").split())
        found[name] = "refused: " + words[:160]
print(json.dumps([ort.__version__, found]))
"""


def write(folder: Path, wanted: list[Case]) -> None:
    """The models, their inputs and their results, as files that any build reads."""
    for each in wanted:
        (folder / f"{each.name}.onnx").write_bytes(each.model)
        arrays = {f"in.{name}": array for name, array in each.feeds.items()}
        arrays |= {f"out.{name}": array for name, array in each.results.items()}
        np.savez(folder / f"{each.name}.npz", **arrays)
    listed = [(each.name, each.limit) for each in wanted]
    (folder / "cases.json").write_text(json.dumps(listed))


def tried(folder: Path, build: Path | None) -> tuple[str, dict[str, str]]:
    """The version of a build, and what it does with each case; a crash is told of all."""
    command = [sys.executable, "-c", _CHILD, str(folder), str(build or "")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{build}: {done.stderr[-500:]}")
    version, found = json.loads(done.stdout.splitlines()[-1])
    return str(version), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="*")
    asked = parser.parse_args()
    wanted = [each for each in cases() if fnmatch.fnmatch(each.name, asked.only)]
    builds: list[Path | None] = [*sorted(asked.builds.iterdir(), key=_key), None]
    results: dict[str, dict[str, str]] = {each.name: {} for each in wanted}
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), wanted)
        for build in builds:
            version, found = tried(Path(name), build)
            for case, outcome in found.items():
                results[case][version] = outcome
    versions = list(next(iter(results.values())))
    print(f"{'':36}" + " ".join(f"{each:>6}" for each in versions))
    for case, outcomes in results.items():
        print(f"{case:36}" + " ".join(f"{outcomes[each].split()[0][:6]:>6}" for each in versions))
    if asked.out is not None:
        content: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "installed": onnxruntime.__version__,
            "results": {case: {v: _short(o) for v, o in each.items()} for case, each in
                        results.items()},
            "why": {case: _why(each) for case, each in results.items() if _why(each)},
        }  # fmt: skip
        asked.out.write_text(json.dumps(content, indent=1) + "\n")


def _short(outcome: str) -> str:
    return outcome.partition(":")[0]


def _why(outcomes: dict[str, str]) -> str:
    """What the newest build that refuses says."""
    said = [each for each in outcomes.values() if each.startswith("refused")]
    return said[-1].removeprefix("refused: ") if said else ""


def _key(path: Path) -> tuple[int, ...]:
    return tuple(int(each) for each in path.name.split("."))


if __name__ == "__main__":
    main()
