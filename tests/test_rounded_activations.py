"""Linears that multiply bytes, from the recipe to the written file and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoders import decoder, tokens
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

import qgraph
from qgraph import check
from qgraph.check_kernels import Verdict
from qgraph.errors import InputError
from qgraph.formats.base import Array, parse
from qgraph.formats.pairs import fit_16_bits
from qgraph.recipe import Override, Recipe
from qgraph.runtimes import ort_kernels

KINDS = ("int8", "int8-row", "int8-static")
SMALL: dict[str, Any] = {"min_elements": 64, "embedding": "float"}
K, N, OUTLIERS = 400, 96, 2


def made(source: Path, out: Path, kind: str, outliers: int = 0, **more: Any) -> Any:
    data = tokens(4) if outliers or kind == "int8-static" else None
    return qgraph.optimize(
        source, out, activations=kind, outliers=outliers, calibrate=data, **{**SMALL, **more}
    )


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_written_file_tells_what_was_made(kind: str, outliers: int, tmp_path: Path) -> None:
    """One site a linear: not the product of the columns in float, nor what rounds."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    result = made(source, out, kind, outliers, strict=True)
    op = "DynamicQuantizeMatMul" if kind == "int8" else "MatMulIntegerToFloat"
    for name in ("up", "down"):
        decision = result.plan[name]
        assert (decision.format, decision.activations) == ("int8-pairs", kind)
        assert decision.outliers == outliers
        assert decision.kernel is not None and decision.kernel.startswith(f"{op} uint8 × ")
    found = qgraph.explain(out)
    rows = {row.name: row for row in found.sites}
    assert set(rows) == {"embed", "up", "down", "head"}
    for name in ("up", "down"):
        row = rows[name]
        assert (row.state, row.format, row.bits, row.reason) == ("fused", "int8-pairs", 8, None)
        assert row.kernel == result.plan[name].kernel
        assert (row.n, row.k) == (result.plan[name].n, result.plan[name].k)
    assert found.coverage.linears_quantized == 3


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_compare_bounds_each_linear(kind: str, outliers: int, tmp_path: Path) -> None:
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    made(source, out, kind, outliers)
    found = qgraph.compare(source, out, tokens(2))
    assert found.notes == ()
    for row in found.sites:
        if row.name in ("up", "down"):
            assert row.kernel_ratio is not None and row.kernel_ratio < 1
            assert row.bound_ratio is not None and 0.01 < row.bound_ratio < 1


def test_a_file_is_kept_as_it_is_when_optimized_again(tmp_path: Path) -> None:
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    made(source, out, "int8-row", 3, embedding="int8")
    again = qgraph.optimize(out, tmp_path / "again.onnx", **{**SMALL, "format": "uint4"})
    for name in ("up", "down"):
        decision = again.plan[name]
        assert (decision.format, decision.detail) == ("int8-row", "fused already")
    ids = {"input_ids": tokens(2)}
    first, second = (qgraph.open(f).run(ids)["logits"] for f in (out, tmp_path / "again.onnx"))
    np.testing.assert_array_equal(first, second)


