"""Operators that ONNX Runtime's optimizer writes in place of several standard ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.errors import InputError
from qgraph.op_inputs import CONTRIB
from qgraph.runtimes.torch.onnx_ops.attention import causal_mask, fused, rotate, spelled_out
from qgraph.runtimes.torch.onnx_ops.convolution import conv
from qgraph.runtimes.torch.onnx_ops.linear import gemm, multiply
from qgraph.runtimes.torch.table import op


@op("FusedMatMul", domain=CONTRIB)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """Alpha a · b, either transposed; `transBatch` moves the first axis behind the batch axes."""
    a, b = _arranged(a, transA, transBatchA), _arranged(b, transB, transBatchB)
    product = multiply(a, b)
    return product if alpha == 1.0 else product * alpha


def _arranged(x: Tensor, turned: int, batch: int) -> Tensor:
    if batch:
        x = x.movedim(0, -2)
    return x.transpose(-1, -2) if turned else x


@op("FusedGemm", domain=CONTRIB)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str = "",
    activation_alpha: float = 0.0,
    activation_beta: float = 0.0,
    activation_gamma: float = 0.0,
) -> Tensor:
    """Gemm and an activation."""
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(y, activation, (activation_alpha, activation_beta))


@op("FusedConv", domain=CONTRIB)
def fused_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: tuple[float, ...] = (),
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A convolution, plus z, and an activation."""
    y = conv(
        x,
        weight,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    return _activated(y if z is None else y + z, activation, activation_params)


def _activated(x: Tensor, name: str, parameters: tuple[float, ...]) -> Tensor:
    if name == "LeakyRelu":
        return functional.leaky_relu(x, parameters[0])
    if name == "HardSigmoid":
        return torch.clamp(parameters[0] * x + parameters[1], 0, 1)
    if name == "Clip":
        return torch.clamp(x, parameters[0], parameters[1])
    plain = {"": lambda y: y, "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}
    if name not in plain:
        raise InputError(f"activation {name!r} of a fused operator: wanted {', '.join(plain)}")
    return plain[name](x)


@op("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """X / √(mean x² + ε) · scale over the axes from `axis` on."""
    axis = axis + x.ndim if axis < 0 else axis
    return functional.rms_norm(x, x.shape[axis:], scale.to(x.dtype), epsilon)


@op("SkipSimplifiedLayerNormalization", domain=CONTRIB)
def skip_simplified_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    """The RMS normalization of x + skip + bias, and that sum."""
    total = x + skip if bias is None else x + skip + bias
    y = functional.rms_norm(total, total.shape[-1:], gamma.to(total.dtype), epsilon)
    return (y, None, None, total)[:outputs]


@op("SkipLayerNormalization", domain=CONTRIB)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    """The layer normalization of x + skip + bias, and that sum."""
    total = x + skip if bias is None else x + skip + bias
    y = functional.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
    return (y, None, None, total)[:outputs]


@op("Gelu", domain=CONTRIB)
def gelu(x: Tensor) -> Tensor:
    """X · Φ(x)."""
    return functional.gelu(x)


@op("BiasGelu", domain=CONTRIB)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Gelu of x + bias."""
    return functional.gelu(x + bias)


@op("FastGelu", domain=CONTRIB)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu of x + bias, by tanh."""
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


@op("QuickGelu", domain=CONTRIB)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """X · sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


@op("RotaryEmbedding", domain=CONTRIB)
def rotary_embedding(
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """ONNX's RotaryEmbedding with positions in front; one position is the first of a row."""
    flat = x.ndim == 3
    width = 2 * cos_cache.shape[-1]
    heads = x.unflatten(-1, (num_heads or x.shape[-1] // width, -1)).transpose(1, 2) if flat else x
    places = position_ids
    if position_ids.numel() == 1:
        places = position_ids.reshape(1, 1) + torch.arange(heads.shape[2], device=x.device)
    cos, sin = cos_cache[places].unsqueeze(1), sin_cache[places].unsqueeze(1)
    result = rotate(heads, cos, sin, rotary_embedding_dim, interleaved)
    return result.transpose(1, 2).flatten(2) if flat else result


@op("GroupQueryAttention", domain=CONTRIB)
def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    do_rotary: int = 0,
    local_window_size: int = -1,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    outputs: int,
) -> tuple[Tensor, ...]:
    """Causal attention with a cache that grows by the new keys: `[B, L, H·E]` → the same.

    With a past every row must be as long as the longest (`seqlens_k` = past + L - 1), as without
    padding. In a prompt without one, padding on the right is behind all that real tokens see.

    Raises:
        InputError: smooth softmax.
        RuntimeError: rows of different lengths behind a past.
    """
    if smooth_softmax:
        raise InputError("GroupQueryAttention with smooth_softmax runs on ONNX Runtime alone")
    if key is None or value is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        parts = [num_heads * size, kv_num_heads * size, kv_num_heads * size]
        query, key, value = torch.split(query, parts, -1)
    q, k, v = (
        x.unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, heads in ((query, num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        torch._assert_async(
            (seqlens_k == past + q.shape[2] - 1).all(),
            "GroupQueryAttention: rows of different lengths (seqlens_k) run on ONNX Runtime alone",
        )
    if do_rotary and cos_cache is not None and sin_cache is not None:
        stop = past + q.shape[2]
        cos, sin = cos_cache[past:stop], sin_cache[past:stop]
        q, k = (rotate(x, cos, sin, 2 * cos.shape[-1], rotary_interleaved) for x in (q, k))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    mask = causal_mask(q.shape[2], k.shape[2], past, q.device)
    if local_window_size > 0:
        mask = mask & ~causal_mask(q.shape[2], k.shape[2], past - local_window_size, q.device)
    factor = scale or None
    if softcap:
        y, _ = spelled_out(q, k, v, mask, factor, softcap, None, None)
    else:
        y = fused(q, k, v, mask, factor, causal=False)
    return (y.transpose(1, 2).flatten(2), k, v)[:outputs]
