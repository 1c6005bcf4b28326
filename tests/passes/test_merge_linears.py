"""Queries, keys and values in one MatMulNBits, in front of an attention that takes them packed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_folders import write_folder
from fusing import run

import qgraph
from qgraph.check_kernels import Verdict
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.cli import run as cli
from qgraph.explanation import SiteRow
from qgraph.formats.base import parse
from qgraph.passes.merged_source import MergedSource, can_merge
from qgraph.profiling import times_beside
from qgraph.rounding import RoundingSource

K, B, S = 64, 2, 3


def constant(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )


def attention(
    sizes: tuple[int, int, int] = (64, 32, 32), *, bias: bool = False, others: bool = False
) -> ir.Model:
    """GroupQueryAttention of three linears of one activation, 4 heads of 16 elements.

    bias: a vector is added to each. others: keys leave the graph too.
    """
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape([B, S, K]), type=ir.TensorType(ir.DataType.FLOAT))
    constants = [
        constant("lengths", np.full(B, S - 1, np.int32)),
        constant("total", np.array(S, np.int32)),
    ]
    nodes, values = [], []
    for name, size in zip("qkv", sizes, strict=True):
        weight = rng.standard_normal((K, size)).astype(np.float32) / 8
        constants.append(constant(f"{name}.weight", weight))
        nodes.append(ir.Node("", "MatMul", [x, constants[-1]], name=name))
        if bias:
            constants.append(constant(f"{name}.bias", rng.standard_normal(size).astype(np.float32)))
            nodes.append(
                ir.Node("", "Add", [nodes[-1].outputs[0], constants[-1]], name=f"{name}/add")
            )
        values.append(nodes[-1].outputs[0])
    node = ir.node(
        "GroupQueryAttention", [*values, None, None, *constants[:2]],
        {"num_heads": 4, "kv_num_heads": sizes[1] // 16}, domain="com.microsoft", name="attention",
        num_outputs=3,
    )  # fmt: skip
    groups, past = sizes[1] // 16, ir.TensorType(ir.DataType.FLOAT)
    outputs = list(node.outputs)
    for output, name, shape in zip(
        outputs, ("y", "k_out", "v_out"), ([B, S, 64], [B, groups, S, 16], [B, groups, S, 16]),
        strict=True,
    ):  # fmt: skip
        output.name, output.shape, output.type = name, ir.Shape(shape), past
    nodes.append(node)
    outputs += [values[1]] if others else []
    graph = ir.Graph(
        [x], outputs, nodes=nodes, initializers=constants, name="attention",
        opset_imports={"": 21, "com.microsoft": 1},
    )  # fmt: skip
    for index, made in enumerate(nodes[:-1]):
        made.outputs[0].name, made.outputs[0].type = f"value{index}", past
    return ir.Model(graph, ir_version=10)


def optimized(model: ir.Model, path: Path | None = None, **options: object) -> qgraph.Result:
    given = {"format": "int4", "group": 16, "min_elements": 64, "accuracy_level": 0, **options}
    return qgraph.optimize(model, path, **given)


def ops(result: qgraph.Result) -> Counter[str]:
    return Counter(node.op_type for node in result.graph.model.graph)


X = {"x": np.random.default_rng(1).standard_normal((B, S, K)).astype(np.float32)}


def merged(result: qgraph.Result) -> list[str]:
    steps = [step for step in result.report.steps if step.rule == "merge_linears"]
    return [step.detail if step.outcome == "kept" else step.outcome for step in steps]


@pytest.mark.parametrize("fmt", ["int4", "uint4", "int8"])
def test_three_linears_become_one_and_compute_the_same(fmt: str) -> None:
    apart, one = (optimized(attention(), fuse=fuse, format=fmt) for fuse in (False, True))
    assert ops(apart)["MatMulNBits"] == 3
    assert ops(one) == {"MatMulNBits": 1, "GroupQueryAttention": 1}
    old, new = (run(result.graph.model, X) for result in (apart, one))
    for name in ("y", "k_out", "v_out"):
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5, atol=1e-5)
    linear = next(node for node in one.graph.model.graph if node.op_type == "MatMulNBits")
    assert linear.attributes["N"].as_int() == 128
    assert merged(one) == ["done"]


def test_the_file_says_what_a_site_holds(tmp_path: Path) -> None:
    result = optimized(attention(), tmp_path / "out.onnx")
    assert "3/3 linears" in result.summary
    explained = qgraph.explain(tmp_path / "out.onnx")
    (row,) = explained.sites
    assert (row.name, row.n, row.k, row.format) == ("q/qkv", 128, 64, "int4:group=16")
    assert row.weight == "q.weight + k.weight + v.weight"
    assert row.error is not None
    assert 0 < row.error < 0.2
    assert row.holds == ("q", "k", "v")
    for name in ("k", "v.weight", row.name):  # names that it had before are known still
        assert explained.select(name) == (row,)
    assert [(row.fusion, row.count) for row in explained.fusions] == [("merge_linears", 1)]
    assert "fused ops: 1 merge_linears" in result.report.notes
    assert result.report.totals["fusions"][0]["count"] == 1


def test_beside_a_merged_linear_stands_the_time_of_all_that_it_holds(tmp_path: Path) -> None:
    optimized(attention(), tmp_path / "out.onnx")
    ir.save(attention(), tmp_path / "float.onnx")
    found = qgraph.explain(tmp_path / "out.onnx", profile=True, against=tmp_path / "float.onnx")
    times = found.profile.against_times
    assert all(times[name] > 0 for name in "qkv")
    assert times["q/qkv"] == pytest.approx(times["q"] + times["k"] + times["v"])
    (kernel,) = found.kernels
    assert kernel.against_us == times["q/qkv"]
    (site,) = found.to_json()["sites"]
    assert site["against_us"] == times["q/qkv"]


def test_beside_a_merged_linear_of_which_a_part_is_not_known_stands_nothing() -> None:
    row = SiteRow("q/qkv", "", "linear", "MatMul", 128, K, "fused", holds=("q", "k", "v"))
    assert times_beside([row], {"q": 1.0, "k": 2.0}) == {"q": 1.0, "k": 2.0}
    merged_too = {"q/qkv": 5.0}
    assert times_beside([row], merged_too) == merged_too


@pytest.mark.parametrize("fmt", ["int4", "uint4"])
def test_a_checkpoint_has_the_linears_apart(fmt: str, tmp_path: Path) -> None:
    for name, fuse in (("one", True), ("apart", False)):
        optimized(attention(), tmp_path / f"{name}.onnx", fuse=fuse, format=fmt)
        qgraph.export_checkpoint(
            tmp_path / f"{name}.onnx", tmp_path / name, layout="compressed-tensors"
        )
    one, apart = (open_checkpoint(tmp_path / name).entries for name in ("one", "apart"))
    assert set(one) == set(apart) == {"q.weight", "k.weight", "v.weight"}
    for name, entry in one.items():
        ours, theirs = (each.rows(0, each.n) for each in (entry, apart[name]))
        np.testing.assert_array_equal(ours.codes, theirs.codes)
        np.testing.assert_array_equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_has_their_biases_apart(tmp_path: Path, beside: bool) -> None:
    """As the graph has them, whatever the float model's folder says."""
    model = attention(bias=True)
    values = {each.name: each.const_value for each in model.graph.initializers.values()}
    arrays = {name: t.numpy() for name, t in values.items() if str(name).endswith(("t", "s"))}
    del arrays["lengths"]
    folder = None
    if beside:
        stored = {
            name: array.T if array.ndim > 1 else array + ("k" in name)
            for name, array in arrays.items()
        }
        folder = write_folder(tmp_path / "f", stored, {})
    optimized(model, tmp_path / "out.onnx")
    done = qgraph.export_checkpoint(
        tmp_path / "out.onnx", tmp_path / "gptq", layout="compressed-tensors", like=folder
    )
    found = open_checkpoint(tmp_path / "gptq")
    assert set(found.entries) | set(found.floats) == set(arrays)
    for name in "qkv":
        assert found.entries[f"{name}.weight"].bias == f"{name}.bias"
        bias = found.floats[f"{name}.bias"]
        np.testing.assert_array_equal(bias.rows(0, bias.shape[0]), arrays[f"{name}.bias"])
    changed = [note for note in done.notes if "is not what the folder has" in note]
    assert [note.rpartition(" ")[2] for note in changed] == ["k.bias"] * beside