def spread(path: Path) -> tuple[Path, Array, Callable[[int], Array]]:
    """A linear and a head, and inputs of which 0.5 % of the channels are 50 times larger."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal((K, N)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], "last"),
    ]
    graph = helper.make_graph(
        nodes,
        "spread",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", K])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", N]),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, ["M", N]),
        ],
        [
            numpy_helper.from_array(w, "w"),
            numpy_helper.from_array(rng.standard_normal((N, N)).astype(np.float32), "v"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    large = rng.choice(K, OUTLIERS, replace=False)

    def inputs(seed: int) -> Array:
        x = np.random.default_rng(seed).standard_normal((64, K)).astype(np.float32)
        x[:, large] *= 50
        return x

    return path, w, inputs


@pytest.mark.parametrize("kind", KINDS)
def test_columns_in_float_bring_back_what_outliers_cost(kind: str, tmp_path: Path) -> None:
    """Where 0.5 % of the channels are 50 times larger, rounding leaves the others few steps."""
    source, w, inputs = spread(tmp_path / "m.onnx")
    x = inputs(1)
    exact = x.astype(np.float64) @ w

    def error(product: Array) -> float:
        return float(np.linalg.norm(product - exact) / np.linalg.norm(exact))

    fmt = parse("int8-row")
    rounded = fmt.dequantize(fmt.quantize(np.ascontiguousarray(w.T), ir.DataType.FLOAT))
    weight_only = error(x.astype(np.float64) @ rounded.T)
    errors = []
    for outliers in (0, OUTLIERS):
        out = tmp_path / f"o{outliers}.onnx"
        result = qgraph.optimize(
            source, out, overrides=[f"first=activations={kind}"], outliers=outliers,
            min_elements=64, strict=True, calibrate=[{"x": inputs(2)}, {"x": inputs(3)}],
        )  # fmt: skip
        assert result.plan["first"].activations == kind
        errors.append(error(qgraph.open(out).run({"x": x})["h"]))
    plain, with_columns = errors
    assert plain > 5 * weight_only
    assert with_columns < 2 * weight_only


def test_a_threshold_keeps_columns_that_are_no_outliers_in_bytes(tmp_path: Path) -> None:
    source, _, inputs = spread(tmp_path / "m.onnx")
    result = qgraph.optimize(
        source, tmp_path / "o.onnx", overrides=["first=activations=int8-row"], outliers=8,
        min_elements=64,
        calibrate=[{"x": inputs(2)}], options={"lower_w8a8.threshold": "10"},
    )  # fmt: skip
    details = {s.site: s.detail for s in result.report.steps if s.pass_name == "lower_w8a8"}
    assert details["first"].endswith("; 2 of 400 input columns in float")


def test_with_a_solver_that_scales_channels(tmp_path: Path) -> None:
    """What is chosen and rounded is the activation as the factors leave it."""
    pytest.importorskip("torch")
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    result = made(source, out, "int8-static", 3, solver="awq", strict=True)
    assert result.plan["down"].solver is not None and "awq" in result.plan["down"].solver
    reference, found = (qgraph.open(f).run({"input_ids": tokens(2)}) for f in (source, out))
    error = np.linalg.norm(found["logits"] - reference["logits"])
    assert error < 0.03 * np.linalg.norm(reference["logits"])


@pytest.fixture(params=[False, True], ids=["saturates", "exact"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """As if this processor added pairs of products in 16 bits, or never saturated."""
    monkeypatch.setattr(ort_kernels, "mixed_signs_are_exact", lambda: request.param)
    ort_kernels.rules.cache_clear()
    yield request.param
    ort_kernels.rules.cache_clear()


@pytest.mark.usefixtures("exact")
def test_signed_weights_are_those_whose_products_fit(tmp_path: Path) -> None:
    """Wherever a file is made, it may be run where other pairs saturate."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    for fmt, number in (("auto", "int8"), ("int8-row", "uint8")):
        decision = made(source, out, "int8-row", format=fmt, force=True).plan["up"]
        assert decision.kernel == f"MatMulIntegerToFloat uint8 × {number} rows=dynamic"
        assert decision.reason is None
        assert next(row for row in qgraph.explain(out).sites if row.name == "up").reason is None


