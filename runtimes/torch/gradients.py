"""Gradients of the quantized ops: of a product's activations and bias; weights have none.

The gradient of x is that of y times W, dequantized in the dtype of x, whichever kernel made y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch import fp8_products

Gradients = tuple[Tensor | None, ...]


def register(library: torch.library.Library) -> None:
    """Enter the gradients of the ops of `library`, which are defined already."""
    for name, backward, remember in (
        ("linear", _linear, _remember_linear),
        ("linear_fp8_block", _linear_fp8_block, _remember_fp8_block),
        ("linear_fp8_w8a8", _linear_fp8_block, _remember_fp8_block),
        ("dequantize", _none, _refuse_weights(1, 2)),
        ("embedding", _none, _refuse_weights(2, 3)),
    ):
        torch.library.register_autograd(
            f"qgraph::{name}", backward, setup_context=remember, lib=library
        )


def _refuse_weights(*parts: int) -> Callable[..., None]:
    """A function that raises InputError if one of the op's inputs `parts` wants a gradient."""

    def check(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        if any(ctx.needs_input_grad[part] for part in parts):
            raise InputError(
                "scales or zero points of a packed weight want a gradient, which they have not: "
                "call requires_grad_(False) on them, or run under torch.no_grad()"
            )

    return check


def _remember_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _refuse_weights(2, 3)(ctx, inputs, output)
    _, codes, scales, zeros, bias, ctx.k, ctx.layout = inputs
    ctx.save_for_backward(codes, scales, zeros)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear(ctx: Any, grad: Tensor) -> Gradients:
    codes, scales, zeros = ctx.saved_tensors
    wanted, bias = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    x = None
    if wanted:
        # Through the op, so that a compiled backward pass has one node for it.
        w = torch.ops.qgraph.dequantize(codes, scales, zeros, ctx.k, ctx.layout)
        x = grad @ w.to(grad.dtype)
    return x, None, None, None, _of_bias(grad, ctx.bias_dtype) if bias else None, None, None


def _remember_fp8_block(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _refuse_weights(1, 2)(ctx, inputs, output)
    _, weight, scales, bias = inputs
    ctx.save_for_backward(weight, scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_fp8_block(ctx: Any, grad: Tensor) -> Gradients:
    weight, scales = ctx.saved_tensors
    x = None
    if ctx.needs_input_grad[0]:
        steps = scales.repeat_interleave(fp8_products.BLOCK, 0)[: weight.shape[0]]
        steps = steps.repeat_interleave(fp8_products.BLOCK, 1)[:, : weight.shape[1]]
        x = grad @ (weight.to(torch.float32) * steps).to(grad.dtype)
    return x, None, None, _of_bias(grad, ctx.bias_dtype) if ctx.needs_input_grad[3] else None


def _of_bias(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0).to(dtype)


def _none(ctx: Any, grad: Tensor) -> Gradients:
    raise AssertionError("no input of this op can want a gradient")
