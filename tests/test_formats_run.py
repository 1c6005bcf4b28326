"""Every format through `optimize` on ONNX Runtime's CPU: which kernel, and what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import qgraph
from qgraph import registry
from qgraph.capabilities import INTEGERS
from qgraph.cli import run
from qgraph.errors import CoverageError
from qgraph.formats.base import Array, Format, parse, variants
from qgraph.passes import lower_qdq
from qgraph.passes.opset import CannotRaise

N, K, ROWS = 136, 256, 3
FORMATS = [f for name in registry.names("format") for f in variants(registry.load("format", name))]
every = pytest.mark.parametrize("fmt", FORMATS, ids=[f.spell() for f in FORMATS])
DTYPES = {
    "float": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
KERNELS = {
    "fp8-e4m3:scale=tensor": "DequantizeLinear codes=e4m3",
    "fp8-e4m3": "DequantizeLinear codes=e4m3",
    "fp8-e4m3:scale=block": "DequantizeLinear codes=e4m3 block=128",
    "fp8-e5m2:scale=tensor": "DequantizeLinear codes=e5m2",
    "fp8-e5m2": "DequantizeLinear codes=e5m2",
    "fp8-e5m2:scale=block": "DequantizeLinear codes=e5m2 block=128",
    "nf4:group=64": "MatMulBnb4 codes=nf4 block=64",
    "fp4:group=64": "MatMulBnb4 codes=fp4 block=64",
    "nf4:group=64,double=true": "portable",
    "fp4:group=64,double=true": "portable",
    "mxfp4": "MatMulNBits bits=8 block=32 level=4",
    "mxfp4:order=halves": "MatMulNBits bits=8 block=32 level=4",
    "mxfp8": "portable",
    "mxfp8:element=e5m2": "portable",
    "nvfp4": "MatMulNBits bits=8 block=16 level=4",
    "int8-row": "MatMulNBits bits=8 block=128 level=4",
    "int4-row": "MatMulNBits bits=4 block=128 level=4",
    "uint2:group=64,zero=float": "MatMulNBits bits=2 block=64 level=4 zeros=sums",
    "uint4:group=64,zero=float": "MatMulNBits bits=4 block=64 level=4 zeros=sums",
    "uint8:group=64,zero=float": "MatMulNBits bits=8 block=64 level=4 zeros=sums",
}


def model(folder: Path, k: int = K, opset: int = 17, kind: str = "float") -> tuple[Path, Array]:
    """y = x·Wᵀ, and W."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g ({kind}[{ROWS}, {k}] x) => ({kind}[{ROWS}, {N}] y) {{ y = Gemm<transB = 1>(x, w) }}"""
    weight = np.random.default_rng(0).standard_normal((N, k)).astype(np.float32) * np.float32(0.1)
    weight = weight.astype(DTYPES[kind].numpy())
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx", weight.astype(np.float32)


def optimized(folder: Path, fmt: Format, k: int = K, kind: str = "float", **options: Any) -> Any:
    """The decision, what the model gives, and what the dequantized weight gives."""
    source, weight = model(folder, k, kind=kind)
    target = options.get("target", "ort-cpu")
    dtype = DTYPES[kind]
    out = folder / "out.onnx"
    result = qgraph.optimize(source, out, format=fmt.spell(), min_elements=1, **options)
    x = np.random.default_rng(1).standard_normal((ROWS, k)).astype(dtype.numpy())
    found = qgraph.open(out, target=target).run({"x": x})["y"]
    quantized = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, dtype))
    return result.plan.decisions[0], found, x.astype(np.float64) @ quantized.T.astype(np.float64)


def assert_near(found: Array, wanted: Array, kernel: str, half: bool = False) -> None:
    """Level 4 rounds activations to int8."""
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < (1.5e-2 if "level=4" in kernel else 2e-3 if half else 2e-6)


@every
@pytest.mark.parametrize("k", [K, 200])
def test_in_torch(fmt: Format, k: int, tmp_path: Path) -> None:
    decision, found, wanted = optimized(tmp_path, fmt, k, target="torch-cpu")
    assert decision.quantized and decision.kernel != "portable"
    assert_near(found, wanted, decision.kernel)


@every
def test_kernel_and_numbers(fmt: Format, tmp_path: Path) -> None:
    decision, found, wanted = optimized(tmp_path, fmt)
    assert decision.quantized
    assert decision.kernel == KERNELS.get(fmt.spell(), decision.kernel)
    assert fmt.numbers not in INTEGERS or decision.kernel.startswith("MatMulNBits bits=")
    assert_near(found, wanted, decision.kernel)


