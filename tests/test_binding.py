"""Which parameter each site reads: by bindings, by names, by likeness; else an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from packed import (
    MLP,
    MLP_FLOATS,
    K,
    MemoryEntry,
    checkpoint,
    entry,
    floats,
    imported,
    mlp_checkpoint,
    ops,
    save,
)

import qgraph
from qgraph.errors import InputError

pytest.importorskip("onnxruntime")

RNG = np.random.default_rng(0)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return save(tmp_path, MLP, floats(**MLP_FLOATS))


def test_rows_of_a_fused_tensor_by_a_binding(tmp_path: Path, out: Path) -> None:
    text = f"""(float[M, {K}] x) => (float[M, 48] p, float[M, 16] q) {{
        [one] p = Gemm <transB = 1> (x, one__weight)
        [two] q = Gemm <transB = 1> (x, two__weight)
    }}"""
    weights = floats(one__weight=(48, K), two__weight=(16, K))
    fused = entry("qkv.weight", np.concatenate([*weights.values()]))
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"one.weight": "qkv.weight[0:48]", "two": "qkv.weight[48:64]"}))
    model = save(tmp_path, text, weights)
    result = imported(checkpoint(fused), model, out, bindings=names)
    assert result.plan["two"].detail.startswith("qkv.weight[48:64], code for code")
    x = RNG.standard_normal((3, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})
    both = x @ fused.dequantized(0, 64).T
    np.testing.assert_allclose(np.hstack([found["p"], found["q"]]), both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "names,words",
    [
        ({"one.wieght": "qkv.weight"}, r"'one\.wieght' is no .*; did you mean 'one\.weight'"),
        ({"one.weight": "qvk.weight"}, r"no such parameter; did you mean 'qkv\.weight'"),
        ({"one.weight": "qkv.weight[0:47]"}, r"wanted 48 of the rows of qkv.weight \[64, 64\]"),
        ({"one.weight": "qkv.weight[40:88]"}, r"one is \[48, 64\]"),
        ({"one.weight": f"qkv.weight[0:{'9' * 5000}]"}, r"no such parameter"),
        ({"one.weight": "qkv.weight"}, r"checkpoint's qkv.weight is \[64, 64\].*\[0:48\]"),
    ],
)
def test_bindings_that_do_not_hold_name_both_sides(
    tmp_path: Path, names: dict[str, str], words: str
) -> None:
    text = (
        f"(float[M, {K}] x) => (float[M, 48] p) {{ [one] p = Gemm<transB = 1> (x, one__weight) }}"
    )
    weights = floats(one__weight=(48, K))
    given = checkpoint(entry("qkv.weight", np.ones((64, K), np.float32)))
    with pytest.raises(InputError, match=words):
        imported(given, save(tmp_path, text, weights), None, bindings=names)


@pytest.mark.parametrize(
    "text,words",
    [
        ("[1]", "wanted a table"),
        ("{", "is no JSON"),
        ('{"up": "a", "up": "b"}', "is no JSON: the key 'up' stands there twice"),
        ('{"up": 3}', "'up' → 3: wanted the name of a parameter, or null"),
        (None, "No such file"),
    ],
)
def test_a_bindings_file_must_be_a_table_of_names(
    mlp: Path, tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "names.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=words):
        imported(mlp_checkpoint(), mlp, None, bindings=path)


def test_null_leaves_a_weight_as_it_is(mlp: Path, out: Path) -> None:
    result = imported(mlp_checkpoint(), mlp, out, bindings={"down": None})
    assert ops(out)["Gemm"] == 1
    assert result.plan["down"].reason == "FLOAT_IN_CHECKPOINT"
    assert "1 quantized parameter is read by no site: l.0.down.weight" in result.report.notes


TWO = f"""(float[M, {K}] x) => (float[M, {K}] y) {{
    [one] h = MatMul (x, val_1)
    [two] y = MatMul (h, val_2)
}}"""


def test_renamed_weights_are_found_by_their_values(tmp_path: Path, out: Path) -> None:
    weights = floats(val_1=(K, K), val_2=(K, K))
    first, second = (np.ascontiguousarray(w.T) for w in weights.values())
    given = checkpoint(entry("q.weight", second), entry("k.weight", first, "int4:group=32"))
    result = imported(given, save(tmp_path, TWO, weights), out)
    assert [item.detail.partition(",")[0] for item in result.plan.decisions] == [
        "k.weight",
        "q.weight",
    ]
    assert result.report.notes == [
        "2 weights have no parameter of their name, and one was found by its values: "
        "val_1 → k.weight, val_2 → q.weight; --bindings says it otherwise",
        "runs on ONNX Runtime 1.20 and later",
    ]


def test_what_no_name_and_no_values_tell_is_an_error(tmp_path: Path) -> None:
    weights = floats(val_1=(K, K), val_2=(K, K))
    other = np.random.default_rng(9).standard_normal((2, K, K)).astype(np.float32)
    given = checkpoint(entry("q.weight", other[0]), entry("k.weight", other[1]))
    with pytest.raises(InputError) as error:
        imported(given, save(tmp_path, TWO, weights), None)
    message = str(error.value)
    assert "no parameter for 2 of the 2 weights" in message
    assert "one: val_1 [64, 64] (of that shape: q.weight, k.weight)" in message
    assert '--bindings FILE.json, {"val_1": "PARAMETER"}' in message


def test_equal_candidates_are_no_suggestion(tmp_path: Path) -> None:
    weights = floats(val_1=(K, K), val_2=(K, K))
    first = np.ascontiguousarray(weights["val_1"].T)
    given = checkpoint(entry("q.weight", first), entry("k.weight", first))
    with pytest.raises(InputError, match="no parameter for 2 of the 2 weights"):
        imported(given, save(tmp_path, TWO, weights), None)


def test_names_may_end_alike(tmp_path: Path) -> None:
    text = TWO.replace("val_1", "a__weight").replace("val_2", "b__weight")
    weights = floats(a__weight=(K, K), b__weight=(K, K))
    other = np.random.default_rng(9).standard_normal((2, K, K)).astype(np.float32)
    given = checkpoint(entry("model.b.weight", other[0]), entry("model.a.weight", other[1]))
    result = imported(given, save(tmp_path, text, weights), None)
    details = [item.detail.partition(",")[0] for item in result.plan.decisions]
    assert details == ["model.a.weight", "model.b.weight"]


def test_rows_that_a_graph_takes_of_a_fused_constant(tmp_path: Path, out: Path) -> None:
    text = f"""(float[M, {K}] x) => (float[M, 32] p, float[M, 16] q) {{
        sizes = Constant <value_ints = [32, 16]> ()
        a, b = Split <axis = 0> (qkv__weight, sizes)
        at = Transpose <perm = [1, 0]> (a)
        bt = Transpose <perm = [1, 0]> (b)
        [one] p = MatMul (x, at)
        [two] q = MatMul (x, bt)
    }}"""
    weights = floats(qkv__weight=(48, K))
    given = checkpoint(entry("qkv.weight", weights["qkv.weight"], "int4:group=32"))
    result = imported(given, save(tmp_path, text, weights), out)
    assert [item.detail.partition(",")[0] for item in result.plan.decisions] == [
        "qkv.weight[0:32]",
        "qkv.weight[32:48]",
    ]
    x = RNG.standard_normal((3, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})
    want = x @ given.entries["qkv.weight"].dequantized(0, 48).T
    np.testing.assert_allclose(np.hstack([found["p"], found["q"]]), want, atol=1e-5, rtol=1e-5)


def test_an_expert_of_a_stack(tmp_path: Path, out: Path) -> None:
    text = f"""(float[M, {K}] x) => (float[M, 32] y) {{
        at = Constant <value = int64 {{1}}> ()
        w = Gather <axis = 0> (experts__weight, at)
        t = Transpose <perm = [1, 0]> (w)
        [one] y = MatMul (x, t)
    }}"""
    weights = floats(experts__weight=(3, 32, K))
    stacked = weights["experts.weight"].reshape(96, K)
    given = checkpoint(entry("experts.weight", stacked, "int4:group=32", experts=3))
    result = imported(given, save(tmp_path, text, weights), out)
    assert result.plan["one"].detail.startswith("experts.weight[32:64], ")
    x = RNG.standard_normal((3, K)).astype(np.float32)
    want = x @ given.entries["experts.weight"].dequantized(32, 64).T
    np.testing.assert_allclose(qgraph.open(out).run({"x": x})["y"], want, atol=1e-5, rtol=1e-5)


def test_a_shape_that_does_not_fit_names_both(mlp: Path) -> None:
    given = checkpoint(entry("l.0.up.weight", np.ones((K, K), np.float32)))
    with pytest.raises(InputError, match=r"l\.0\.up\.weight as \[128, 64\].* is \[64, 64\]"):
        imported(given, mlp, None)


def test_a_renamed_float_lies_as_the_site_reads_it(tmp_path: Path, out: Path) -> None:
    """A parameter is [N, K]; the constant of a MatMul that an exporter renamed is [K, N]."""
    weights = floats(val_1=(K, K), val_2=(K, K))
    first, second = (np.ascontiguousarray(w.T) for w in weights.values())
    given = checkpoint(entry("q.weight", first), floats={"k.weight": second + np.float32(1)})
    names = {"val_1": "q.weight", "val_2": "k.weight"}
    imported(given, save(tmp_path, TWO, weights), out, bindings=names)
    kept = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(kept["val_2"], (second + np.float32(1)).T)


def test_rows_of_floats_by_a_binding(tmp_path: Path, out: Path) -> None:
    whole = RNG.standard_normal((3 * K, K)).astype(np.float32)
    weights = floats(val_1=(K, K), val_2=(K, K))
    first = np.ascontiguousarray(weights["val_1"].T)
    given = checkpoint(entry("q.weight", first), floats={"kv.weight": whole})
    names = {"val_1": "q.weight", "val_2": f"kv.weight[{K}:{2 * K}]"}
    imported(given, save(tmp_path, TWO, weights), out, bindings=names)
    kept = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(kept["val_2"], whole[K : 2 * K].T)
    stack = checkpoint(entry("q.weight", first), floats={"kv.weight": whole.reshape(3, K, K)})
    with pytest.raises(InputError, match=r"two is bound to rows of kv.weight, which has the shape"):
        imported(stack, save(tmp_path, TWO, weights), None, bindings=names)


TIED = """(int64[M] ids) => (float[M, 32] y) {
    [embed] h = Gather (E__weight, ids)
    t = Transpose <perm = [1, 0]> (E__weight)
    [head] y = MatMul (h, t)
}"""


def test_one_constant_takes_one_parameter(tmp_path: Path) -> None:
    """A head that is quantized, and a table that is not, are none that a tied graph can hold."""
    weights = floats(E__weight=(32, K))
    head = entry("head.weight", weights["E.weight"])
    table = {"table.weight": weights["E.weight"], "other.weight": weights["E.weight"]}
    model = save(tmp_path, TIED, weights)
    for target in ("head.weight", "other.weight"):
        names = {"embed": "table.weight", "head": target}
        with pytest.raises(InputError, match=rf"two for it: table\.weight, and {target}, which he"):
            imported(checkpoint(head, floats=table), model, None, bindings=names)


def strangers(result: Any) -> list[str]:
    """Notes of weights that are not the graph's."""
    return [note for note in result.report.notes if "nothing in common" in note]


