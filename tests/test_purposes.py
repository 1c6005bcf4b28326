"""`--for`: what the table says is what the plan says; without one the rule; --set wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.capabilities import Capabilities
from qgraph.errors import InputError
from qgraph.models import tiny
from qgraph.pipeline import capture, optimize
from qgraph.plan import QuantPlan
from qgraph.purposes import FROM_ROWS, ROWS, candidates_of, plan_for, sizes_of
from qgraph.recipe import FLOAT, Override, Recipe
from qgraph.runtimes.ort import CPU
from qgraph.size_times import RowTimes, SizeTimes
from qgraph.tune_table import Candidate, Machine, Measured, Table

N, K = 96, 256
W8A8 = Candidate("int8-pairs", "int8-row")
HERE = Machine("CPU", 1, "Runtime")
UINT4, INT8 = "uint4:group=64", "int8:group=64"


@pytest.fixture(scope="module")
def graph() -> Any:
    """A linear that is no head, and a head."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["M", K]), type=ir.TensorType(ir.DataType.FLOAT))
    weights = []
    for name, shape in (("w", (K, N)), ("v", (N, 4 * N))):
        array = ir.tensor(rng.standard_normal(shape).astype(np.float32), name=name)
        weights.append(
            ir.Value(
                name=name, shape=ir.Shape(shape), type=ir.TensorType(array.dtype),
                const_value=array,
            )
        )  # fmt: skip
    first = ir.node("MatMul", [x, weights[0]], name="linear")
    head = ir.node("MatMul", [first.outputs[0], weights[1]], name="head")
    head.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    inner = ir.Graph(
        [x], [head.outputs[0]], nodes=[first, head], initializers=weights,
        opset_imports={"": 21}, name="two",
    )  # fmt: skip
    return capture(ir.Model(inner, ir_version=10))


def table(**times: dict[int, float]) -> Table:
    """Milliseconds of the linear `[N, K]`; `w8a8` and `float` besides formats with `_`."""
    names = {"w8a8": W8A8.name, "float": FLOAT, "uint4": UINT4, "int8": INT8}
    found: dict[Measured, float | None] = {}
    for key, by_rows in times.items():
        name = names.get(key) or key.replace("_", ":group=")
        for rows, time in by_rows.items():
            found[Measured(N, K, "float", name, rows)] = time
    return Table(HERE, found)


def planned(
    graph: Any, measured: Table, capabilities: Capabilities | None = None, **recipe: Any
) -> tuple[QuantPlan, list[str]]:
    asked = Recipe(**{"min_elements": 1, **recipe})
    known = capabilities or CPU.capabilities()
    found = plan_for(graph.sites(), asked, known, measured, graph.model.graph)
    return found.plan, [*found.notes, *map(str, found.times)]


def linear(graph: Any, measured: Table, **recipe: Any) -> Any:
    return planned(graph, measured, **recipe)[0]["linear"]


def test_by_rule(graph: Any) -> None:
    few = linear(graph, Table(HERE), purpose="decode")
    assert (few.format, few.activations, few.many) == (UINT4, None, None)
    prompt = linear(graph, Table(HERE), purpose="prefill")
    assert (prompt.format, prompt.activations, prompt.many) == ("int8-pairs", "int8-auto", None)
    both = linear(graph, Table(HERE), purpose="both")
    assert (both.format, both.many.format, both.many.from_rows) == (UINT4, "int8-pairs", FROM_ROWS)
    assert both.packed_bytes == few.packed_bytes + prompt.packed_bytes
    for decision in (few, prompt, both):
        assert "by rule" in decision.detail
    assert f"from {FROM_ROWS} rows {both.many.kernel}" in both.detail


@pytest.mark.parametrize("purpose", ["prefill", "both"])
def test_a_size_without_times_of_integer_kernels_goes_by_rule_and_says_so(
    graph: Any, purpose: str
) -> None:
    """A table may be of a version that measured other candidates."""
    part = table(uint4={1: 1.0, 256: 2.0}, float={1: 1.0, 256: 3.0})
    plan, notes = planned(graph, part, purpose=purpose)
    assert "by rule" in plan["linear"].detail
    rounded = plan["linear"].many if purpose == "both" else plan["linear"]
    assert rounded.activations == "int8-auto"
    assert len(notes) == 1
    assert notes[0].startswith(f"--for {purpose} goes by rule for 2 of 2 linears")
    # What was tried and does not run is no reason to go by rule.
    part.seconds |= {Measured(N, K, "float", W8A8.name, rows): None for rows in (1, 256)}
    assert "by measured times" in planned(graph, part, purpose=purpose)[0]["linear"].detail


def test_heads_are_chosen_like_others(graph: Any) -> None:
    plan, _ = planned(graph, Table(HERE), purpose="prefill")
    assert plan["head"].role == "head"
    assert plan["head"].activations == "int8-auto"


