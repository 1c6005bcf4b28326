"""Gradients of the quantized ops: the same at every size and dtype, and none for weights."""

from __future__ import annotations

import pytest
import torch

from qgraph.errors import InputError
from qgraph.runtimes.torch import ops
from tests.runtimes.torch.weights import error, weight

OPS = torch.ops.qgraph


@pytest.mark.parametrize(
    "rows,n,k,dtype",
    [
        (2, 8, 64, torch.float32),
        (2, 2048, 1024, torch.float32),
        (2, 8, 64, torch.bfloat16),
        (40, 8, 64, torch.bfloat16),
        (2, 16, 64, torch.float16),
    ],
)
def test_the_gradient_of_x_and_bias(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    w = weight(4, "asymmetric", n, k, 32)
    x = torch.randn(rows, k, dtype=dtype, requires_grad=True)
    bias = torch.randn(n, requires_grad=True)
    y = OPS.linear(x, *w.parts, bias, k, w.layout)
    out = torch.randn(rows, n, dtype=dtype)
    y.backward(out)
    wanted = out.float() @ w.floats()
    assert x.grad is not None and bias.grad is not None
    assert (x.grad.dtype, bias.grad.dtype) == (dtype, torch.float32)
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((x.grad.float() - wanted).norm() / wanted.norm()) < near
    torch.testing.assert_close(bias.grad, out.float().sum(0), rtol=near, atol=10 * near)


def test_the_gradient_of_a_product_with_fp8_blocks() -> None:
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    steps = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    x, bias = torch.randn(3, 300, requires_grad=True), torch.randn(200, requires_grad=True)
    y = OPS.linear_fp8_block(x, codes, scales, bias)
    y.sum().backward()
    assert x.grad is not None and bias.grad is not None
    w = codes.float() * steps
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, -1), rtol=1e-4, atol=1e-3)
    assert bias.grad.tolist() == [3.0] * 200
    assert error(y.detach(), x.detach(), w, bias.detach()) < 1e-6


def test_a_compiled_backward_pass() -> None:
    w = weight(4, "symmetric", 16, 64, 32)
    x = torch.randn(3, 64, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return OPS.linear(x, *w.parts, None, 64, w.layout).sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, w.floats().sum(0).expand(3, -1))


def test_weights_have_no_gradients() -> None:
    w = weight(4, "symmetric", 16, 64, 32)
    scales = w.scales.clone().requires_grad_()
    x, ids = torch.randn(3, 64), torch.tensor([1])
    calls = (
        lambda: OPS.linear(x, w.codes, scales, None, None, 64, w.layout),
        lambda: OPS.dequantize(w.codes, scales, None, 64, w.layout),
        lambda: OPS.embedding(ids, w.codes, scales, None, 64, w.layout),
    )
    for call in calls:
        with pytest.raises(InputError, match="want a gradient"):
            call()
        with torch.no_grad():
            assert not call().requires_grad


def test_gradients_are_registered_as_torch_wants_them() -> None:
    w = weight(4, "symmetric", 16, 64, 32)
    x = torch.randn(3, 64, requires_grad=True)
    torch.library.opcheck(OPS.linear.default, (x, *w.parts, None, 64, w.layout))
    fp8 = {"linear_fp8_block", "linear_fp8_w8a8"}
    assert set(ops.SCHEMAS) == {"linear", "dequantize", "embedding", *fp8}
