"""`dequantize_at_load`: packed in the file, floats in ONNX Runtime's memory, of any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import qgraph
from qgraph import registry
from qgraph.cli import run
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, parse, variants
from qgraph.kernel_choice import FOLDING_ENTRY
from qgraph.recipe import Recipe

N, K, ROWS = 136, 200, 3
FORMATS = [f for name in registry.names("format") for f in variants(registry.load("format", name))]
BIAS = np.linspace(-1, 1, N, dtype=np.float32)


def model(folder: Path, kind: str = "float") -> tuple[Path, Array]:
    """y = x·Wᵀ + b, and W `[N, K]`; K is no multiple of any group."""
    stored = np.dtype(np.float16 if kind == "float16" else np.float32)
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32) * np.float32(0.1)
    weight = weight.astype(stored)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({kind}[{ROWS}, {K}] x) => ({kind}[{ROWS}, {N}] y) {{ y = Gemm<transB = 1>(x, w, b) }}"""
    )
    for name, array in (("w", weight), ("b", BIAS.astype(stored))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx", weight.astype(np.float32)


def as_loaded(path: Path, **entries: str) -> tuple[Any, onnx.ModelProto]:
    """A session, and the graph that ONNX Runtime made of the file."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it says that such a file is for one machine
    options.optimized_model_filepath = str(path.with_suffix(".loaded"))
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    session = ort.InferenceSession(path, options)
    return session, onnx.load(path.with_suffix(".loaded"))


def product(fmt: Format, weight: Array, x: Array, dtype: ir.DataType) -> Array:
    quantized = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, dtype))
    return x.astype(np.float64) @ quantized.T.astype(np.float64) + BIAS


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("fmt", FORMATS, ids=[f.spell() for f in FORMATS])
def test_every_format_becomes_float(fmt: Format, kind: str, tmp_path: Path) -> None:
    source, weight = model(tmp_path, kind)
    out = tmp_path / "o.onnx"
    found = qgraph.optimize(
        source, out, format=fmt.spell(), min_elements=1, dequantize_at_load=True
    )
    (decision,) = found.plan.decisions
    assert decision.kernel is not None and decision.kernel.startswith("DequantizeAtLoad")
    assert decision.reason is None and decision.detail.startswith("floats at load")
    assert [step.rule for step in found.report.steps if step.pass_name == "lower_portable"] == [
        f"at load: {fmt.function_name}"
    ]
    session, loaded = as_loaded(out)
    # What computes is what computed on floats; float16's Gemm is computed in float32 on CPUs.
    assert {node.op_type for node in loaded.graph.node} <= {"Gemm", "Cast"}
    sizes = {tuple(t.dims): t.data_type for t in loaded.graph.initializer}
    assert sizes.keys() == {(N, K), (N,)}
    assert set(sizes.values()) <= {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    dtype = ir.DataType.FLOAT16 if kind == "float16" else ir.DataType.FLOAT
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(dtype.numpy())
    wanted = product(fmt, weight, x, dtype)
    error = np.linalg.norm(session.run(None, {"x": x})[0] - wanted) / np.linalg.norm(wanted)
    assert error < (2e-3 if kind == "float16" else 2e-6)


@pytest.mark.parametrize("text", ["int4:group=32", "uint8:group=64", "fp8-e4m3:scale=block"])
def test_dequantize_linear_becomes_float_with_the_entry_that_is_named(
    text: str, tmp_path: Path
) -> None:
    source, weight = model(tmp_path)
    out = tmp_path / "o.onnx"
    found = qgraph.optimize(
        source, out, format=text, min_elements=1, target="qdq", dequantize_at_load=True
    )
    assert FOLDING_ENTRY in found.plan.decisions[0].detail
    assert FOLDING_ENTRY in found.report.steps[-1].detail
    assert any(FOLDING_ENTRY in note for note in found.report.notes)
    name, _, value = FOLDING_ENTRY.partition("=")
    without = {node.op_type for node in as_loaded(out)[1].graph.node}
    assert without & {"DequantizeLinear", "MatMulNBits"}
    session, loaded = as_loaded(out, **{name: value})
    assert [node.op_type for node in loaded.graph.node] == ["Gemm"]
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(np.float32)
    wanted = product(parse(text), weight, x, ir.DataType.FLOAT)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, atol=1e-5)


def test_embeddings_stay_packed_and_share_with_a_tied_head(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int64[T] ids) => (float[T, 96] y) {
            h = Gather(e, ids)
            t = Transpose<perm = [1, 0]>(e)
            y = MatMul(h, t)
        }"""
    )
    table = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "e"))
    onnx.save(proto, tmp_path / "m.onnx")
    out = tmp_path / "o.onnx"
    qgraph.optimize(tmp_path / "m.onnx", out, group=32, dequantize_at_load=True)
    written = onnx.load(out)
    assert sorted(node.op_type for node in written.graph.node) == [
        "DequantizeInt8V1", "GatherBlockQuantized", "MatMul", "Reshape", "Transpose",
    ]  # fmt: skip
    assert sum(t.name.startswith("e.") for t in written.graph.initializer) == 2
    session, loaded = as_loaded(out)
    assert sorted(n.op_type for n in loaded.graph.node) == ["GatherBlockQuantized", "MatMul"]
    fmt = parse("int8:group=32")
    quantized = fmt.dequantize(fmt.quantize(table, ir.DataType.FLOAT))
    found = session.run(None, {"ids": np.array([3, 95])})[0]
    np.testing.assert_allclose(found, quantized[[3, 95]] @ quantized.T, rtol=1e-4, atol=1e-4)


def test_explained(tmp_path: Path) -> None:
    source, _ = model(tmp_path)
    out = tmp_path / "o.onnx"
    qgraph.optimize(source, out, format="mxfp4", min_elements=1, dequantize_at_load=True)
    found = qgraph.explain(out)
    (row,) = found.sites
    assert (row.state, row.kernel) == ("dequantize", "DequantizeAtLoad codes=mxfp4 block=32")
    assert row.packed_bytes == N * 7 * (16 + 1)  # 7 blocks of 32 in 200 columns
    assert not found.unfused


def test_targets_that_compute_nothing_at_load(tmp_path: Path) -> None:
    source, _ = model(tmp_path)
    with pytest.raises(InputError, match=r"torch .* dequantizes at each call.*--target ort-cpu"):
        qgraph.optimize(source, target="torch-cpu", dequantize_at_load=True)


def test_on_the_command_line_and_in_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = model(tmp_path)
    out = tmp_path / "o.onnx"
    assert run(["optimize", str(source), "-o", str(out), "--dequantize-at-load"]) == 0
    assert "1 linear becomes floats when the model is loaded" in capsys.readouterr().out
    recipe = tmp_path / "r.toml"
    recipe.write_text("dequantize_at_load = true\n")
    assert Recipe.from_toml(recipe).to_json()["dequantize_at_load"] is True
    recipe.write_text('dequantize_at_load = "yes"\n')
    with pytest.raises(InputError, match="dequantize_at_load wants bool, not 'yes'"):
        Recipe.from_toml(recipe)
