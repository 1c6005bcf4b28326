from __future__ import annotations

import dataclasses
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import Layout
from qgraph.runtimes.torch import format_function, ops
from tests.runtimes.torch.weights import BITS, DTYPES, GROUPS, ZEROS, error, weight

NAMES = ("int2", "int4", "int8", "uint2", "uint4", "uint8")
OPS = torch.ops.qgraph


def test_schemas_are_pinned() -> None:
    assert ops.SCHEMAS == {
        "linear": (
            "(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, "
            "int k, str format) -> Tensor"
        ),
        "dequantize": ("(Tensor codes, Tensor scales, Tensor? zeros, int k, str format) -> Tensor"),
        "embedding": (
            "(Tensor ids, Tensor codes, Tensor scales, Tensor? zeros, int k, str format) -> Tensor"
        ),
        "linear_fp8_block": "(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
    }
    for name, schema in ops.SCHEMAS.items():
        assert str(getattr(OPS, name).default._schema) == f"qgraph::{name}{schema}"
        assert f"qgraph::{name}(" in inspect.getdoc(ops)  # type: ignore[operator]


def test_ops_load_neither_onnx_nor_kernels() -> None:
    heavy = ("onnx", "onnx_ir", "onnxruntime", "triton", "qgraph.formats.base")
    code = (
        f"import sys, qgraph.runtimes.torch.ops; print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("k", [128, 100, 33])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_the_format(name: str, group: int, k: int, dtype: ir.DataType) -> None:
    fmt = dataclasses.replace(registry.load("format", name), group=group)
    rows = np.random.default_rng(k).standard_normal((7, k)).astype(np.float32)
    quantized = fmt.quantize(rows, dtype)
    parts = fmt.pack(quantized, Layout("blocks", group))
    codes, scales = (torch.from_numpy(np.ascontiguousarray(parts[p])) for p in ("codes", "scales"))
    zeros = torch.from_numpy(parts["zeros"]) if "zeros" in parts else None
    layout = fmt.function_name.removeprefix("Dequantize")
    expected = torch.from_numpy(fmt.dequantize(quantized))
    found = OPS.dequantize(codes, scales, zeros, k, layout)
    assert found.dtype == scales.dtype
    assert found.is_contiguous()
    assert torch.equal(found, expected.to(scales.dtype))
    ids = torch.tensor([[0, -1, 3], [6, 0, -7]])
    assert torch.equal(OPS.embedding(ids, codes, scales, zeros, k, layout), found[ids])


@pytest.mark.parametrize("bits,zeros", list(itertools.product(BITS, ZEROS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_its_reference(bits: int, zeros: str, dtype: torch.dtype) -> None:
    w = weight(bits, zeros, 21, 100, 32, dtype)
    assert torch.equal(OPS.dequantize(*w.parts, 100, w.layout), w.floats().to(dtype))
    bias = torch.randn(21).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}[dtype]
    for m in (1, 40):
        x = torch.randn(m, 2, 100).to(dtype)
        y = OPS.linear(x, *w.parts, bias, 100, w.layout)
        assert y.shape == (m, 2, 21)
        assert y.dtype == dtype
        assert error(y.flatten(0, 1), x.flatten(0, 1), w.floats(), bias) < tolerance


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (3, 2)])
def test_linear_takes_any_rank(lead: tuple[int, ...]) -> None:
    w = weight(4, "symmetric", 8, 32, 16)
    assert OPS.linear(torch.randn(*lead, 32), *w.parts, None, 32, "Int4V1").shape == (*lead, 8)


@pytest.mark.parametrize("name", registry.names("format"))
def test_every_format_has_a_reference(name: str) -> None:
    """A format without a dequantize by hand runs its ONNX function, and equals numpy's."""
    fmt = registry.load("format", name)
    rows = np.random.default_rng(1).standard_normal((40, 256)).astype(np.float32)
    quantized = fmt.quantize(rows, ir.DataType.FLOAT)
    parts = list(fmt.pack(quantized, fmt.default_layout).values())
    codes, scales, *rest = (torch.from_numpy(np.array(p, copy=True)) for p in parts)
    third = rest[0] if rest else None
    layout = fmt.function_name.removeprefix("Dequantize")
    expected = torch.from_numpy(fmt.dequantize(quantized))
    assert torch.equal(format_function.dequantize(codes, scales, third, 256, layout), expected)
    assert torch.equal(OPS.dequantize(codes, scales, third, 256, layout), expected)
    x = torch.randn(3, 256)
    y = OPS.linear(x, codes, scales, third, None, 256, layout)
    assert error(y, x, expected) < 1e-6


def test_fp8_blocks() -> None:
    weights = torch.randn(150, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    w = weights.float()
    for i, j in itertools.product(range(2), range(2)):
        w[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scales[i, j]
    x, bias = torch.randn(2, 3, 200), torch.randn(150)
    y = OPS.linear_fp8_block(x, weights, scales, bias)
    assert error(y.flatten(0, 1), x.flatten(0, 1), w, bias) < 1e-6


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        w = weight(4, "asymmetric", 24, 64, 32)
        for name, part in zip(("codes", "scales", "zeros"), w.parts, strict=True):
            self.register_buffer(name, part)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.codes, self.scales, self.zeros)
        return (
            OPS.linear(x, *parts, None, 64, "Uint4V1"),
            OPS.embedding(ids, *parts, 64, "Uint4V1"),
        )


@pytest.mark.parametrize("op", ["linear", "dequantize", "embedding", "linear_fp8_block"])
def test_opcheck(op: str) -> None:
    w = weight(4, "asymmetric", 24, 64, 32)
    arguments = {
        "linear": (torch.randn(2, 64), *w.parts, torch.randn(24), 64, "Uint4V1"),
        "dequantize": (*w.parts, 64, "Uint4V1"),
        "embedding": (torch.tensor([[1, 2]]), *w.parts, 64, "Uint4V1"),
        "linear_fp8_block": (
            torch.randn(3, 64), torch.randn(9, 64).to(torch.float8_e4m3fn), torch.ones(1, 1), None,
        ),
    }[op]  # fmt: skip
    tests = [
        "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_schema",
    ]  # fmt: skip
    if op == "linear_fp8_block":
        tests.remove("test_schema")  # torch compares by a product that it lacks for float8
    found = torch.library.opcheck(getattr(OPS, op).default, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


def test_export_save_load_and_compile(tmp_path: Path) -> None:
    layer, x, ids = Layer(), torch.randn(2, 5, 64), torch.tensor([0, 23])
    some = torch.export.Dim.DYNAMIC
    program = torch.export.export(layer, (x, ids), dynamic_shapes=({0: some, 1: some}, {0: some}))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for other, more in ((x, ids), (torch.randn(3, 7, 64), torch.tensor([1, 2, 3]))):
        expected = layer(other, more)
        for module in (loaded, compiled):
            for a, b in zip(module(other, more), expected, strict=True):
                assert torch.equal(a, b)


W = weight(4, "symmetric", 8, 64, 32)
A = weight(4, "asymmetric", 8, 64, 32)


@pytest.mark.parametrize(
    "arguments,words",
    [
        ((torch.ones(2, 64, dtype=torch.int32), *W.parts, None, 64, "Int4V1"), "torch.int32"),
        ((torch.ones(2, 63), *W.parts, None, 64, "Int4V1"), "wanted 64 columns"),
        ((torch.ones(2, 64), *W.parts, None, 32, "Int4V1"), "hold 64 columns, not k = 32"),
        ((torch.ones(2, 64), *W.parts, None, 64, "Uint4V1"), "needs zero points"),
        ((torch.ones(2, 64), *A.parts, None, 64, "Int4V1"), "the layout Uint4V1"),
        ((torch.ones(2, 64), *W.parts, None, 64, "Int4V9"), "no format has the layout 'Int4V9'"),
        ((torch.ones(2, 64), W.codes.int(), W.scales, None, None, 64, "Int4V1"), "wanted uint8"),
        ((torch.ones(2, 64), W.codes, W.scales.t(), None, None, 64, "Int4V1"), "one for each"),
        ((torch.ones(2, 64), *A.parts[:2], A.zeros[:, :0], None, 64, "Uint4V1"), "(8, 1)"),  # type: ignore[index]
    ],
)  # fmt: skip
def test_bad_parts_are_named(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        OPS.linear(*arguments)
    assert words in str(caught.value)


def test_bad_fp8_parts_are_named() -> None:
    weights = torch.ones(130, 64).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"wanted float32 \(2, 1\)"):
        OPS.linear_fp8_block(torch.ones(1, 64), weights, torch.ones(1, 1), None)
    with pytest.raises(InputError, match="wanted float8_e4m3fn"):
        OPS.linear_fp8_block(torch.ones(1, 64), weights.float(), torch.ones(2, 1), None)