@pytest.mark.parametrize("fmt", ["int4:group=16", "uint4:group=32", "int8:group=16"])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_that_came_packed_are_one_byte_for_byte(
    fmt: str, bias: bool, tmp_path: Path
) -> None:
    options = {"format": fmt, "group": None}
    apart = tmp_path / "apart.onnx"
    optimized(attention(bias=bias), apart, fuse=False, **options)
    qgraph.optimize(apart, tmp_path / "one.onnx")
    before, after = (ir.load(path) for path in (apart, tmp_path / "one.onnx"))
    ops = Counter(node.op_type for node in after.graph)
    assert (ops["MatMulNBits"], ops["Add"]) == (1, 0)
    (merged,) = [node for node in after.graph if node.op_type == "MatMulNBits"]
    given = [node for node in before.graph if node.op_type == "MatMulNBits"]
    for place in range(1, 3 + ("uint" in fmt)):
        parts = [node.inputs[place] for node in given]
        wanted = np.concatenate([v.const_value.numpy() for v in parts if v and v.const_value])
        value = merged.inputs[place]
        assert value is not None and value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), wanted)
    feeds = {"x": np.random.default_rng(1).standard_normal((B, S, K)).astype(np.float32)}
    old, new = (run(model, feeds) for model in (before, after))
    for name, array in old.items():
        np.testing.assert_allclose(new[name], array, rtol=0, atol=1e-5)


