"""Which kernels really ran: ONNX Runtime's own profile, read back node by node."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from qgraph.runtimes.base import Feeds, KernelRun, Model
from qgraph.runtimes.ort_kernels import domains
from qgraph.runtimes.ort_session import nodes, open_session

_KERNEL = "_kernel_time"


def profile_model(
    model: Model, feeds: Feeds, *, runs: int = 10, providers: tuple[str, ...], threads: int = 0
) -> list[KernelRun]:
    """Profile `runs` runs after one to warm up, as users run the model: fully optimized.

    Names are those of the graph that ONNX Runtime's optimizer made: nodes that it fused have
    new names, nodes that it left (MatMulNBits and GatherBlockQuantized among them) their own.
    """
    with tempfile.TemporaryDirectory(prefix="qgraph-", ignore_cleanup_errors=True) as folder:
        session = open_session(
            model, providers=providers, threads=threads, profile_prefix=str(Path(folder) / "ort")
        )
        try:
            for _ in range(runs + 1):
                session.run(feeds)
        finally:
            path = Path(session.inner.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
    known = {node.name: node.domain for node in nodes(model) if node.name}
    return _kernel_runs(events, runs, known)


def _kernel_runs(events: list[dict[str, Any]], runs: int, known: dict[str, str]) -> list[KernelRun]:
    """The kernels of the last `runs` runs by node, in order of first execution."""
    starts = sorted(e["ts"] for e in events if e.get("name") == "model_run")
    start = starts[-runs] if len(starts) > runs else 0
    times: dict[tuple[str, str, str], list[float]] = {}
    for event in sorted(events, key=lambda e: e.get("ts", 0)):
        if event.get("cat") != "Node" or not event["name"].endswith(_KERNEL):
            continue
        if event["ts"] < start:
            continue
        args = event["args"]
        key = (event["name"].removesuffix(_KERNEL), args["op_name"], args.get("provider", ""))
        times.setdefault(key, []).append(float(event["dur"]))
    return [
        KernelRun(node, op, _domain(node, op, known), provider, *_typical(each, runs))
        for (node, op, provider), each in times.items()
    ]


def _typical(durations: list[float], runs: int) -> tuple[int, float]:
    """Calls of one run, and their time together: the median of the runs, which noise moves less."""
    calls = max(1, len(durations) // runs)
    each = [sum(durations[at : at + calls]) for at in range(0, calls * runs, calls)]
    return calls, statistics.median(each)


def _domain(node: str, op: str, known: dict[str, str]) -> str:
    """The domain of a node that ran; the profile leaves it out."""
    if node in known:
        return known[node]
    found = domains(op)
    return "" if "" in found or not found else min(found)
