"""Random numbers, and dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.runtimes.torch.onnx_ops.host import DTYPES, Value, device_of, number
from qgraph.runtimes.torch.table import op


@op("Dropout", hosts=(1, 2))
def dropout(
    x: Tensor,
    ratio: Value = None,
    training_mode: Value = None,
    *,
    seed: int | None = None,
    is_test: int = 1,
    outputs: int,
) -> tuple[Tensor, ...]:
    """X; in training some elements are zero and the others larger. Then the mask of those kept."""
    share = 0.5 if ratio is None else float(number(ratio))
    if training_mode is None or not bool(number(training_mode)) or share == 0:
        kept = torch.ones_like(x, dtype=torch.bool)
        return (x, kept)[:outputs]
    kept = torch.rand_like(x, dtype=torch.float32) >= share
    return (torch.where(kept, x / (1 - share), 0.0).to(x.dtype), kept)[:outputs]


@op("RandomNormalLike")
def random_normal_like(
    x: Tensor,
    *,
    dtype: int | None = None,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
) -> Tensor:
    """Normal numbers in the shape of x."""
    kind = x.dtype if dtype is None else DTYPES[dtype]
    return torch.randn_like(x, dtype=kind) * scale + mean


@op("RandomUniformLike")
def random_uniform_like(
    x: Tensor,
    *,
    dtype: int | None = None,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
) -> Tensor:
    """Numbers between low and high, equally likely, in the shape of x."""
    kind = x.dtype if dtype is None else DTYPES[dtype]
    return torch.rand_like(x, dtype=kind) * (high - low) + low


@op("RandomNormal")
def random_normal(
    *,
    shape: tuple[int, ...],
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    like: Tensor | None,
) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=DTYPES[dtype], device=device_of(like)) * scale + mean


@op("RandomUniform")
def random_uniform(
    *,
    shape: tuple[int, ...],
    dtype: int = 1,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
    like: Tensor | None,
) -> Tensor:
    """Numbers between low and high, equally likely."""
    drawn = torch.rand(shape, dtype=DTYPES[dtype], device=device_of(like))
    return drawn * (high - low) + low


@op("Bernoulli")
def bernoulli(x: Tensor, *, dtype: int | None = None, seed: float | None = None) -> Tensor:
    """One with the probability x, else zero."""
    kind = x.dtype if dtype is None else DTYPES[dtype]
    return (torch.rand_like(x, dtype=torch.float32) < x).to(kind)