@every
def test_ragged_rows(fmt: Format, tmp_path: Path) -> None:
    """K that no group divides: MatMulBnb4 cannot, what runs instead is right."""
    decision, found, wanted = optimized(tmp_path, fmt, k=200)
    assert_near(found, wanted, decision.kernel)
    if fmt.name in ("nf4", "fp4"):
        assert decision.kernel == "portable"
        known = "GROUP_DOES_NOT_DIVIDE" if not fmt.double else "no kernel for"
        assert known in decision.detail


@every
def test_float_activations(fmt: Format, tmp_path: Path) -> None:
    """Without int8 activations every kernel gives what the dequantized weight gives."""
    decision, found, wanted = optimized(tmp_path, fmt, accuracy_level=0)
    assert "level=4" not in decision.kernel
    assert_near(found, wanted, decision.kernel)


@every
def test_half_precision(fmt: Format, tmp_path: Path) -> None:
    decision, found, wanted = optimized(tmp_path, fmt, kind="float16")
    assert decision.quantized
    assert_near(found, wanted, decision.kernel, half=True)


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:order=halves", "nvfp4"])
def test_size_or_speed(text: str, tmp_path: Path) -> None:
    """Exact as 8-bit integers at twice the bytes, or packed in standard operators."""
    fmt = parse(text)
    fast, _, wanted = optimized(tmp_path, fmt, prefer="speed")
    assert fast.kernel.startswith("MatMulNBits bits=8")
    assert "as 8-bit integers, exactly" in fast.detail
    small, found, wanted = optimized(tmp_path, fmt, prefer="size", force=True)
    assert (small.kernel, small.reason) == ("portable", "NO_FUSED_KERNEL")
    assert "--prefer speed: MatMulNBits bits=8" in small.detail
    assert_near(found, wanted, small.kernel)
    assert 1.9 < fast.packed_bytes / small.packed_bytes < 2.3
    assert small.packed_bytes == pytest.approx(
        fmt.size_bits(K, ir.DataType.FLOAT) * N * K / 8, 1e-3
    )


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:order=halves", "nvfp4"])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_as_integers(text: str, bias: bool, tmp_path: Path) -> None:
    """Between casts, bit for bit what the float32 model gives: float16 holds no such scales."""
    weight = (np.random.default_rng(0).standard_normal((N, K)) * 1e-4).astype(np.float16)
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(np.float16)
    found = {}
    for kind, dtype in (("float", np.float32), ("float16", np.float16)):
        added = ", b" if bias else ""
        proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
            g ({kind}[M, {K}] x) => ({kind}[M, {N}] y) {{ y = Gemm<transB = 1>(x, w{added}) }}""")
        for name, array in (("w", weight), ("b", np.linspace(-1, 1, N)))[: 1 + bias]:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
        onnx.save(proto, tmp_path / "m.onnx")
        out = tmp_path / f"{kind}.onnx"
        plan = qgraph.optimize(tmp_path / "m.onnx", out, format=text, min_elements=1).plan
        assert plan.decisions[0].kernel == f"MatMulNBits bits=8 block={parse(text).group} level=4"
        found[kind] = qgraph.open(out).run({"x": x.astype(dtype)})["y"]
    ops = [node.op_type for node in onnx.load(tmp_path / "float16.onnx").graph.node]
    assert ops == ["Cast", "MatMulNBits", "Cast", *(["Add"] if bias else [])]
    assert found["float16"].dtype == np.float16
    if bias:  # added in float16
        np.testing.assert_allclose(found["float16"], found["float"], atol=1e-3)
    else:
        np.testing.assert_array_equal(found["float16"], found["float"].astype(np.float16))


@pytest.mark.parametrize("text", ["mxfp4", "mxfp8", "nf4:double=true"])
def test_what_no_kernel_takes_may_stay_float(text: str, tmp_path: Path) -> None:
    source, _ = model(tmp_path)
    with pytest.raises(qgraph.CoverageError, match="NO_FUSED_KERNEL"):
        qgraph.optimize(source, tmp_path / "o.onnx", format=text, unfused="float", prefer="size")


@pytest.mark.parametrize("scale, opset", [("tensor", 19), ("row", 19), ("block", 21)])
@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2"])
@pytest.mark.parametrize("target", ["ort-cpu", "qdq"])
def test_fp8_as_dequantize_linear(
    name: str, scale: str, opset: int, target: str, tmp_path: Path
) -> None:
    fmt = parse(f"{name}:scale={scale}")
    decision, found, wanted = optimized(tmp_path, fmt, target=target)
    assert decision.kernel.startswith("DequantizeLinear")
    assert_near(found, wanted, decision.kernel)
    written = onnx.load(tmp_path / "out.onnx")
    assert {o.domain: o.version for o in written.opset_import}[""] == opset
    kinds = {t.data_type for t in written.graph.initializer}
    assert onnx.TensorProto.FLOAT8E4M3FN in kinds or onnx.TensorProto.FLOAT8E5M2 in kinds
    assert [n.op_type for n in written.graph.node] == ["DequantizeLinear", "Gemm"]


@pytest.mark.parametrize("text", ["nf4", "mxfp8", "nvfp4", "mxfp4"])
def test_formats_that_dequantize_linear_cannot_say(text: str, tmp_path: Path) -> None:
    source, _ = model(tmp_path)
    with pytest.raises(qgraph.CoverageError, match="NO_FUSED_KERNEL"):
        qgraph.optimize(source, tmp_path / "o.onnx", format=text, target="qdq")


def test_where_the_opset_cannot_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable form stands in for DequantizeLinear."""

    def cannot(*_: object) -> None:
        raise CannotRaise("no converter")

    monkeypatch.setattr(lower_qdq, "raise_opset", cannot)
    decision, found, wanted = optimized(tmp_path, parse("fp8-e4m3"))
    assert decision.kernel == "portable"
    assert_near(found, wanted, decision.kernel)