def test_prefill_takes_what_is_faster(graph: Any) -> None:
    fast = table(uint4={256: 2.0}, w8a8={256: 1.0}, float={256: 3.0})
    found = linear(graph, fast, purpose="prefill")
    assert found.activations == "int8-auto"
    assert "by measured times" in found.detail
    assert found.reason is None
    slow = table(uint4={256: 1.0}, w8a8={256: 2.0}, float={256: 3.0})
    assert linear(graph, slow, purpose="prefill").activations is None


def test_nearly_as_fast_leaves_what_was_asked_for(graph: Any) -> None:
    near = table(uint4={256: 1.04}, w8a8={256: 1.0})
    assert linear(graph, near, purpose="prefill", format=UINT4).format == UINT4
    groups = table(uint4={1: 1.04}, uint4_128={1: 1.0})
    assert linear(graph, groups, purpose="decode").format == UINT4


def test_of_nearly_equal_ones_prefill_takes_the_weight_of_more_bits(graph: Any) -> None:
    near = table(uint4={256: 1.0}, w8a8={256: 1.09})
    assert linear(graph, near, purpose="prefill").format == "int8-pairs"


def test_a_faster_group_is_taken_where_the_group_was_left_open(graph: Any) -> None:
    groups = table(uint4={1: 2.0}, uint4_128={1: 1.0}, uint4_32={1: 3.0}, w8a8={1: 0.1})
    assert linear(graph, groups, purpose="decode").format == "uint4:group=128"
    for asked in ({"group": 64}, {"format": UINT4}):
        assert linear(graph, groups, purpose="decode", **asked).format == UINT4


def test_slower_than_float_is_said(graph: Any) -> None:
    slow = table(uint4={256: 2.0}, w8a8={256: 1.5}, float={256: 1.0})
    found, notes = planned(graph, slow, purpose="prefill")
    assert found["linear"].reason == "SLOWER_THAN_FLOAT_AT_M"
    assert found["linear"].quantized
    assert notes[0].startswith("--for prefill goes by rule for 1 of 2 linears")  # the head
    assert notes[1:] == [
        f"{N}×{K}, 1 linear: at 256 rows float 1e+03 ms, "
        "int8-pairs × int8-row (u8s8) 1.5e+03 ms (taken)"
    ]


@pytest.mark.parametrize(
    "taken,words",
    [
        ("a", "at 1 row a 1 ms (taken), b 2 ms"),
        ("c", "at 1 row a 1 ms, c 3 ms (taken)"),
    ],
)
def test_a_note_names_the_way_that_is_taken_and_the_best_other_one(taken: str, words: str) -> None:
    seconds = (("a", 1e-3), ("b", 2e-3), ("c", 3e-3), ("d", 4e-3))
    assert str(RowTimes(1, taken, seconds)) == words
    assert str(RowTimes(4, "a", seconds[:1])) == "at 4 rows a 1 ms (taken)"


def test_the_times_that_decided_are_data_by_size(graph: Any) -> None:
    fast = table(uint4={256: 2.0}, w8a8={256: 1.0}, float={256: 3.0})
    recipe = Recipe(min_elements=1, purpose="prefill")
    found = plan_for(graph.sites(), recipe, CPU.capabilities(), fast, graph.model.graph)
    seconds = ((W8A8.name, 1.0), (UINT4, 2.0), (FLOAT, 3.0))
    assert found.times == (SizeTimes(N, K, 1, (RowTimes(256, W8A8.name, seconds),)),)


def test_both_holds_one_weight_where_it_serves(graph: Any) -> None:
    one = table(uint4={1: 1.0, 256: 9.0}, int8={1: 1.05, 256: 2.1}, w8a8={1: 3.0, 256: 2.0})
    found = linear(graph, one, purpose="both")
    assert (found.format, found.activations, found.many) == (INT8, None, None)
    assert "one weight" in found.detail
    asked = table(uint4={1: 1.05, 256: 2.1}, int8={1: 1.0, 256: 2.0}, w8a8={1: 3.0, 256: 2.0})
    assert linear(graph, asked, purpose="both").format == UINT4
    integer = table(uint4={1: 1.0, 256: 9.0}, w8a8={1: 1.05, 256: 2.0})
    assert linear(graph, integer, purpose="both").activations == "int8-auto"


@pytest.mark.parametrize(
    "many,wanted",
    [
        ({1: 2, 4: 2, 16: 1, 64: 1, 256: 1}, 8),  # even in the logarithm, between 4 and 16
        ({1: 2, 4: 1, 16: 1, 64: 1, 256: 1}, 2),
        ({1: 2, 4: 2, 16: 2, 64: 2, 256: 1}, 128),
    ],
)
def test_the_second_weight_runs_from_where_it_is_faster(
    graph: Any, many: dict[int, float], wanted: int
) -> None:
    """uint4 takes √2 at every number of rows: halfway between 1 and 2."""
    few = dict.fromkeys(ROWS["both"], 2.0**0.5)
    measured = table(uint4=few, w8a8={rows: float(time) for rows, time in many.items()})
    found = linear(graph, measured, purpose="both")
    assert found.many.from_rows == wanted
    assert found.many.activations == "int8-auto"