def test_signed_codes_that_a_solver_chose_fit_as_well(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    asked = {"calibrate": tokens(4), "strict": True, "embedding": "float", "min_elements": 64}
    options = {"quantize_gptq.sweeps": "2", "quantize_gptq.refit": "true"}
    result = qgraph.optimize(
        source, out, activations="int8-row", solver="smoothquant+gptq", options=options, **asked
    )
    assert result.plan["up"].solver == "smoothquant+gptq"
    weights = [array for array in stored(out) if array.dtype == np.int8 and array.ndim == 2]
    assert len(weights) == 3
    assert all(fit_16_bits(each.T) for each in weights)
    sums = [np.abs(each[::2].astype(int) + each[1::2]) for each in weights]
    assert max(int(each.max()) for each in sums) > 90


def stored(path: Path) -> list[Array]:
    """The constants of a file."""
    return [numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer]


@pytest.mark.parametrize("fits", [False, True])
def test_signed_weights_of_others_are_told_where_they_saturate(
    exact: bool, fits: bool, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
        "g (float[m, 64] x) => (float[m, 32] y) "
        "{ y = com.microsoft.DynamicQuantizeMatMul(x, codes, scales) }"
    )
    for name, array in {
        "codes": np.full((64, 32), 64 if fits else 65, np.int8),
        "scales": np.ones(32, np.float32),
    }.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    (row,) = qgraph.explain(tmp_path / "m.onnx").sites
    assert row.state == "fused"
    assert row.reason == (None if exact or fits else "SATURATES_HERE")


@pytest.mark.parametrize("kind", KINDS)
def test_a_float16_model_from_the_recipe_to_the_file(kind: str, tmp_path: Path) -> None:
    source, half, out = decoder(tmp_path / "m.onnx"), tmp_path / "h.onnx", tmp_path / "o.onnx"
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float16), tensor.name))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, half)
    decision = made(half, out, kind, 3, strict=True).plan["up"]
    assert (decision.activations, decision.reason) == (kind, None)
    reference, found = (qgraph.open(f).run({"input_ids": tokens(2)}) for f in (source, out))
    assert found["logits"].dtype == np.float16
    error = np.linalg.norm(found["logits"] - reference["logits"])
    assert error < 0.03 * np.linalg.norm(reference["logits"])
    rows = {row.name: row for row in qgraph.explain(out).sites}
    assert (rows["up"].kernel, rows["up"].reason) == (decision.kernel, None)
    compared = {row.name: row for row in qgraph.compare(half, out, tokens(2)).sites}
    assert compared["up"].kernel_ratio is not None and compared["up"].kernel_ratio < 1


