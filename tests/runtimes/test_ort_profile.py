from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx

from qgraph.runtimes.ort import CPU

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
        assert loop.microseconds >= inner[0].microseconds
