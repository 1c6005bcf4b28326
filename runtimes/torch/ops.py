"""The quantized ops of torch graphs, in the library `qgraph`; a saved `.pt2` needs only this file.

    qgraph::linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias,
                   int k, str format) -> Tensor
    qgraph::dequantize(Tensor codes, Tensor scales, Tensor? zeros, int k, str format) -> Tensor
    qgraph::embedding(Tensor ids, Tensor codes, Tensor scales, Tensor? zeros,
                      int k, str format) -> Tensor
    qgraph::linear_fp8_block(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor
    qgraph::linear_fp8_w8a8(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor

The schemas never change: files in the field depend on them. `format` is a layout with its
version, the name of the format's ONNX function without "Dequantize": `Int4V1`, `Nf4V1`.
Codes lie as `Layout("blocks")`; `zeros` is the third part of formats that have another one, a
scale of the tensor or nested scales. Which kernel runs is `backends.ladder`'s decision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch import backends, fp8_products, gradients, levels
from qgraph.runtimes.torch import dequantize as reference

LIBRARY = torch.library.Library("qgraph", "FRAGMENT")
SCHEMAS = {
    "linear": (
        "(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, "
        "int k, str format) -> Tensor"
    ),
    "dequantize": "(Tensor codes, Tensor scales, Tensor? zeros, int k, str format) -> Tensor",
    "embedding": (
        "(Tensor ids, Tensor codes, Tensor scales, Tensor? zeros, int k, str format) -> Tensor"
    ),
    "linear_fp8_block": "(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
    "linear_fp8_w8a8": "(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
}


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    layout: str,
) -> Tensor:
    """Compute y `[…, N]` = x · Wᵀ (+ bias), in x's dtype.

    x: `[…, k]` float32, float16 or bfloat16; codes: u8 `[N, nb, bytes]`; scales: float
    `[N, nb]`; zeros: u8 `[N, ceil(nb·bits/8)]`, float `[N, nb]` or None; bias: `[N]`.

    Raises:
        InputError: a shape, dtype or device that no backend takes.
    """
    _check_codes(codes, scales, zeros, k, layout)
    _check_activation(x, k)
    _check_bias(bias, x, codes.shape[0])
    y = backends.linear(x.reshape(-1, k), codes, scales, zeros, bias, k, layout)
    return y.view(*x.shape[:-1], codes.shape[0])


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str) -> Tensor:
    """W `[N, k]` in the dtype of the scales, float32 where those are codes; see `linear`."""
    _check_codes(codes, scales, zeros, k, layout)
    dtype = reference.float_type(scales)
    return backends.dequantize(codes, scales, zeros, k, layout, dtype)


def embedding(
    ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str
) -> Tensor:
    """W[ids] `[…, k]`, in the dtype of `dequantize`; negative ids count from the end.

    ids: integers from -N to N - 1.

    Raises:
        InputError: on the CPU an id that is none of these; a GPU stops with torch's own error.
    """
    _check_codes(codes, scales, zeros, k, layout)
    at = _places(ids, codes.shape[0]).reshape(-1)
    rows = reference.take(at, codes, scales, zeros, k, layout)
    return rows.view(*ids.shape, k)


def linear_fp8_block(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y `[…, N]` = x · Wᵀ (+ bias) in x's dtype, W in FP8 with a scale for 128 × 128.

    W[n, k] = weight[n, k]·scales[n // 128, k // 128].
    x: `[…, K]`; weight: float8_e4m3fn `[N, K]`; scales: float32 `[ceil(N/128), ceil(K/128)]`.

    Raises:
        InputError: a shape, dtype or device that no backend takes.
    """
    _check_fp8(weight, scales)
    _check_activation(x, weight.shape[1])
    _check_bias(bias, x, weight.shape[0])
    y = backends.linear_fp8_block(x.reshape(-1, weight.shape[1]), weight, scales, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_fp8_w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear_fp8_block`, with x rounded to FP8 too: each row by scales for 128 columns.

    The scales of x are amax / 448; sums of 128 products are float32, and rescaled one by one.
    The gradient is that of `linear_fp8_block`: rounding x counts for nothing in it.

    Raises:
        InputError: a shape, dtype or device that no backend takes.
    """
    _check_fp8(weight, scales)
    _check_activation(x, weight.shape[1])
    _check_bias(bias, x, weight.shape[0])
    y = backends.linear_fp8_w8a8(x.reshape(-1, weight.shape[1]), weight, scales, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _linear_fake(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    layout: str,
) -> Tensor:
    _check_activation(x, k)
    _check_bias(bias, x, codes.shape[0])
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _dequantize_fake(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str
) -> Tensor:
    return scales.new_empty(codes.shape[0], k, dtype=reference.float_type(scales))


def _embedding_fake(
    ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str
) -> Tensor:
    return scales.new_empty(*ids.shape, k, dtype=reference.float_type(scales))


def _linear_fp8_block_fake(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    _check_activation(x, weight.shape[1])
    _check_bias(bias, x, weight.shape[0])
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _check_activation(x: Tensor, k: int) -> None:
    if x.dtype not in reference.FLOATS:
        raise InputError(f"x of {x.dtype}: wanted float32, float16 or bfloat16")
    if x.ndim == 0 or x.shape[-1] != k:
        raise InputError(f"x of {tuple(x.shape)}: wanted {k} columns")


def _check_bias(bias: Tensor | None, x: Tensor, n: int) -> None:
    if bias is None:
        return
    if bias.ndim != 1 or bias.shape[0] != n or bias.dtype not in reference.FLOATS:
        found = f"{bias.dtype} {tuple(bias.shape)}"
        raise InputError(f"bias of {found}: wanted floats of {(n,)}, one for each row of W")
    if bias.device != x.device:
        raise InputError(f"bias on {bias.device}, x on {x.device}: move one of them")


def _places(ids: Tensor, n: int) -> Tensor:
    """Ids counted from the front, int64; N for those below -N, so that indexing stops at them."""
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise InputError(f"ids of {ids.dtype}: wanted integers")
    wide = ids.to(torch.int64)
    at = torch.where(wide < 0, wide + n, wide)
    out = (at < 0) | (at >= n)
    if at.device.type == "cpu" and bool(out.any()):
        raise InputError(f"id {wide[out][0].item()} of a table of {n} rows: wanted {-n} to {n - 1}")
    return torch.where(out, n, at)


def _check_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str) -> None:
    """Raise InputError unless the parts of a weight fit together."""
    if codes.dtype != torch.uint8 or codes.ndim != 3:
        raise InputError(
            f"codes of {codes.dtype} {tuple(codes.shape)}: wanted uint8 [N, nb, bytes]"
        )
    kind = reference.codes_of(layout)
    if kind is None:
        return
    n, blocks, nbytes = codes.shape
    width = blocks * nbytes * 8 // kind.bits
    if not width - nbytes * 8 // kind.bits < k <= width:
        raise InputError(f"{layout} codes {tuple(codes.shape)} hold {width} columns, not k = {k}")
    if isinstance(kind, reference.IntegerCodes):
        _check_integers(kind, scales, zeros, n, blocks, layout)
    else:
        levels.check(kind, scales, zeros, n, blocks)


def _check_integers(
    kind: reference.IntegerCodes,
    scales: Tensor,
    zeros: Tensor | None,
    n: int,
    blocks: int,
    layout: str,
) -> None:
    if tuple(scales.shape) != (n, blocks) or scales.dtype not in reference.FLOATS:
        found = f"{scales.dtype} {tuple(scales.shape)}"
        raise InputError(f"scales of {found}: wanted floats of {(n, blocks)}, one for each block")
    reference.check_zeros(zeros, kind, layout)
    if zeros is not None:
        packed = zeros.dtype == torch.uint8
        wanted = (n, -(-blocks * kind.bits // 8) if packed else blocks)
        if tuple(zeros.shape) != wanted or not (packed or zeros.dtype in reference.FLOATS):
            found = f"{zeros.dtype} {tuple(zeros.shape)}"
            raise InputError(f"zero points of {found}: wanted {wanted} (uint8 packed, or floats)")


def _check_fp8(weight: Tensor, scales: Tensor) -> None:
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        found = f"{weight.dtype} {tuple(weight.shape)}"
        raise InputError(f"weight of {found}: wanted float8_e4m3fn [N, K]")
    wanted = tuple(-(-size // fp8_products.BLOCK) for size in weight.shape)
    if scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
        found = f"{scales.dtype} {tuple(scales.shape)}"
        raise InputError(f"scales of {found}: wanted float32 {wanted}, one for 128 × 128 weights")


for _name, _body, _fake in (
    ("linear", linear, _linear_fake),
    ("dequantize", dequantize, _dequantize_fake),
    ("embedding", embedding, _embedding_fake),
    ("linear_fp8_block", linear_fp8_block, _linear_fp8_block_fake),
    ("linear_fp8_w8a8", linear_fp8_w8a8, _linear_fp8_block_fake),
):
    LIBRARY.define(_name + SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qgraph::{_name}", _fake, lib=LIBRARY)
gradients.register(LIBRARY)
