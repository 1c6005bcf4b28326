"""nf4, fp4, mxfp4, mxfp8 and nvfp4 against the public tools that define them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.formats import small_floats
from qgraph.formats.base import Array, QuantizedWeight, parse
from qgraph.formats.bitsandbytes import scale_levels

F32 = ir.DataType.FLOAT
N, K = 48, 320


def rows(seed: int = 0) -> Array:
    found = np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32) * 0.05
    found[3, 64:128] *= 30
    return found


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def bitsandbytes(torch: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "bitsandbytes.functional",
            reason="bitsandbytes is not installed",
            exc_type=ImportError,
        )


@pytest.fixture(scope="module")
def torchao(torch: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
        import torchao.prototype.mx_formats.mx_tensor as mx
        import torchao.prototype.mx_formats.nvfp4_tensor as nvfp4
    return mx, nvfp4


# --------------------------------------------------------------------------------- bitsandbytes


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_levels_are_bitsandbytes(bitsandbytes: Any, name: str) -> None:
    table = bitsandbytes.get_4bit_type(name, device="cpu")
    np.testing.assert_array_equal(parse(name).levels, table.numpy())


def test_levels_of_scales_are_bitsandbytes(bitsandbytes: Any) -> None:
    np.testing.assert_array_equal(scale_levels(), bitsandbytes.create_dynamic_map().numpy())


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_bytes_and_scales_are_bitsandbytes(
    torch: Any, bitsandbytes: Any, name: str, group: int
) -> None:
    """The same bytes but for numbers within float noise of the middle between two levels."""
    fmt = parse(name, group=group)
    k = 320 if 320 % group == 0 else 384
    given = np.random.default_rng(1).standard_normal((N, k)).astype(np.float32)
    packed, state = bitsandbytes.quantize_4bit(
        torch.from_numpy(given), blocksize=group, quant_type=name
    )
    weight = fmt.quantize(given, F32)
    np.testing.assert_array_equal(weight.scales.reshape(-1), state.absmax.numpy())
    parts = {"codes": packed.numpy(), "scales": state.absmax.numpy()}
    theirs = fmt.unpack(parts, N, k, fmt.default_layout)  # type: ignore[arg-type]
    mine = np.where(fmt.levels[weight.codes] == 0, theirs.codes, weight.codes)  # any zero will do
    assert (theirs.codes != mine).mean() < 1e-4
    np.testing.assert_allclose(
        np.abs(fmt.dequantize(theirs) - given), np.abs(fmt.dequantize(weight) - given), atol=2e-6
    )
    back = bitsandbytes.dequantize_4bit(packed, state).numpy()
    np.testing.assert_allclose(fmt.dequantize(theirs), back, rtol=2e-7)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_double_quantization_is_bitsandbytes(torch: Any, bitsandbytes: Any, name: str) -> None:
    fmt = parse(f"{name}:double=true")
    given = np.random.default_rng(2).standard_normal((512, K)).astype(np.float32)
    packed, state = bitsandbytes.quantize_4bit(
        torch.from_numpy(given), quant_type=name, compress_statistics=True
    )
    weight = fmt.quantize(given, F32)
    np.testing.assert_allclose(weight.more["mean"], state.offset.item(), rtol=1e-6)
    nested = weight.more["nested"].reshape(-1)[::256]
    np.testing.assert_allclose(nested, state.state2.absmax.numpy(), rtol=1e-5)
    codes = weight.more["codes"].reshape(-1)
    assert (codes != state.absmax.numpy()).mean() < 2e-3
    parts = {
        "codes": packed.numpy(),
        "scales": state.absmax.numpy(),
        "nested": np.stack([state.state2.absmax.numpy(), np.full(10, state.offset.item())], 1),
    }
    parts["nested"] = parts["nested"].astype(np.float32)
    theirs = fmt.unpack(parts, 512, K, fmt.default_layout)  # type: ignore[arg-type]
    back = bitsandbytes.dequantize_4bit(packed, state).numpy()
    np.testing.assert_allclose(fmt.dequantize(theirs), back, rtol=1e-5, atol=1e-7)
    # Codes are chosen against the scale as it reads back, theirs against what it was.
    assert np.square(fmt.dequantize(weight) - given).sum() <= np.square(back - given).sum()


# -------------------------------------------------------------------------------------- torchao


def values_of(codes: Any, bits: int) -> Array:
    """torchao's data as the codes of a row, one byte each."""
    found = np.asarray(codes).view(np.uint8)
    if bits == 8:
        return found
    return np.stack([found & 15, found >> 4], -1).reshape(len(found), -1)


@pytest.mark.parametrize(
    "text, element",
    [
        ("mxfp4", "float4_e2m1fn_x2"),
        ("mxfp8", "float8_e4m3fn"),
        ("mxfp8:element=e5m2", "float8_e5m2"),
    ],
)
def test_mx_is_torchao(torch: Any, torchao: Any, text: str, element: str) -> None:
    fmt = parse(text)
    scale, data = torchao[0].to_mx(torch.from_numpy(rows()), getattr(torch, element), 32)
    weight = fmt.quantize(rows(), F32)
    parts = fmt.pack(weight, fmt.default_layout)
    np.testing.assert_array_equal(parts["scales"], scale.view(torch.uint8).numpy())
    theirs = values_of(data.view(torch.uint8).numpy(), fmt.bits)
    np.testing.assert_array_equal(weight.codes, theirs)


def test_nvfp4_is_torchao(torch: Any, torchao: Any) -> None:
    """torchao multiplies by reciprocals: codes differ where that crosses a middle."""
    fmt = parse("nvfp4")
    weight = fmt.quantize(rows(), F32)
    tensor = np.float32(np.abs(rows()).max() / np.float32(448 * 6))
    np.testing.assert_array_equal(weight.more["tensor"], np.full((N, 1), tensor))
    scale, data = torchao[1].nvfp4_quantize(
        torch.from_numpy(rows()), per_tensor_scale=torch.tensor(tensor)
    )
    np.testing.assert_array_equal(
        weight.more["codes"], scale.view(torch.uint8).numpy().reshape(N, -1)
    )
    theirs = values_of(data.view(torch.uint8).numpy(), 4)
    assert (weight.codes != theirs).mean() < 1e-3
    other = QuantizedWeight(theirs, weight.scales, None, weight.more)
    np.testing.assert_allclose(
        np.abs(fmt.dequantize(other) - rows()), np.abs(fmt.dequantize(weight) - rows()), atol=1e-6
    )


def test_nvfp4_scales_are_e4m3(torch: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(small_floats.E4M3, codes)