def test_set_decides(graph: Any) -> None:
    overrides = (Override("linear", "int8:group=32"),)
    found = linear(graph, Table(HERE), purpose="prefill", overrides=overrides)
    assert (found.format, found.activations) == ("int8:group=32", None)
    assert "--set decides" in found.detail
    kept = linear(graph, Table(HERE), purpose="both", exclude=("linear",))
    assert (kept.format, kept.reason) == (None, "EXCLUDED")


def test_the_kind_of_rounding_is_the_recipes(graph: Any) -> None:
    assert linear(graph, Table(HERE), purpose="both", activations="int8").many.activations == "int8"


def test_a_target_without_integer_kernels_keeps_packed_weights(graph: Any) -> None:
    capabilities = CPU.capabilities()
    rules = tuple(rule for rule in capabilities.rules if "int8-row" not in rule.activations)
    without = dataclasses.replace(capabilities, rules=rules)
    for purpose in ("prefill", "both"):
        plan, _ = planned(graph, Table(HERE), without, purpose=purpose)
        assert plan["linear"].format == UINT4
        assert plan["linear"].many is None


@pytest.mark.parametrize(
    "recipe,words",
    [
        ({"purpose": "decoding"}, "did you mean 'decode'"),
        ({"purpose": "decode", "activations": "int8"}, "--for prefill or both"),
        ({"purpose": "both", "dequantize_at_load": True}, "--dequantize-at-load"),
        ({"purpose": "both", "accuracy_level": "0"}, "--accuracy-level 0"),
        ({"purpose": "both", "target_bits": 4.5}, "chooses formats by speed"),
        ({"purpose": "decode", "outliers": 4}, "--outliers 4"),
    ],
)
def test_what_contradicts(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe(**recipe)


def test_what_is_measured(graph: Any) -> None:
    recipe = Recipe(purpose="both", format="int4:group=16", min_elements=1)
    ways = candidates_of(graph.sites(), recipe, CPU.capabilities())
    names = [way.name for way in ways]
    assert names[0] == FLOAT
    assert {"uint4:group=32", "uint4:group=128", INT8, "int4:group=16"} <= set(names)
    assert {"int8-pairs × int8 (u8s8)", "int8-pairs × int8-row (u8s8)"} <= set(names)
    assert len(names) == len(set(names)) == 10
    sizes = sizes_of(graph.sites(), recipe, CPU.capabilities())
    assert sizes == [(N, K, "float", ROWS["both"]), (4 * N, N, "float", ROWS["both"])]


def test_what_reads_one_activation_gets_two_weights_together() -> None:
    """The small linear alone would keep its bytes at one row, rounded there for it alone."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["M", K]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, weights = [], []
    for name, rows in (("q", 2 * N), ("k", N)):
        array = ir.tensor(rng.standard_normal((K, rows)).astype(np.float32), name=f"{name}.w")
        weights.append(
            ir.Value(
                name=f"{name}.w", shape=ir.Shape((K, rows)), type=ir.TensorType(array.dtype),
                const_value=array,
            )
        )  # fmt: skip
        nodes.append(ir.node("MatMul", [x, weights[-1]], name=name))
        nodes.append(ir.node("Neg", [nodes[-1].outputs[0]], name=f"{name}.end"))
        nodes[-1].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    inner = ir.Graph(
        [x], [nodes[1].outputs[0], nodes[3].outputs[0]], nodes=nodes, initializers=weights,
        opset_imports={"": 21}, name="two",
    )  # fmt: skip
    graph = capture(ir.Model(inner, ir_version=10))
    measured = table(uint4={1: 1.05, 256: 9.0}, w8a8={1: 1.0, 256: 2.0})
    large = {(UINT4, 1): 1.0, (UINT4, 256): 9.0, (W8A8.name, 1): 3.0, (W8A8.name, 256): 2.0}
    for (name, rows), time in large.items():
        measured.seconds[Measured(2 * N, K, "float", name, rows)] = time
    plan, _ = planned(graph, measured, purpose="both")
    assert plan["q"].many is not None
    assert plan["k"].many is not None
    assert plan["k"].format == UINT4
    assert plan["k"].many.from_rows == plan["q"].many.from_rows


def test_a_tied_head_of_its_own_format_is_solved(tmp_path: Path) -> None:
    """The embedding keeps its groups, rounded; the head's bytes are solved like other weights."""
    found = optimize(
        tiny.build(tmp_path), dry_run=True, purpose="prefill", solver="smoothquant",
        calibrate=tiny.batches("train", 128, 2),
    )  # fmt: skip
    table, head = (
        next(item for item in found.plan.decisions if item.role == role)
        for role in ("embedding", "head")
    )
    assert table.weight == head.weight
    assert (table.format, table.solver) == (INT8, "rtn")
    assert (head.format, head.solver) == ("int8-pairs", "smoothquant")
