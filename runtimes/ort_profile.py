"""Which kernels really ran: ONNX Runtime's own profile, read back node by node."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qgraph.beside import data_lies_elsewhere, write_beside
from qgraph.function_inlining import inline_functions
from qgraph.runtimes.base import Feeds, KernelRun, Model
from qgraph.runtimes.ort_kernels import domains
from qgraph.runtimes.ort_session import graph_of, nodes, open_session

_KERNEL = "_kernel_time"
_WITH_BODIES = ("If", "Loop", "Scan")
"""What runs other nodes within its own time."""


def profile_model(
    model: Model, feeds: Feeds, *, runs: int = 10, providers: tuple[str, ...], threads: int = 0
) -> list[KernelRun]:
    """Profile `runs` runs after one to warm up, as users run the model: fully optimized.

    Names are those of the graph that ONNX Runtime's optimizer made: nodes that it fused have
    new names, nodes that it left (MatMulNBits and GatherBlockQuantized among them) their own.
    Bodies of functions, which it would inline under names of its own, are called after the call.
    """
    with tempfile.TemporaryDirectory(prefix="qgraph-", ignore_cleanup_errors=True) as folder:
        prefix = str(Path(folder) / "ort")
        with _inlined(model) as plain:
            session = open_session(
                plain, providers=providers, threads=threads, profile_prefix=prefix
            )
        try:
            for _ in range(runs + 1):
                session.run(feeds)
        finally:
            path = Path(session.inner.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
    known = {node.name: node.domain for node in nodes(model) if node.name}
    return _kernel_runs(events, runs, known)


@contextlib.contextmanager
def _inlined(model: Model) -> Iterator[Model]:
    """`model` without calls of functions; a copy beside its file is gone when this ends."""
    graph = graph_of(model)
    if not graph.functions:
        yield model
        return
    graph = graph.clone() if graph is model else graph
    inline_functions(graph, keep=lambda function: False)
    _number_alike(graph)
    if isinstance(model, ir.Model) or (
        not isinstance(model, bytes) and data_lies_elsewhere(Path(model), graph)
    ):
        yield graph
        return
    content = ir.serde.serialize_model(graph).SerializeToString()
    if isinstance(model, bytes):
        yield content
        return
    try:
        copy = write_beside(Path(model), content)
    except OSError:  # a folder that cannot be written: names are then the runtime's
        yield model
        return
    try:
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _number_alike(graph: ir.Model) -> None:
    """Give nodes of one name numbers: `CALL/Slice`, `CALL/Slice/1`, …; ONNX Runtime wants that."""
    seen: Counter[str] = Counter()
    for scope in graph.graphs():
        for node in scope:
            name = node.name or ""
            if seen[name]:
                node.name = f"{name}/{seen[name]}"
            seen[name] += 1


def _kernel_runs(events: list[dict[str, Any]], runs: int, known: dict[str, str]) -> list[KernelRun]:
    """The kernels of the last `runs` runs by node, in order of first execution."""
    starts = sorted(e["ts"] for e in events if e.get("name") == "model_run")
    start = starts[-runs] if len(starts) > runs else 0
    ran = [
        event
        for event in sorted(events, key=lambda e: (e.get("ts", 0), -e.get("dur", 0)))
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL) and event["ts"] >= start
    ]
    times: dict[tuple[str, str, str], list[float]] = {}
    shapes = {}
    for event, own in zip(ran, _own_times(ran), strict=True):
        args = event["args"]
        key = (event["name"].removesuffix(_KERNEL), args["op_name"], args.get("provider", ""))
        times.setdefault(key, []).append(own)
        shapes[key] = (_shapes(args, "input_type_shape"), _shapes(args, "output_type_shape"))
    return [
        KernelRun(key[0], key[1], _domain(*key[:2], known), key[2], *_typical(each, runs),
                  *shapes[key])
        for key, each in times.items()
    ]  # fmt: skip


def _shapes(args: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], ...]:
    """Those of an event, each given as `{"float": [1, 128]}`."""
    return tuple(tuple(dims) for each in args.get(name, []) for dims in each.values())


def _own_times(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Durations in order of their start, less those of the nodes in their bodies."""
    own = [float(event["dur"]) for event in events]
    around: list[int] = []
    for at, event in enumerate(events):
        while around and event["ts"] >= events[around[-1]]["ts"] + events[around[-1]]["dur"]:
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        if event["args"]["op_name"] in _WITH_BODIES:
            around.append(at)
    return [max(0.0, time) for time in own]


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