EMBEDDED = ["fp8-e4m3", "fp8-e5m2:scale=tensor", "nf4", "fp4", "mxfp4", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("prefer", ["speed", "size"])
@pytest.mark.parametrize("text", EMBEDDED)
def test_embeddings(text: str, prefer: str, tmp_path: Path) -> None:
    """Rows are gathered packed; whole tables are never float."""
    fmt = parse(text)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (int64[2, 3] ids) => (float[2, 3, {K}] y) {{ y = Gather(e, ids) }}"""
    )
    table = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "e"))
    onnx.save(proto, tmp_path / "m.onnx")
    out = tmp_path / "o.onnx"
    result = qgraph.optimize(tmp_path / "m.onnx", out, embedding=fmt.spell(), prefer=prefer)
    fused = fmt.as_integers is not None and prefer == "speed"
    kernel = result.plan.decisions[0].kernel
    assert kernel == (f"GatherBlockQuantized bits=8 block={fmt.group}" if fused else "portable")
    ids = np.array([[0, 7, N - 1], [3, 3, 64]])
    found = qgraph.open(out).run({"ids": ids})["y"]
    wanted = fmt.dequantize(fmt.fitted_to(table).quantize(table, ir.DataType.FLOAT))[ids]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("text", ["fp8-e4m3:scale=block", "nf4:double=true"])
def test_embeddings_whose_rows_share_scales_stay_float(text: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (int64[2, 3] ids) => (float[2, 3, {K}] y) {{ y = Gather(e, ids) }}"""
    )
    table = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "e"))
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(qgraph.CoverageError):
        qgraph.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", embedding=text)


@pytest.mark.parametrize("text", ["nvfp4", "fp8-e4m3:scale=tensor", "fp8-e4m3", "nf4:double=true"])
def test_bad_numbers_are_named(text: str, tmp_path: Path) -> None:
    """Also where the whole weight is looked at first."""
    source, weight = model(tmp_path)
    proto = onnx.load(source)
    weight[130, 17] = np.nan
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, source)
    with pytest.raises(qgraph.InputError, match="weight w: NON_FINITE_WEIGHT: nan at row 130, col"):
        qgraph.optimize(source, tmp_path / "o.onnx", format=text)


def test_a_scale_that_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    source, _ = model(tmp_path, kind="float16")
    proto = onnx.load(source)
    weight = np.zeros((N, K), np.float16)
    weight[5, 200] = np.inf
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, source)
    with pytest.raises(qgraph.InputError, match="weight w: NON_FINITE_WEIGHT: inf at row 5, col"):
        qgraph.optimize(source, tmp_path / "o.onnx", format="fp8-e5m2")


FP8 = [
    f"fp8-{kind}:scale={scale}" for kind in ("e4m3", "e5m2") for scale in ("tensor", "row", "block")
]


