"""Float16 products of int8 activations, between ops that ONNX Runtime has in float32 alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import qgraph
from qgraph.scopes import nodes

K, N = 64, 128
BODY = "m = Mul (x, gain) l = MatMul (m, weight) {last}"
LAST = "s = Sigmoid (l) y = Mul (l, s)"
LEVELS = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
RNG = np.random.default_rng(0)
GAIN = RNG.standard_normal(K).astype(np.float16)
WEIGHT = (RNG.standard_normal((K, N)) / 8).astype(np.float16)
X = RNG.standard_normal((1, 3, K)).astype(np.float16)


def model(path: Path, body: str) -> Path:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float16[B, S, {K}] x, bool c) => (float16[B, S, {N}] z) {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {"gain": GAIN, "weight": WEIGHT} | ({"other": -WEIGHT} if "other" in body else {})
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items()
    )
    onnx.save(proto, path)
    return path


def branches(last: str = LAST) -> str:
    """The same product in both bodies of an If, of one weight."""
    then, other = (f"{BODY.format(last=last)}".replace("y =", f"{name} =") for name in ("y", "q"))
    return (
        f"z = If (c) <then_branch = a () => (float16[B, S, {N}] y) {{ {then} }}, "
        f"else_branch = b () => (float16[B, S, {N}] q) {{ {other} }}>"
    )


def optimized(source: Path, level: str) -> Path:
    output = source.with_name(f"level{level}.onnx")
    options = {"format": "int4", "group": 32, "min_elements": 0, "accuracy_level": level}
    qgraph.optimize(source, output, **options)
    return output


def computed(path: Path, level: ort.GraphOptimizationLevel) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options)
    feeds = {"x": X, "c": np.array(True)}
    (found,) = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
    return np.asarray(found, np.float64)


@pytest.mark.parametrize("body", [branches(), BODY.format(last=LAST).replace("y =", "z =")])
def test_it_computes_what_it_is_without_int8(tmp_path: Path, body: str) -> None:
    source = model(tmp_path / "m.onnx", body)
    wanted = computed(optimized(source, "0"), LEVELS[0])
    made = optimized(source, "4")
    for level in LEVELS:
        assert np.abs(computed(made, level) - wanted).max() < 0.03 * np.abs(wanted).max()
    graph = ir.load(made).graph
    scales = [v for name, v in graph.initializers.items() if "scales" in name]
    assert [value.dtype for value in scales] == [ir.DataType.FLOAT]  # one, however many read it
    products = [node for node in nodes(graph) if node.op_type == "MatMulNBits"]
    assert {node.attributes["accuracy_level"].as_int() for node in products} == {4}
    again = qgraph.optimize(made, made.with_name("again.onnx"), format="float")
    assert not [step for step in again.report.steps if step.pass_name == "widen_products"]
    stored = again.graph.model.graph
    assert Counter(n.op_type for n in nodes(stored)) == Counter(n.op_type for n in nodes(graph))


TWO = """m = Mul (x, gain) a = MatMul (m, weight) b = MatMul (m, other)
    s = Sigmoid (a) t = Sigmoid (b) z = Mul (s, t)"""


@pytest.mark.parametrize(
    "body, options, count",
    [
        (branches(), {"purpose": "both"}, 2),
        (BODY.format(last=LAST).replace("y =", "z ="), {"purpose": "both"}, 0),
        (BODY.format(last=LAST).replace("y =", "z ="), {"format": "int8", "group": 32}, 1),
        (BODY.format(last=LAST).replace("y =", "z ="), {"format": "uint4:group=32,zero=float"}, 1),
        (TWO, {"format": "int4", "group": 32}, 2),
        (TWO, {"purpose": "both", "format": "int4", "group": 32}, 0),
    ],
    ids=["body both", "both", "int8", "minimums", "two", "two both"],
)
def test_the_plan_counts_scales_as_they_are_written(
    tmp_path: Path, body: str, options: dict[str, Any], count: int
) -> None:
    """A second weight for many rows puts the product in a body with nothing else: not widened."""
    source = model(tmp_path / "m.onnx", body)
    options = {**options, "min_elements": 0, "accuracy_level": "4"}
    planned = qgraph.optimize(source, None, dry_run=True, **options).plan
    done = qgraph.optimize(source, tmp_path / "o.onnx", **options)
    graph = ir.load(tmp_path / "o.onnx").graph
    constants = {
        name: value.const_value
        for scope in (graph, *graph.subgraphs())
        for name, value in scope.initializers.items()
        if value.const_value is not None
    }
    parts = ("codes", "scales", "zeros", "minimums")
    written = sum(each.nbytes for name, each in constants.items() if any(p in name for p in parts))
    for plan in (planned, done.plan):
        assert sum(i.packed_bytes for i in plan.decisions if i.shared_with is None) == written
    assert sum(item.widened > 0 for item in done.plan.decisions) == count
    assert sum(step.pass_name == "widen_products" for step in done.report.steps) == count


def test_products_that_stay_in_float16_are_left_alone(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx", branches("y = Identity (l)"))
    made = optimized(source, "4")
    wanted = computed(optimized(source, "0"), LEVELS[0])
    assert np.abs(computed(made, LEVELS[0]) - wanted).max() < 0.03 * np.abs(wanted).max()
    assert not [node for node in nodes(ir.load(made).graph) if node.op_type == "Cast"]


def test_a_file_that_came_packed_is_widened_too(tmp_path: Path) -> None:
    made = optimized(model(tmp_path / "m.onnx", branches()), "0")
    proto = onnx.load(made)
    for attribute in proto.graph.node[0].attribute:
        for node in attribute.g.node:
            for each in node.attribute:
                if each.name == "accuracy_level":
                    each.i = 4
    onnx.save(proto, tmp_path / "other.onnx")
    assert not computed(tmp_path / "other.onnx", LEVELS[0]).any()  # else the pass has no reason
    qgraph.optimize(tmp_path / "other.onnx", tmp_path / "mended.onnx", format="float")
    wanted = computed(made, LEVELS[0])
    assert (
        np.abs(computed(tmp_path / "mended.onnx", LEVELS[0]) - wanted).max()
        < 0.03 * np.abs(wanted).max()
    )
