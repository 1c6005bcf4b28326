"""Products with packed codes on the CPU: two kernels of torch, and W dequantized by rows.

Torch's kernels take integers, and are fast in bfloat16 only; in float32 and float16 they compute
element by element, 20 times slower than a matmul of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as float_linear
from torch.nn.functional import pad

from qgraph.runtimes.torch import dequantize as reference
from qgraph.runtimes.torch import repack
from qgraph.runtimes.torch.dequantize import Codes, IntegerCodes

INT4PACK_GROUPS = (256, 128, 64, 32)
_ROWS_OF_INT4PACK = 16
_PACKED_AT_ONCE = 1 << 20
_WEIGHTS_AT_ONCE = 1 << 20
"""Weights that are float at a time, 4 MB: more would leave the caches, less is all overhead."""


def int4pack_group(block: int) -> int | None:
    """The group of `_weight_int4pack_mm_for_cpu` for blocks of `block` codes: a divisor of it."""
    return next((group for group in INT4PACK_GROUPS if block % group == 0), None)


def int4pack(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    kind: IntegerCodes,
) -> Tensor:
    """Compute y `[M, N]` of bfloat16 x `[M, k]`, 2- and 4-bit codes; the weight is repacked once.

    The copy takes 4 bits a weight, and 4 bytes for each group of it; making it takes 4 MB more.
    """
    n, blocks, nbytes = codes.shape
    block = nbytes * 8 // kind.bits
    group = int4pack_group(block)
    assert group is not None
    packed, steps = repack.cached(
        "int4pack", (codes, scales, zeros), lambda: _to_int4pack(codes, scales, zeros, kind, group)
    )
    wide = pad(x, (0, blocks * block - x.shape[1])).contiguous()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(wide, packed, group, steps)[:, :n]
    return (y if bias is None else y + bias.to(x.dtype)).contiguous()


def int8pack(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """Compute y `[M, N]` of bfloat16 x `[M, k]`, 8-bit symmetric codes with one scale a row.

    The copy takes a byte a weight: the kernel reads signed codes.
    """
    packed, steps = repack.cached(
        "int8pack",
        (codes, scales),
        lambda: (
            (codes[:, 0, :k] ^ 0x80).view(torch.int8).contiguous(),
            scales[:, 0].to(x.dtype).contiguous(),
        ),
    )
    y: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), packed, steps)
    return y if bias is None else y + bias.to(x.dtype)


def by_rows(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    kind: Codes,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, k]` in float32, rows of W dequantized 4 MB at a time."""
    n, blocks, nbytes = codes.shape
    wide = x.to(torch.float32)
    y = torch.empty(x.shape[0], n, dtype=x.dtype)
    step = min(n, max(16, _WEIGHTS_AT_ONCE // k))
    scratch = reference.Scratch(kind, step * blocks * nbytes)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        at = torch.arange(start, min(n, start + step))
        w = reference.scaled(scratch.code_values(codes[rows]), scales, zeros, kind, at)
        part = None if bias is None else bias[rows].to(torch.float32)
        y[:, rows] = float_linear(wide, w[:, :k], part)
    return y


def _to_int4pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: IntegerCodes, group: int
) -> tuple[Tensor, Tensor]:
    """The codes as the kernel wants them, and bfloat16 `[K / group, N, 2]`: scales and offsets.

    The kernel computes (q - 8)·s + offset; codes of 2 bits are shifted so that their middle is 8.
    """
    n, blocks, nbytes = codes.shape
    lacking = -n % _ROWS_OF_INT4PACK
    shift = 8 - kind.middle
    step = max(1, _PACKED_AT_ONCE // (blocks * nbytes * 8 // kind.bits) // 64) * 64
    pieces = []
    for start in range(0, n, step):
        rows = codes[start : start + step].reshape(min(step, n - start), -1)
        wide = reference.unpack(rows, kind.bits).to(torch.int32) + shift
        wide = pad(wide, (0, 0, 0, lacking if start + step >= n else 0))
        pieces.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 2))
    steps = scales.to(torch.float32)
    offsets = torch.zeros_like(steps)
    if zeros is not None:
        offsets = (kind.middle - reference.zero_points(zeros, kind.bits, blocks)) * steps
    both = torch.stack((steps, offsets), -1).to(torch.bfloat16)
    both = both.repeat_interleave(nbytes * 8 // kind.bits // group, 1).transpose(0, 1)
    return torch.cat(pieces), pad(both, (0, 0, 0, lacking)).contiguous()
