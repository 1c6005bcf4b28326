"""FP8 on both sides: the reference against plain numpy, hand examples, and the op."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from qgraph.errors import InputError
from qgraph.runtimes.torch import fp8_products
from qgraph.runtimes.torch import ops as ops

OPS = torch.ops.qgraph
SHAPES = [(3, 150, 300), (1, 128, 128), (5, 7, 50), (2, 260, 129)]


def case(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((m, k)) * np.exp(rng.standard_normal((m, k)))
    blocks = (-(-n // 128), -(-k // 128))
    weight = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
    codes = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(np.exp(rng.standard_normal(blocks)).astype(np.float32))
    return torch.from_numpy(x.astype(np.float32)), codes, scales


def by_numpy(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Both sides rounded, each slice of 128 columns rescaled; float64."""
    rows, wide = x.numpy(), codes.float().numpy().astype(np.float64)
    y = np.zeros((len(rows), len(wide)))
    for block in range(-(-rows.shape[1] // 128)):
        part = rows[:, block * 128 : block * 128 + 128]
        step = np.abs(part).max(1, keepdims=True) / np.float32(448)
        rounded = (part / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for at in range(len(wide)):
            row = wide[at, block * 128 : block * 128 + 128]
            y[:, at] += rounded @ row * step[:, 0] * float(scales[at // 128, block])
    return y


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_reference_is_what_the_scheme_says(m: int, n: int, k: int) -> None:
    x, codes, scales = case(m, n, k)
    wanted = by_numpy(x, codes, scales)
    found = fp8_products.linear(x, codes, scales, None).numpy()
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
    bias = torch.arange(n, dtype=torch.float32)
    with_bias = fp8_products.linear(x, codes, scales, bias).numpy()
    np.testing.assert_allclose(with_bias, found + bias.numpy(), rtol=1e-6, atol=1e-5)


def test_codes_and_scales_by_hand() -> None:
    x = torch.zeros(2, 130)
    x[0, :4] = torch.tensor([448.0, 17.0, -3.3, 2.0**-10])  # ties to even: 16; a tie to 0
    x[0, 128] = 0.5
    codes, scales = fp8_products.quantize(x)
    assert scales.tolist() == [[1.0, np.float32(0.5) / np.float32(448)], [0.0, 0.0]]
    assert codes[0, :4].float().tolist() == [448, 16, -3.25, 0]
    assert codes[0, 128].float() == 448
    assert not codes[1].float().any()
    assert codes.shape == (2, 130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_op(dtype: torch.dtype) -> None:
    x, codes, scales = case(6, 150, 300)
    y = OPS.linear_fp8_w8a8(x.to(dtype).view(2, 3, 300), codes, scales, None)
    assert (y.shape, y.dtype) == ((2, 3, 150), dtype)
    wanted = fp8_products.linear(x.to(dtype), codes, scales, None)
    assert torch.equal(y.view(6, 150), wanted)
    weights_alone = OPS.linear_fp8_block(x.to(dtype), codes, scales, None)
    error = (y.view(6, 150) - weights_alone).double().norm() / weights_alone.double().norm()
    assert 0.005 < error < 0.05
    assert OPS.linear_fp8_w8a8(x[:0], codes, scales, None).shape == (0, 150)


def test_opcheck_and_the_gradient() -> None:
    x, codes, scales = case(6, 150, 300)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (x.requires_grad_(), codes, scales, torch.zeros(150))
    found = torch.library.opcheck(OPS.linear_fp8_w8a8.default, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    (gradient,) = torch.autograd.grad(OPS.linear_fp8_w8a8(*arguments).sum(), x)
    (other,) = torch.autograd.grad(OPS.linear_fp8_block(*arguments).sum(), x)
    assert torch.equal(gradient, other)


def test_bad_input_says_so() -> None:
    x, codes, scales = case(6, 150, 300)
    with pytest.raises(InputError, match=r"wanted float32 \(2, 3\), one for 128"):
        OPS.linear_fp8_w8a8(x, codes, scales[:1], None)
    with pytest.raises(InputError, match="wanted 300 columns"):
        OPS.linear_fp8_w8a8(x[:, :299], codes, scales, None)
