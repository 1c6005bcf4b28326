"""Normalizations."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.runtimes.torch.onnx_ops.host import DTYPES
from qgraph.runtimes.torch.table import op


@op("LayerNormalization")
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int,
) -> tuple[Tensor, ...]:
    """Mean 0 and variance 1 over the axes from `axis` on; then the mean and 1/σ."""
    axis = axis + x.ndim if axis < 0 else axis
    shape = x.shape[axis:]
    if outputs == 1 and scale.shape == shape and (bias is None or bias.shape == shape):
        same = scale.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
        if same:
            return (functional.layer_norm(x, shape, scale, bias, epsilon),)
    wide = x.to(DTYPES[stash_type])
    axes = tuple(range(axis, x.ndim))
    mean = wide.mean(axes, keepdim=True)
    centered = wide - mean
    inverse = torch.rsqrt((centered * centered).mean(axes, keepdim=True) + epsilon)
    result = (centered * inverse).to(x.dtype) * scale
    result = result if bias is None else result + bias
    return (result, mean, inverse)[:outputs]


@op("RMSNormalization")
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """X / √(mean x² + ε) · scale, the mean taken over the axes from `axis` on."""
    axis = axis + x.ndim if axis < 0 else axis
    shape = x.shape[axis:]
    weight = scale if scale.shape == shape else scale.expand(shape)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x, shape, None, epsilon) * weight
    return functional.rms_norm(x, shape, weight, epsilon)


@op("BatchNormalization")
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    spatial: int = 1,
    outputs: int,
) -> tuple[Tensor, ...]:
    """Each channel (axis 1) by its running mean and variance, or by the batch's in training."""
    if not training_mode:
        same = functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        return (same,)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    now, spread = x.mean(axes), x.var(axes, correction=0)
    result = functional.batch_norm(x, now, spread, scale, bias, False, 0.0, epsilon)
    running = mean * momentum + now * (1 - momentum)
    wide = variance * momentum + spread * (1 - momentum)
    return (result, running, wide)[:outputs]


@op("InstanceNormalization")
def instance_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    """Mean 0 and variance 1 for each channel of each batch element."""
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@op("GroupNormalization")
def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    opset: int,
) -> Tensor:
    """Mean 0 and variance 1 for each group of channels; scales per group before opset 21."""
    if opset < 21 and scale.shape[0] == num_groups:
        repeats = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


@op("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """X divided by its norm along an axis; zero where that is zero."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return torch.where(norm == 0, 0.0, x / norm).to(x.dtype)


@op("MeanVarianceNormalization")
def mean_variance_normalization(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """Mean 0 and variance 1 over the axes."""
    mean = x.mean(axes, keepdim=True)
    spread = torch.sqrt((x * x).mean(axes, keepdim=True) - mean * mean)
    return (x - mean) / (spread + 1e-9)


@op("LRN")
def lrn(
    x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """X divided by a power of the squares of its neighbouring channels (Krizhevsky, 2012)."""
    before = math.floor((size - 1) / 2)
    squares = (x * x).transpose(1, -1)
    squares = functional.pad(squares, (before, size - 1 - before)).unfold(-1, size, 1).sum(-1)
    return x / (bias + alpha / size * squares.transpose(1, -1)) ** beta
