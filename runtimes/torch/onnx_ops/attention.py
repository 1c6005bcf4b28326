"""Attention and rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from qgraph.runtimes.torch.onnx_ops.host import DTYPES
from qgraph.runtimes.torch.table import op


@op("Attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    """softmax(q kᵀ · scale + mask) v for `[B, H, L, E]` or `[B, L, H·E]`, and the new cache.

    Fewer heads of k and v than of q are shared by neighbouring ones. The causal mask lets query
    i see the keys up to past + i; a window, so many before that and behind it.
    """
    flat = q.ndim == 3
    if flat:
        assert q_num_heads is not None
        assert kv_num_heads is not None
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    offset: int | Tensor = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    elif nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen.reshape(-1, 1, 1, 1) - q.shape[2]
    mask = _padded(attn_mask, k.shape[2])
    if nonpad_kv_seqlen is not None:
        keys = torch.arange(k.shape[2], device=q.device)
        mask = _and(mask, keys < nonpad_kv_seqlen.reshape(-1, 1, 1, 1))
    windowed = left_window_size >= 0 or right_window_size >= 0
    aligned = past_key is None and nonpad_kv_seqlen is None and mask is None and not windowed
    if is_causal and not aligned:
        mask = _and(mask, causal_mask(q.shape[2], k.shape[2], offset, q.device))
    causal = bool(is_causal) and aligned
    if windowed:
        mask = _and(mask, _window(q, k, offset, left_window_size, right_window_size))
    if outputs > 3 or softcap or softmax_precision not in (None, 1):
        if causal:
            mask = causal_mask(q.shape[2], k.shape[2], 0, q.device)
        mode = qk_matmul_output_mode if outputs > 3 else None
        y, scores = spelled_out(q, k, v, mask, scale, softcap, softmax_precision, mode)
    else:
        y, scores = fused(q, k, v, mask, scale, causal), None
    if flat:
        y = y.transpose(1, 2).flatten(2)
    return (y, k, v, scores)[:outputs]


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[B, L, H·E]` → `[B, H, L, E]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _padded(mask: Tensor | None, length: int) -> Tensor | None:
    """A mask whose last axis is too short hides the keys that it does not name."""
    if mask is None or mask.shape[-1] == length:
        return mask
    fill = False if mask.dtype == torch.bool else float("-inf")
    return functional.pad(mask, (0, length - mask.shape[-1]), value=fill)


def _and(mask: Tensor | None, seen: Tensor) -> Tensor:
    """A mask that also hides what is not seen."""
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return mask & seen
    return torch.where(seen, mask, float("-inf"))


def causal_mask(queries: int, keys: int, offset: int | Tensor, device: torch.device) -> Tensor:
    """Whether query i sees key j: j <= i + offset."""
    rows = torch.arange(queries, device=device)[:, None]
    return torch.arange(keys, device=device) <= rows + offset


def _window(q: Tensor, k: Tensor, offset: int | Tensor, left: int, right: int) -> Tensor:
    """Whether key j lies within the window around query i, which stands at i + offset."""
    places = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    keys = torch.arange(k.shape[2], device=q.device)
    seen = keys <= places + right if right >= 0 else torch.ones_like(keys <= places)
    return seen & (keys >= places - left) if left >= 0 else seen


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool
) -> Tensor:
    """Torch's fused attention, in the dtype of q."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    shared = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=shared,
    )


def spelled_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
    precision: int | None,
    mode: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The same step by step, for what the fused one lacks; and the scores that `mode` asks for.

    mode: 0 products, 1 after the cap, 2 after the mask, 3 after the softmax.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    stages = [torch.matmul(q * root, k.transpose(-1, -2) * root)]
    stages.append(torch.tanh(stages[0] / softcap) * softcap if softcap else stages[0])
    stages.append(_masked(stages[1], mask))
    wide = stages[2] if precision is None else stages[2].to(DTYPES[precision])
    # A row that sees no key is all NaN; it counts as zeros.
    hidden = (stages[2] == float("-inf")).all(-1, keepdim=True)
    stages.append(torch.where(hidden, 0.0, torch.softmax(wide, -1)).to(q.dtype))
    y = torch.matmul(stages[3], v.to(q.dtype))
    return y, None if mode is None else stages[mode]


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, float("-inf"))
    return scores + mask.to(scores.dtype)


@op("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Pairs of channels turned by the angles of their positions (Su et al., 2021).

    x: `[B, H, L, E]` or `[B, L, H·E]`; the caches `[P, E/2]` with positions `[B, L]`, or
    `[B, L, E/2]` without.
    """
    flat = x.ndim == 3
    heads = _heads(x, num_heads) if flat else x
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    result = rotate(
        heads, cos_cache.unsqueeze(1), sin_cache.unsqueeze(1), rotary_embedding_dim, interleaved
    )
    return result.transpose(1, 2).flatten(2) if flat else result


def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: int) -> Tensor:
    """`[B, H, L, E]`, its first `width` channels (all, where 0) turned by angles `[…, L, E/2]`."""
    width = width or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        result = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        result = torch.cat([real, imaginary], -1)
    result = result.to(x.dtype)
    return result if width == x.shape[-1] else torch.cat([result, rest], -1)