@pytest.mark.parametrize("text", FP8)
def test_fp8_is_adopted_code_for_code(text: str, tmp_path: Path) -> None:
    """From DequantizeLinear to the portable form, and to the fused op of CUDA."""
    fmt = parse(text)
    _, found, _ = optimized(tmp_path, fmt, target="qdq", kind="float16")
    (row,) = qgraph.explain(tmp_path / "out.onnx").sites
    assert (row.format, row.reason) == (fmt.spell(), None)
    cuda = tmp_path / "cuda.onnx"
    options: dict[str, Any] = {"target": "ort-cuda", "check": False}
    result = qgraph.optimize(tmp_path / "out.onnx", cuda, **options)
    decision = result.plan.decisions[0]
    assert (decision.format, decision.solver) == (fmt.spell(), "adopted")
    fused = "e4m3" in text
    assert onnx.load(cuda).graph.node[0].op_type == (
        "MatMulBlockQuantizedFp8Weight" if fused else "DequantizeLinear"
    )
    again = tmp_path / "again.onnx"
    qgraph.optimize(tmp_path / "out.onnx", again)
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(np.float16)
    np.testing.assert_array_equal(qgraph.open(again).run({"x": x})["y"], found)


def test_fp8_of_other_granularity_stays_as_it_is(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{ROWS}, {K}] x) => (float[{ROWS}, {N}] y) {{
            w = DequantizeLinear<axis = 1, block_size = 128>(c, s)
            y = Gemm<transB = 1>(x, w)
        }}"""
    )
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, (N, K // 128)).astype(np.float32)
    tensor = onnx.TensorProto(name="c", data_type=onnx.TensorProto.FLOAT8E4M3FN, dims=codes.shape)
    tensor.raw_data = codes.tobytes()
    proto.graph.initializer.extend([tensor, onnx.numpy_helper.from_array(scales, "s")])
    onnx.save(proto, tmp_path / "m.onnx")
    (row,) = qgraph.explain(tmp_path / "m.onnx").sites
    assert row.reason == "DQ_GRANULARITY"
    assert "a scale for each row and 128 columns" in row.detail


@pytest.mark.parametrize("text", ["fp8-e4m3", "nf4", "nvfp4", "mxfp8", "uint4:zero=float"])
def test_command_line_says_what_was_done(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the plan to the reasons, and of the file again."""
    source, _ = model(tmp_path)
    out = tmp_path / "o.onnx"
    for words in (
        ["optimize", str(source), "-o", str(out), "--format", text, "--min-elements", "1"],
        ["explain", str(out)],
    ):
        assert run(words) == 0
    printed = capsys.readouterr().out
    assert parse(text).spell() in printed
    assert "1/1 linears" in printed


@every
def test_bfloat16_in_torch(fmt: Format, tmp_path: Path) -> None:
    decision, found, wanted = optimized(tmp_path, fmt, kind="bfloat16", target="torch-cpu")
    assert decision.quantized and decision.kernel != "portable"
    assert found.dtype == ml_dtypes.bfloat16
    error = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 1e-2


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_a_row_of_zeros_gives_zeros_in_fp8(kind: str, scale: str, tmp_path: Path) -> None:
    """An optimizing ONNX Runtime divides by the scales of a transposed FP8 weight."""
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    weight[:, 3] = 0
    if scale == "tensor":
        weight[:] = 0
    source = small(tmp_path, weight, 21)
    qgraph.optimize(source, tmp_path / "q.onnx", format=f"fp8-{kind}:scale={scale}", min_elements=1)
    x = np.ones((2, 64), np.float32)
    y = qgraph.open(tmp_path / "q.onnx").run({"x": x})["y"]
    assert np.isfinite(y).all()
    assert (y[:, 3] == 0).all()


def small(tmp_path: Path, weight: Array, opset: int) -> Path:
    """One linear in a file."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]>'
        "g (float[m, 64] x) => (float[m, 64] y) { y = MatMul(x, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("options", [{}, {"dequantize_at_load": True}])
@pytest.mark.parametrize("opset", [9, 12])
def test_functions_below_opset_13_are_refused(
    options: dict[str, Any], opset: int, tmp_path: Path
) -> None:
    """Unchecked, such a file would be written and never load."""
    source = small(tmp_path, np.ones((64, 64), np.float32), opset)
    with pytest.raises(CoverageError, match="nothing was quantized"):
        qgraph.optimize(
            source, tmp_path / "q.onnx", format="mxfp8", check=False, min_elements=1, **options
        )
    assert not (tmp_path / "q.onnx").exists()


def test_the_error_of_tiny_weights_is_told(tmp_path: Path) -> None:
    """Their squares underflow in float32, and an error of 0 would be claimed."""
    weight = 1e-25 * np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    report = qgraph.optimize(
        small(tmp_path, weight, 13), tmp_path / "q.onnx", format="int8:group=64", min_elements=1
    ).report
    (error,) = [step.error for step in report.steps if step.error is not None]
    assert 1e-3 < error < 1e-2
