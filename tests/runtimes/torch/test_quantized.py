"""ONNX Runtime's products with packed weights, in the torch executor."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import Layout, parse
from qgraph.runtimes.torch.onnx_ops.quantized import dequantize
from tests.runtimes.torch.one_node import (
    MICROSOFT,
    Case,
    f32,
    module_of,
    run_onnxruntime,
    same,
    to_torch,
    u8,
)
from tests.runtimes.torch.weights import error, packed


def run(case: Case) -> torch.Tensor:
    found: torch.Tensor = module_of(case.model())(*[to_torch(x) for x in case.feeds().values()])[0]
    return found


@pytest.mark.parametrize("quant_type", [0, 1])
@pytest.mark.parametrize("n,k", [(6, 64), (5, 40), (3, 33)])
def test_matmul_bnb4_equals_onnxruntime(quant_type: int, n: int, k: int) -> None:
    """Where blocks of 32 divide rows, where they span them, and where half a byte is left."""
    inputs = f32(2, 3, k), u8((n * k + 1) // 2), abs(f32(-(-n * k // 32)))
    attributes = {"K": k, "N": n, "block_size": 32, "quant_type": quant_type}
    case = Case("MatMulBnb4", inputs, attributes, MICROSOFT)
    same(run(case), run_onnxruntime(case.model(), case.feeds())[0])


@pytest.mark.parametrize(
    "change,word", [({"quant_type": 2}, "quant_type 2, wanted 0"), ({"transB": 0}, "transB = 0")]
)
def test_what_matmul_bnb4_refuses(change: dict[str, int], word: str) -> None:
    attributes = {"K": 64, "N": 2, "block_size": 32, "quant_type": 1, **change}
    with pytest.raises(InputError, match=word):
        run(Case("MatMulBnb4", (f32(1, 64), u8(64), f32(4)), attributes, MICROSOFT))


@pytest.mark.parametrize(
    "change", [{"N": 4}, {"N": 16}, {"K": 32}, {"block_size": 64}, {"bits": 8}, {"block_size": 16}]
)
def test_matmul_nbits_refuses_attributes_that_lie(change: dict[str, int]) -> None:
    attributes = {"K": 64, "N": 8, "bits": 4, "block_size": 32, **change}
    x = f32(2, attributes["K"])
    case = Case("MatMulNBits", (x, u8(8, 2, 16), f32(8, 2)), attributes, MICROSOFT)
    with pytest.raises(InputError, match=r"MatMulNBits with codes of \(8, 2, 16\): wanted"):
        run(case)


GATHER = {"block_size": 32, "gather_axis": 0, "quantize_axis": 1}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits,k", [(4, 64), (4, 48), (8, 40), (2, 36)])
def test_gather_block_quantized_equals_onnxruntime(bits: int, k: int, zeros: bool) -> None:
    """Whole blocks, and rows that end within one."""
    blocks = -(-k // 32)
    parts = u8(5, k * bits // 8), np.array([[0, 3, -1]]), abs(f32(5, blocks))
    points = (u8(5, -(-blocks * bits // 8), seed=1),) if zeros else ()
    case = Case("GatherBlockQuantized", (*parts, *points), {**GATHER, "bits": bits}, MICROSOFT)
    same(run(case), run_onnxruntime(case.model(), case.feeds())[0])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ["int4", "uint4"])
@pytest.mark.parametrize("k", [64, 48])
def test_gather_of_codes_that_are_not_packed(name: str, k: int, zeros: bool) -> None:
    lowest, dtype = (-8, ml_dtypes.int4) if name == "int4" else (0, ml_dtypes.uint4)
    draw = np.random.default_rng(0)
    table = draw.integers(lowest, lowest + 16, (5, k)).astype(dtype)
    points = draw.integers(lowest, lowest + 16, (5, 2)).astype(dtype)
    ids = np.array([[0, 3, -1]])
    kept = (table, ids, abs(f32(5, 2)), *((points,) if zeros else ()))
    case = Case("GatherBlockQuantized", kept, {**GATHER, "bits": 4}, MICROSOFT)
    model = case.model()
    # ONNX Runtime is fed no 4-bit arrays: they are constants.
    for i, value in reversed(list(enumerate(kept))):
        if i != 1:
            tensor = onnx.numpy_helper.from_array(value, f"x{i}")
            model.graph.initializer.append(tensor)
            del model.graph.input[i]
    session = registry.load("target", "torch").open(model.SerializeToString())
    (found,) = session.run({"x1": ids}).values()
    same(torch.from_numpy(found), run_onnxruntime(model, {"x1": ids})[0])


@pytest.mark.parametrize("bad", [5, -6, -9])
def test_gather_block_quantized_refuses_ids_beyond_the_table(bad: int) -> None:
    parts = u8(5, 32), np.array([1, bad]), abs(f32(5, 2))
    with pytest.raises(InputError, match=f"id {bad} of a table of 5 rows: wanted -5 to 4"):
        run(Case("GatherBlockQuantized", parts, {**GATHER, "bits": 4}, MICROSOFT))


FP8 = "MatMulBlockQuantizedFp8Weight"


def fp8(n: int, k: int) -> tuple[Any, Any, torch.Tensor]:
    """E4M3 codes, scales for blocks of 128 in each row, and the weight that they are."""
    codes = f32(n, k).astype(ml_dtypes.float8_e4m3fn)
    scales = abs(f32(n, -(-k // 128), seed=1)) + np.float32(0.1)
    w = codes.astype(np.float32) * np.repeat(scales, 128, axis=1)[:, :k]
    return codes, scales, torch.from_numpy(w)


@pytest.mark.parametrize("n,k", [(6, 256), (5, 200)])
def test_fp8_weights(n: int, k: int) -> None:
    codes, scales, w = fp8(n, k)
    x, bias = f32(2, 3, k).astype(np.float16), f32(n).astype(np.float16)
    y = run(Case(FP8, (x, codes, scales, None, bias), {}, MICROSOFT))
    assert (y.dtype, y.shape) == (torch.float16, (2, 3, n))
    wanted = torch.from_numpy(x).flatten(0, 1)
    assert error(y.flatten(0, 1), wanted, w, torch.from_numpy(bias)) < 6e-4


def test_fp8_weights_and_activations() -> None:
    codes, scales, w = fp8(6, 128)
    x = f32(3, 128).astype(np.float16) * np.float16(8)
    x_scale = np.array([0.01], np.float32)  # 448 of them are 4.48: some saturate
    y = run(Case(FP8, (x, codes, scales, x_scale), {}, MICROSOFT))
    steps = np.clip(x.astype(np.float32) / x_scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    rounded = torch.from_numpy((steps.astype(np.float32) * x_scale).astype(np.float16))
    assert float(rounded.abs().max()) == pytest.approx(4.48, rel=1e-3)
    assert error(y, rounded, w) < 6e-4


def test_cast_fp8_weights_are_refused() -> None:
    codes, scales, _ = fp8(6, 128)
    x = f32(3, 128).astype(np.float16)
    module = module_of(Case(FP8, (x, codes, scales), {}, MICROSOFT).model())
    with pytest.raises(InputError, match=r"weight of torch\.float16, wanted float8_e4m3fn"):
        module(torch.from_numpy(x), to_torch(codes).half(), torch.from_numpy(scales))


def test_nvfp4_weights() -> None:
    fmt = parse("nvfp4")
    rows = f32(10, 96)
    quantized = fmt.fitted_to(rows).quantize(rows, ir.DataType.FLOAT)
    parts = fmt.pack(quantized, Layout("own"))
    x, bias = f32(4, 96).astype(np.float16), f32(10).astype(np.float16)
    op = "MatMulBlockQuantizedFp4Weight"
    inputs = (x, parts["codes"], parts["scales"], parts["tensor"], None, bias)
    y = run(Case(op, inputs, {}, MICROSOFT))
    w = torch.from_numpy(fmt.dequantize(quantized))
    assert error(y, torch.from_numpy(x), w, torch.from_numpy(bias)) < 6e-4


@pytest.mark.parametrize("text,wanted", [("mxfp4", torch.float16), ("nf4", torch.float32)])
def test_dequantized_weights_have_the_type_of_the_graph(text: str, wanted: torch.dtype) -> None:
    """Scales that are codes do not say it."""
    w = packed(parse(text), 9, 64)
    found = dequantize(*w.parts, k=64, dtype=ir.DataType.FLOAT16, format=w.layout)
    assert found.dtype == wanted
    assert torch.equal(found, w.floats.to(wanted))
