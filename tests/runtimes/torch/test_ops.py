from __future__ import annotations

import dataclasses
import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import Format, Layout, parse
from qgraph.runtimes.torch import dequantize, format_function, ops
from tests.runtimes.torch.weights import (
    BITS,
    DTYPES,
    FORMATS,
    GROUPS,
    LEVELS,
    ZEROS,
    error,
    packed,
    weight,
)

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
        "linear_fp8_w8a8": "(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
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


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spell())
@pytest.mark.parametrize("n,k", [(40, 256), (7, 33), (300, 100)])
def test_every_format_equals_numpy(fmt: Format, n: int, k: int) -> None:
    w = packed(fmt, n, k)
    found = OPS.dequantize(*w.parts, k, w.layout)
    assert torch.equal(found, w.floats)
    assert torch.equal(format_function.dequantize(*w.parts, k, w.layout), w.floats)
    ids = torch.tensor([[0, -1, 3], [6, 0, 1 - n]])
    assert torch.equal(OPS.embedding(ids, *w.parts, k, w.layout), w.floats[ids])
    x, bias = torch.randn(3, k), torch.randn(n)
    assert error(OPS.linear(x, *w.parts, bias, k, w.layout), x, w.floats, bias) < 1e-6


@pytest.mark.parametrize("fmt", LEVELS, ids=lambda fmt: fmt.spell())
def test_every_code_is_read(fmt: Format) -> None:
    """NaN and infinities as the format's function has them."""
    w = packed(fmt, 8, 96, every_code=True)
    found = OPS.dequantize(*w.parts, w.k, w.layout)
    wanted = format_function.dequantize(*w.parts, w.k, w.layout)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("text", ["nf4", "nf4:double=true"])
def test_groups_of_levels(text: str, group: int) -> None:
    w = packed(parse(text, group=group), 9, 100)
    assert torch.equal(OPS.dequantize(*w.parts, 100, w.layout), w.floats)


def test_layouts_without_codes_that_torch_reads_run_their_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A format that is neither integers nor levels has a reference too."""
    monkeypatch.setattr(dequantize, "codes_of", lambda layout: None)
    w = packed(parse("nf4"), 9, 100)
    assert torch.equal(OPS.dequantize(*w.parts, 100, w.layout), w.floats)
    ids = torch.tensor([3, 8])
    assert torch.equal(OPS.embedding(ids, *w.parts, 100, w.layout), w.floats[ids])


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


NVFP4, DOUBLE, BLOCKS = (
    packed(parse(text), 130, 64) for text in ("nvfp4", "nf4:double=true", "fp8-e4m3:scale=block")
)


@pytest.mark.parametrize(
    "parts,layout,words",
    [
        ((NVFP4.codes, NVFP4.scales.float(), NVFP4.third), "Nvfp4V1", "wanted uint8 codes of (130"),
        ((NVFP4.codes, NVFP4.scales, None), "Nvfp4V1", "third part none: wanted (1,)"),
        ((DOUBLE.codes, DOUBLE.scales, DOUBLE.third[:0]), "Nf4DoubleV1", "wanted (1, 2)"),  # type: ignore[index]
        ((DOUBLE.codes, DOUBLE.scales, None), "Nf4V1", "wanted floats of (130, 1)"),
        ((BLOCKS.codes, BLOCKS.scales[:1], None), "Fp8E4m3BlockV1", "wanted floats of (2, 1)"),
        ((BLOCKS.codes, BLOCKS.scales[:1], NVFP4.third), "Fp8E4m3TensorV1", "(1,): wanted none"),
        ((W.codes, W.scales, A.zeros), "Uint4FloatZeroV1", "float zero points, found uint8"),
    ],
)
def test_bad_parts_of_levels_are_named(parts: Any, layout: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        OPS.dequantize(*parts, 64, layout)
    assert words in str(caught.value)


def test_bad_fp8_parts_are_named() -> None:
    weights = torch.ones(130, 64).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"wanted float32 \(2, 1\)"):
        OPS.linear_fp8_block(torch.ones(1, 64), weights, torch.ones(1, 1), None)
    with pytest.raises(InputError, match="wanted float8_e4m3fn"):
        OPS.linear_fp8_block(torch.ones(1, 64), weights.float(), torch.ones(2, 1), None)


@pytest.mark.parametrize(
    "bias",
    [
        torch.ones(1),
        torch.ones(7),
        torch.ones(3, 8),
        torch.ones(8, dtype=torch.int32),
        torch.ones(8, device="meta"),
    ],
)
def test_a_bias_has_one_float_for_each_row(bias: torch.Tensor) -> None:
    w = weight(4, "symmetric", 8, 64, 32)
    for x in (torch.ones(3, 64), torch.ones(3, 64).bfloat16()):
        with pytest.raises(InputError, match=r"^bias (of|on)"):
            OPS.linear(x, *w.parts, bias, 64, w.layout)
    fp8 = torch.ones(8, 64).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"^bias (of|on)"):
        OPS.linear_fp8_block(torch.ones(3, 64), fp8, torch.ones(1, 1), bias)


@pytest.mark.parametrize("bad", [8, -9, -16, 2**62])
def test_an_id_beyond_the_table_is_refused(bad: int) -> None:
    w = weight(4, "symmetric", 8, 64, 32)
    with pytest.raises(InputError, match=f"id {bad} of a table of 8 rows: wanted -8 to 7"):
        OPS.embedding(torch.tensor([0, bad]), *w.parts, 64, w.layout)


def test_ids_are_integers_of_any_width() -> None:
    w = weight(4, "symmetric", 8, 64, 32)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        rows = OPS.embedding(torch.tensor([1, 7], dtype=dtype), *w.parts, 64, w.layout)
        assert torch.equal(rows, w.floats()[[1, 7]])
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(InputError, match="wanted integers"):
            OPS.embedding(torch.ones(2, dtype=dtype), *w.parts, 64, w.layout)
