"""Matrix-vector products of decoding: y `[M, N]` for few rows M, bound by the bytes of W.

Each program makes BLOCK_N outputs, its lanes along K: an activation that was loaded serves
BLOCK_N rows of W, and the loads of one row are contiguous. Integers are read where they lie in
their half word, as 2^23 + q·2^place, the power taken back on the activation (exactly), so a
weight costs three instructions: and-or, subtract, multiply-add. Zero points act on sums of
activations, once a word. Levels of other formats cost what `triton_decode.level` does. Scales
multiply the sum over a word, or over a row that has one. Accumulation is float32. Where N alone
does not fill the device, K is split; the parts are added in a fixed order by a second kernel: the
result is deterministic.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qgraph.runtimes.torch import autotune
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.dequantize import Codes
from qgraph.runtimes.torch.triton_decode import (
    INTERPRETED,
    code_arguments,
    level,
    load_scales,
    load_zeros,
    rounded,
)
from qgraph.runtimes.torch.triton_reduce import partials, reduce_splits


@triton.jit
def appended(values: tl.tuple, value: tl.tensor) -> tl.tuple:
    """Give the tuple with one value more; Triton unpacks no tuples."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def load_pair(
    x: tl.tensor, at: tl.tensor, inside: tl.tensor, X16: tl.constexpr, BFLOAT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Two neighbouring activations as float32, by one load where they have 16 bits."""
    if X16:
        pair = tl.load(x + at, mask=inside, other=0)
        if BFLOAT:
            low = (pair << 16).to(tl.float32, bitcast=True)
            high = (pair & -65536).to(tl.float32, bitcast=True)
        else:
            low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = tl.load(x + 2 * at, mask=inside, other=0)
        high = tl.load(x + 2 * at + 1, mask=inside, other=0)
    return low, high


@triton.jit
def field(
    packed: tl.tensor,
    points: tl.tensor,
    table: tl.tensor,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> tl.tensor:
    """float32: code number CODE of each word less its zero point, times 2^(place in the half).

    Levels as they are.
    """
    if NUMBERS > 0:
        return level(packed, CODE * BITS, table, BITS, NUMBERS)
    place: tl.constexpr = CODE * BITS % 16
    unit: tl.constexpr = 1 << place
    half = packed >> 16 if CODE * BITS >= 16 else packed
    value = ((half & (((1 << BITS) - 1) << place)) | 0x4B000000).to(tl.float32, bitcast=True)
    if ZEROS == 2:
        return (value - 8388608.0) - points * unit
    return value - (8388608.0 + (1 << (BITS - 1)) * unit)


@triton.constexpr_function
def first_code(pair: int, order: int) -> int:
    """Which code of a word is the first of pair number `pair` of neighbouring columns."""
    return (2 * pair, 2 * pair + 1, pair % 2 * 4 + pair // 2)[order]


@triton.constexpr_function
def second_code(pair: int, order: int) -> int:
    """Which is the second."""
    return (2 * pair + 1, 2 * pair, pair % 2 * 4 + pair // 2 + 2)[order]


@triton.jit
def matvec_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    words: tl.tensor,
    stride4: tl.tensor,
    blocks: tl.tensor,
    zeros_stride: tl.tensor,
    splits: tl.tensor,
    BITS: tl.constexpr,
    WORDS_IN_BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ORDER: tl.constexpr,
    STEPS: tl.constexpr,
    SHARED: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    X16: tl.constexpr,
    BFLOAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """out: y `[ROWS, n]` if splits is 1, else float32 `[splits, ROWS, n]`.

    x: `[ROWS, words·32/BITS]`, as int32 pairs if X16 (of bfloat16 if BFLOAT, else float16).
    """
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < n
    pairs: tl.constexpr = 16 // BITS
    empty = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    acc = (empty,) * ROWS
    HAS_TENSOR: tl.constexpr = NUMBERS > 0 and ZEROS > 0
    if ONE_BLOCK:
        one = tl.arange(0, 1)
        steps = load_scales(
            scales, zeros, rows, live, blocks, one, one == 0, STEPS, SHARED, HAS_TENSOR
        )
    for start in tl.range(split * BLOCK_W, words, splits * BLOCK_W, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_W)
        inside = at < words
        where = rows[:, None] * (stride4 * 4) + at[None, :]
        packed = tl.load(codes + where, mask=live[:, None] & inside[None, :], other=0)
        block = at // WORDS_IN_BLOCK
        if not ONE_BLOCK:
            steps = load_scales(
                scales, zeros, rows, live, blocks, block, inside, STEPS, SHARED, HAS_TENSOR
            )
        points = empty
        if NUMBERS == 0 and ZEROS > 0:
            points = load_zeros(zeros, rows, live, zeros_stride, block, inside, BITS, ZEROS)
        sums = (empty,) * ROWS
        totals = (tl.zeros([BLOCK_W], tl.float32),) * ROWS
        for pair in tl.static_range(pairs):
            low = field(packed, points, table, first_code(pair, ORDER), BITS, ZEROS, NUMBERS)
            high = field(packed, points, table, second_code(pair, ORDER), BITS, ZEROS, NUMBERS)
            if ORDER == 2:
                x_at = at // 4 * 16 + at % 4 * 2 + pair // 2 * 8 + pair % 2
            else:
                x_at = at * pairs + pair
            new_sums = ()
            new_totals = ()
            for row in tl.static_range(ROWS):
                x_low, x_high = load_pair(x, row * words * pairs + x_at, inside, X16, BFLOAT)
                new_totals = appended(new_totals, totals[row] + x_low + x_high)
                if NUMBERS == 0:
                    x_low = x_low * (1.0 / (1 << (2 * pair * BITS % 16)))
                    x_high = x_high * (1.0 / (1 << ((2 * pair + 1) * BITS % 16)))
                new_sums = appended(
                    new_sums, sums[row] + low * x_low[None, :] + high * x_high[None, :]
                )
            sums = new_sums
            totals = new_totals
        new_acc = ()
        for row in tl.static_range(ROWS):
            part = sums[row]
            if NUMBERS == 0 and ZEROS == 1:
                part -= (points - (1 << (BITS - 1))) * totals[row][None, :]
            if not ONE_BLOCK:
                part *= steps
            new_acc = appended(new_acc, acc[row] + part)
        acc = new_acc
    for row in tl.static_range(ROWS):
        y = tl.sum(acc[row] * steps if ONE_BLOCK else acc[row], axis=1)
        if HAS_BIAS:
            y += tl.load(bias + rows, mask=live, other=0).to(tl.float32)
        tl.store(out + (split * ROWS + row) * n + rows, rounded(y, out, INTERPRETED), mask=live)


@functools.cache
def configs(m: int, n: int, words: int) -> tuple[Config, ...]:
    """What is tried on a device, the best guess first."""
    widest = max(32, triton.next_power_of_2(words))
    stages = 3 if m <= 2 else 1  # each activation's load becomes a stage of its own: too many
    found = []
    for warps, per_thread, block_n in (
        (4, 1, 16), (4, 2, 8), (2, 4, 8), (1, 1, 16), (4, 1, 8), (4, 4, 4), (4, 1, 4),
    ):  # fmt: skip
        if per_thread * block_n * m > 64:  # the accumulators outgrow the registers
            continue
        block_w = min(32 * warps * per_thread, widest)
        for splits in (1, 2, 4):
            if splits == 1 or splits * block_w < words:
                found.append(Config(block_n, block_w, splits, warps, stages))
    most = 8 if m <= 2 else 4  # more rows take longer to compile, and matter less
    return autotune.by_occupancy(found, n, most)


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    kind: Codes,
    config: Config | None = None,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, k]`; see `ops.linear`. `config` None is tuned on a device."""
    m, n = x.shape[0], codes.shape[0]
    arguments, constants = code_arguments(codes, scales, zeros, kind)
    words = arguments["words"]
    pad = words * 32 // kind.bits - k
    flat = (torch.nn.functional.pad(x, (0, pad)) if pad else x).contiguous()
    pairs = x.element_size() == 2

    def run(config: Config) -> Tensor:
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        out = y if config.splits == 1 else partials(config.splits, y)
        matvec_kernel[(triton.cdiv(n, config.block_n), config.splits)](
            flat.view(torch.int32) if pairs else flat,
            **arguments,
            bias=x if bias is None else bias,
            out=out,
            n=n,
            splits=config.splits,
            **constants,
            ONE_BLOCK=codes.shape[1] == 1,
            X16=pairs,
            BFLOAT=x.dtype == torch.bfloat16,
            ROWS=m,
            HAS_BIAS=bias is not None and config.splits == 1,
            INTERPRETED=INTERPRETED,
            **config.constants(),
        )
        return y if config.splits == 1 else reduce_splits(out, bias, y)

    if config is None:
        rows = triton.next_power_of_2(m)
        key = ("matvec", x.dtype, rows, n, k, *constants.values())
        config = autotune.best(key, configs(rows, n, words), run)
    return run(config)
