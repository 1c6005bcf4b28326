"""Linears that calibration data does not reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

import qgraph

K = 64


def test_a_linear_that_no_token_reached_is_rounded_and_says_so(tmp_path: Path) -> None:
    """An expert that the router never chose: no solver did what was asked, nor is it named."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[B, {K}] x, bool[B] chosen) => (float[C, {K}] e, float[B, {K}] y) {{
        rows = Compress<axis = 0>(x, chosen) e = MatMul(rows, we) y = MatMul(x, wy)
    }}"""
    proto, rng = parser.parse_model(text), np.random.default_rng(0)
    for node, name in zip(proto.graph.node, ("choose", "expert", "dense"), strict=True):
        node.name = name
    arrays = {name: rng.standard_normal((K, K)).astype(np.float32) for name in ("we", "wy")}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    onnx.save(proto, tmp_path / "m.onnx")
    data = [{"x": rng.standard_normal((40, K)).astype(np.float32)} for _ in range(2)]
    feeds = [{**each, "chosen": np.zeros(len(each["x"]), bool)} for each in data]
    output = tmp_path / "o.onnx"
    result = qgraph.optimize(tmp_path / "m.onnx", output, solver="gptq", calibrate=feeds)
    expert, dense = result.plan["expert"], result.plan["dense"]
    assert (expert.solver, expert.reason) == ("rtn", "SOLVER_FELL_BACK")
    assert "no token of the calibration data reaches it" in expert.detail
    assert (dense.solver, dense.reason) == ("gptq", None)
    (entry,) = [
        p for p in onnx.load(output, load_external_data=False).metadata_props if p.key == "qgraph"
    ]
    sites = json.loads(entry.value)["sites"]
    assert [sites[name]["solver"] for name in ("expert", "dense")] == ["rtn", "gptq"]