@pytest.mark.parametrize("layout", ["compressed-tensors", "bitsandbytes"])
def test_weights_go_into_checkpoints_code_for_code(layout: str, tmp_path: Path) -> None:
    """Layouts of 8-bit rows hold them, whatever was taken care of besides."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    made(source, out, "int8-row")
    qgraph.export_checkpoint(out, tmp_path / "c", layout=layout)
    found = load_file(tmp_path / "c" / "model.safetensors")
    codes = next(each for each in stored(out) if each.shape == found["up.weight"].T.shape)
    np.testing.assert_array_equal(found["up.weight"], codes.T)


def test_where_no_integer_kernel_is_right_activations_stay_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check.check_kernel

    def wrong(probe: Any, *rest: Any) -> Verdict:
        return Verdict(2.0, "made wrong") if probe.integer is not None else real(probe, *rest)

    monkeypatch.setattr(check, "check_kernel", wrong)
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    decision = made(source, out, "int8-row").plan["up"]
    assert decision.kernel == "MatMulNBits bits=8 block=128 level=4"
    assert (decision.activations, decision.reason) == (None, "KERNEL_FAILED_CHECK")


@pytest.mark.parametrize("kind", ["int8", "int8-row"])
@pytest.mark.parametrize("target", ["qdq", "ort-cuda", "torch"])
def test_other_targets_refuse_with_a_reason(target: str, kind: str, tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    found = qgraph.optimize(
        source, dry_run=True, target=target, activations=kind, check=False, min_elements=64
    )
    for name in ("up", "down"):
        assert found.plan[name].format is None
        assert found.plan[name].reason == "ACTIVATION_UNSUPPORTED"
        assert f"has no kernel for {kind} activations" in found.plan[name].detail


def test_a_dry_run_needs_no_data(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    found = qgraph.optimize(
        source, dry_run=True, activations="int8-static", outliers=2, min_elements=64
    )
    assert found.plan["up"].kernel is not None
    assert found.plan["up"].kernel.endswith(" static")
    assert "--activations int8-static takes calibration data" in found.lacks


@pytest.mark.parametrize(
    "options, words",
    [
        ({"activations": "int8-static"}, "int8-static takes calibration data.* --calibrate FILE"),
        ({"activations": "int8-row", "outliers": 2}, "which columns are outliers"),
        ({"activations": "int8", "format": "uint4"}, "contradict each other.*int8-pairs"),
        ({"activations": "int8", "group": 64}, "contradict each other.*int8-pairs"),
        ({"overrides": ["up=uint4,activations=int8"]}, "contradict each other.*int8-pairs"),
        ({"activations": "int9"}, "did you mean 'int8'"),
        ({"overrides": ["up=activations=int9"]}, "did you mean 'int8'"),
        ({"outliers": 2}, "add --activations int8-row"),
        ({"activations": "int8", "outliers": -1}, "outliers -1: wanted 0 or more"),
        ({"activations": "int8", "dequantize_at_load": True}, "dequantize-at-load and activations"),
    ],
)
def test_what_is_contradictory_or_lacks_data(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "o.onnx"
    with pytest.raises(InputError, match=words):
        qgraph.optimize(decoder(tmp_path / "m.onnx"), out, **options)
    assert not out.exists()


def test_a_q_dq_graph_has_no_columns_in_float(tmp_path: Path) -> None:
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    with pytest.raises(InputError, match="quantizes whole activations; use --target ort-cpu"):
        made(source, out, "int8-static", 2, target="qdq")


def test_static_scales_in_a_q_dq_graph(tmp_path: Path) -> None:
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    made(source, out, "int8-static", target="qdq", strict=True)
    reference, found = (qgraph.open(f).run({"input_ids": tokens(2)}) for f in (source, out))
    error = np.linalg.norm(found["logits"] - reference["logits"])
    assert error < 0.03 * np.linalg.norm(reference["logits"])
    rows = {row.name: row for row in qgraph.explain(out).sites}
    assert rows["up"].state == "qdq" and rows["up"].format == "int8-pairs"
    assert rows["up"].reason == "ACTIVATION_QUANTIZED"


def test_overrides_say_it_for_some_sites(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    found = qgraph.optimize(
        source, dry_run=True, min_elements=64, format="uint4", group=32,
        overrides=["down=activations=int8-row"],
    )  # fmt: skip
    assert (found.plan["up"].format, found.plan["up"].activations) == ("uint4:group=32", None)
    assert (found.plan["down"].format, found.plan["down"].activations) == ("int8-pairs", "int8-row")
    found = qgraph.optimize(
        source, dry_run=True, min_elements=64, activations="int8-row",
        overrides=["up=activations=float", "head=activations=int8"],
    )  # fmt: skip
    kinds = {item.site: item.activations for item in found.plan.decisions}
    assert kinds == {"embed": None, "up": None, "down": "int8-row", "head": "int8"}


def test_the_spelling_of_overrides_and_of_files(tmp_path: Path) -> None:
    wanted = Override("up", "int8-row", "gptq", "int8")
    assert Override.parse("up=int8-row,solver=gptq,activations=int8") == wanted
    assert Override.parse("up=activations=int8") == Override("up", activations="int8")
    path = tmp_path / "r.toml"
    path.write_text(
        'activations = "int8-row"\noutliers = 4\n[[set]]\nselector = "up"\nactivations = "float"\n',
        encoding="utf-8",
    )
    recipe = Recipe.from_toml(path)
    assert (recipe.activations, recipe.outliers) == ("int8-row", 4)
    assert recipe.overrides == (Override("up", activations="float"),)
    assert recipe.to_json()["activations"] == "int8-row"
    assert dataclasses.replace(recipe, activations="float", overrides=(wanted,)).outliers == 4