def test_weights_that_have_nothing_in_common_are_told(mlp: Path) -> None:
    given = mlp_checkpoint()
    other = RNG.standard_normal((2 * K, K)).astype(np.float32)
    strange = checkpoint(
        entry("l.0.up.weight", other),
        given.entries["l.0.down.weight"],
        floats=mlp_floats("l.0.up.bias"),
    )
    (note,) = strangers(imported(strange, mlp, None))
    assert note.startswith("1 weight of those looked at has")
    assert "own: l.0.up.weight;" in note
    assert not strangers(imported(given, mlp, None))


def test_factors_of_channels_are_no_strangers(mlp: Path) -> None:
    """AWQ multiplies columns, and divides what stands in front."""
    given = mlp_checkpoint()
    up = floats(**MLP_FLOATS)["l.0.up.weight"].T * RNG.uniform(0.5, 2, K).astype(np.float32)
    scaled = checkpoint(
        entry("l.0.up.weight", np.ascontiguousarray(up), "uint4:group=32"),
        given.entries["l.0.down.weight"],
        floats=mlp_floats("l.0.up.bias"),
    )
    assert not strangers(imported(scaled, mlp, None))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout, off", [("gptq", -1), ("gptq_v2", 1)])
def test_zero_points_of_the_other_version_are_refused(
    mlp: Path, bits: int, layout: str, off: int
) -> None:
    """Asymmetric weights do not tell which version they are; the graph's own weights do."""
    given = mlp_checkpoint(f"uint{bits}:group=32")
    right = dataclasses.replace(given, layout=layout)
    imported(right, mlp, None)
    up = right.entries["l.0.up.weight"]
    assert isinstance(up, MemoryEntry) and up.weight.zeros is not None
    zeros = (up.weight.zeros.astype(int) - off).clip(0, 2**bits - 1).astype(np.uint8)
    moved = dataclasses.replace(up, weight=dataclasses.replace(up.weight, zeros=zeros))
    wrong = checkpoint(moved, floats=mlp_floats("l.0.up.bias", "l.0.down.weight"))
    wrong = dataclasses.replace(wrong, layout=layout)
    other = "gptq_v2" if layout == "gptq" else "gptq"
    with pytest.raises(InputError, match=f'one step .* checkpoint_format is to be "{other}"'):
        imported(wrong, mlp, None)
    imported(dataclasses.replace(wrong, layout="awq"), mlp, None)


def mlp_floats(*names: str) -> dict[str, Any]:
    """Some of MLP's weights, as its graph has them."""
    weights = floats(**MLP_FLOATS)
    return {name: weights[name] for name in names}
