from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph.runtimes import ort_profile
from qgraph.runtimes.ort import CPU
from qgraph.runtimes.ort_profile import _own_times

BITS = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[M, 32] x, uint8[32, 1, 16] b, float[32, 1] s, float[32, 32] w) => (float[M, 32] y) {
    [layer_0] a = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 32> (x, b, s)
    [layer_1] c = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 32> (a, b, s)
    [float_layer] d = MatMul(c, w)
    [activation] y = Relu(d)
}
"""
LOOP = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x) => (float[2] y)
<int64 count = {5}, bool go = {1}> {
    [the_loop] y = Loop (count, go, x) <body = body (int64 i, bool c, float[2] a)
        => (bool d, float[2] b) {
        d = Identity(c)
        [inner] b = Sin(a)
    }>
}
"""


def test_each_node_that_ran_with_its_kernel(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(BITS)
    feeds = {
        "x": np.ones((4, 32), np.float32),
        "b": np.ones((32, 1, 16), np.uint8),
        "s": np.ones((32, 1), np.float32),
        "w": np.ones((32, 32), np.float32),
    }
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    for given in (path, model.SerializeToString()):
        runs = CPU.profile(given, feeds, runs=2)
        fused = [run for run in runs if run.op == "MatMulNBits"]
        assert [run.node for run in fused] == ["layer_0", "layer_1"]
        assert {(r.domain, r.provider, r.calls) for r in fused} == {
            ("com.microsoft", "CPUExecutionProvider", 1)
        }
        assert all(run.microseconds > 0 for run in fused)
        assert Counter(run.op for run in runs)["MatMul"] == 1
        assert all(run.domain == "" for run in runs if run.op in ("MatMul", "Relu"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"], "no profile stays behind"


def test_all_calls_of_one_run_are_added_up() -> None:
    model = onnx.parser.parse_model(LOOP).SerializeToString()
    for runs in (1, 3):
        found = CPU.profile(model, {"x": np.ones(2, np.float32)}, runs=runs)
        inner = [run for run in found if run.op == "Sin"]
        assert [(run.node, run.calls) for run in inner] == [("inner", 5)]
        loop = next(run for run in found if run.op == "Loop")
        assert loop.calls == 1


def test_what_runs_others_is_charged_for_itself_alone() -> None:
    def event(ts: int, dur: int, op: str) -> dict[str, Any]:
        return {"ts": ts, "dur": dur, "args": {"op_name": op}}

    events = [
        event(0, 100, "If"), event(10, 50, "Loop"), event(15, 5, "Sin"), event(20, 30, "Sin"),
        event(60, 20, "Add"), event(100, 7, "Mul"), event(107, 3, "If"),
    ]  # fmt: skip
    assert _own_times(events) == [30, 15, 5, 30, 20, 7, 3]
    assert sum(_own_times(events)) == 110


FUNCTION = """
<ir_version: 10, opset_import: ["" : 21, "qgraph" : 1]>
g (float[4] x) => (float[4] y) {
    [first] a = qgraph.Twice (x)
    [second] y = qgraph.Twice (a)
}
<domain: "qgraph", opset_import: ["" : 21]>
Twice (v) => (w) {
    s = Sin(v)
    w = Sin(s)
}
"""


@pytest.mark.parametrize("writable", [True, False])
def test_bodies_of_functions_are_called_after_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(FUNCTION), path)
    if not writable:

        def refuse(*_: object) -> Path:
            raise PermissionError

        monkeypatch.setattr(ort_profile, "write_beside", refuse)
    graph = ir.load(path)
    for given in (path, path.read_bytes(), graph):
        runs = CPU.profile(given, {"x": np.ones(4, np.float32)}, runs=2)
        names = [run.node for run in runs]
        if writable or given is not path:
            assert names == ["first/Sin", "first/Sin/1", "second/Sin", "second/Sin/1"]
        assert [run.op for run in runs] == ["Sin"] * 4
    assert len(graph.functions) == 1, "the caller's graph is not changed"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]