@pytest.mark.parametrize("option,linears", [("--fuse", 1), ("--no-fuse", 3)])
def test_the_command_line_says_whether_to_fuse(option: str, linears: int, tmp_path: Path) -> None:
    ir.save(attention(), tmp_path / "in.onnx")
    out = tmp_path / "out.onnx"
    command = (
        f"optimize {tmp_path / 'in.onnx'} -o {out} --int4-groups 16 --min-elements 64 {option}"
    )
    assert cli(command.split()) == 0
    assert qgraph.explain(out).totals["linears"] == linears


@pytest.mark.parametrize(
    "options,edge",
    [
        ({"overrides": ["k=int8:group=16"]}, "differ in bits"),
        ({"overrides": ["k=int4:group=32"]}, "differ in bits"),
        ({"overrides": ["k=uint4:group=16"]}, "differ in bits"),
    ],
)
def test_linears_of_different_kernels_stay_apart(options: dict[str, object], edge: str) -> None:
    result = optimized(attention(), **options)
    assert ops(result)["MatMulNBits"] == 3
    assert edge in merged(result)[0]


def test_biases_go_along() -> None:
    apart, one = (optimized(attention(bias=True), fuse=fuse) for fuse in (False, True))
    assert ops(apart)["Add"] == 3
    assert ops(one) == {"MatMulNBits": 1, "GroupQueryAttention": 1}
    old, new = (run(result.graph.model, X) for result in (apart, one))
    for name in ("y", "k_out", "v_out"):
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5, atol=1e-5)


def test_a_float_linear_stays_apart() -> None:
    result = optimized(attention(), exclude=["k"])
    assert ops(result)["MatMulNBits"] == 2
    assert merged(result) == []


def test_keys_that_are_read_elsewhere_stay_apart() -> None:
    result = optimized(attention(others=True))
    assert ops(result)["MatMulNBits"] == 3
    assert "is read elsewhere too" in merged(result)[0]


def test_what_fails_its_check_is_taken_apart_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgraph import check

    real = check.check_kernel

    def wrong(probe: check.Probe, *rest: object) -> Verdict:
        if probe.key.n == 128:
            return Verdict(2.0, "made to fail")
        return real(probe, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "check_kernel", wrong)
    result = optimized(attention(), tmp_path / "out.onnx")
    assert ops(result)["MatMulNBits"] == 3
    assert "3/3 linears" in result.summary
    assert "failed a check when it was one with others" in merged(result)[0]


class Rounded(RoundingSource):
    """A random weight `[n, k]`, rounded to nearest."""

    def __init__(self, name: str, n: int, fmt: str, k: int) -> None:
        self.format, self.n, self.k, self.name = parse(fmt), n, k, name
        self.scale_dtype = ir.DataType.FLOAT
        self.array = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
        super().__init__()

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]

    def exact(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]


def source(name: str, n: int, fmt: str = "int4:group=16", k: int = K) -> Rounded:
    return Rounded(name, n, fmt, k)


@pytest.mark.parametrize("start,stop", [(0, 80), (0, 8), (16, 48), (32, 72), (40, 80), (72, 80)])
def test_rows_of_a_merged_weight_are_those_of_its_parts(start: int, stop: int) -> None:
    parts = [source("a", 40), source("b", 16), source("c", 24)]
    whole = MergedSource(parts, "whole")
    assert (whole.n, whole.k) == (80, K)
    found = whole.block(start, stop)
    for part in ("codes", "scales"):
        every = np.concatenate([getattr(each.block(0, each.n), part) for each in parts])
        np.testing.assert_array_equal(getattr(found, part), every[start:stop])
    right = whole.deviation(start, stop, found)
    floats = np.concatenate([each.array for each in parts])[start:stop]
    assert right.worst <= 1
    assert right.norm_sq == pytest.approx(float((floats.astype(np.float64) ** 2).sum()))
    wrong = whole.deviation(start, stop, whole.block(start, stop).rows(slice(None, None, -1)))
    assert wrong.worst > 1


@pytest.mark.parametrize(
    "others",
    [
        [source("b", 16, "int4:group=32")],
        [source("b", 16, "uint4:group=16")],
        [source("b", 16, k=32)],
    ],
)
def test_weights_of_other_kinds_do_not_merge(others: list[Rounded]) -> None:
    assert not can_merge([source("a", 16), *others])


def test_rows_that_end_within_a_step_come_last() -> None:
    assert can_merge([source("a", 16), source("b", 12)])
    assert not can_merge([source("a", 12), source("b", 16)])
