"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import Value, ints
from qgraph.runtimes.torch.table import op

_CONV: tuple[Any, ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED: tuple[Any, ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


def same_pads(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    auto_pad: str,
    pads: tuple[int, ...] | None,
) -> tuple[list[int], list[int]]:
    """Zeros before and behind each spatial axis, as `pads` or `auto_pad` say."""
    rank = len(sizes)
    if auto_pad in ("NOTSET", ""):
        given = pads or (0,) * (2 * rank)
        return list(given[:rank]), list(given[rank:])
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    before, behind = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        wanted = (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1
        total = torch.sym_max(0, wanted - size)
        less = total // 2
        before.append(less if auto_pad == "SAME_UPPER" else total - less)
        behind.append(total - less if auto_pad == "SAME_UPPER" else less)
    return before, behind


def pad_spatial(x: Tensor, before: list[int], behind: list[int], value: float = 0.0) -> Tensor:
    """X with its last axes padded."""
    pairs = [n for pair in zip(before[::-1], behind[::-1], strict=True) for n in pair]
    return functional.pad(x, pairs, value=value)


@op("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Cross-correlation over one to three spatial axes."""
    rank = x.ndim - 2
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    kernel = tuple(weight.shape[2:])
    before, behind = same_pads(tuple(x.shape[2:]), kernel, strides, dilations, auto_pad, pads)
    if before != behind:
        x, before = pad_spatial(x, before, behind), [0] * rank
    x = x.to(weight.dtype)
    return _CONV[rank - 1](x, weight, bias, strides, tuple(before), dilations, group)


@op("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    output_padding: tuple[int, ...] | None = None,
    output_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """The transpose of a convolution: computed whole, then cut by the pads."""
    rank = x.ndim - 2
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    extra = output_padding or (0,) * rank
    whole = _TRANSPOSED[rank - 1](x.to(weight.dtype), weight, bias, strides, 0, 0, group, dilations)
    before, behind = (
        list((pads or (0,) * (2 * rank))[:rank]),
        list((pads or (0,) * (2 * rank))[rank:]),
    )
    wanted = ints(output_shape)[-rank:] if output_shape else None
    if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = tuple(n * s for n, s in zip(x.shape[2:], strides, strict=True))
    for axis in range(rank):
        have = whole.shape[axis + 2] + extra[axis]
        if wanted is not None:
            total = have - wanted[axis]
            less = total // 2 if total >= 0 else -(-total // 2)
            before[axis] = total - less if auto_pad == "SAME_LOWER" else less
            behind[axis] = total - before[axis]
    # Padding by a negative number cuts; output_padding adds at the end.
    behind = [b - e for b, e in zip(behind, extra, strict=True)]
    if not any(before) and not any(behind):
        return whole
    cut = pad_spatial(whole, [-n for n in before], [-n for n in behind])
    return cut if bias is None or not any(n < 0 for n in behind) else _refill(cut, bias, behind)


def _refill(x: Tensor, bias: Tensor, behind: list[int]) -> Tensor:
    """Rows that output_padding added hold the bias alone."""
    for axis, count in enumerate(behind):
        if count < 0:
            end = x.narrow(axis + 2, x.shape[axis + 2] + count, -count)
            shape = [-1] + [1] * (x.ndim - 2)
            end.add_(bias.reshape(shape))
    return x


@op("ConvInteger")
def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Int32 convolution of 8-bit tensors, their zero points subtracted first."""
    wide, kernel = x.to(torch.float64), weight.to(torch.float64)
    wide = wide if x_zero is None else wide - x_zero
    if w_zero is not None:
        kernel = kernel - w_zero.reshape([-1] + [1] * (kernel.ndim - 1))
    result = conv(
        wide,
        kernel,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    return result.to(torch.int32)


@op("Col2Im", hosts=(1, 2))
def col2im(
    x: Tensor,
    image_shape: Value,
    block_shape: Value,
    *,
    dilations: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Sums of overlapping blocks, one column each, in a picture of two axes.

    Raises:
        InputError: a picture of another rank.
    """
    size, block = ints(image_shape), ints(block_shape)
    rank = len(size)
    if rank != 2:
        raise InputError(f"Col2Im over {rank} axes: the torch executor has it for 2")
    before, behind = (
        list((pads or (0,) * (2 * rank))[:rank]),
        list((pads or (0,) * (2 * rank))[rank:]),
    )
    whole = tuple(n + a + b for n, a, b in zip(size, before, behind, strict=True))
    picture = functional.fold(x, whole, block, dilations or (1,) * rank, 0, strides or (1,) * rank)
    return pad_spatial(picture, [-n for n in before], [-n for n in behind])
